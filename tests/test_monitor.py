"""`MemoryMonitor`: every step of a training, written while it runs, and never in its way."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tb_memplugin.record.monitor
from tb_memplugin import MemoryMonitor, MemPluginError
from tb_memplugin.record.steps.counters import AllocatorCounters, SharedPeaks
from tb_memplugin.record.steps.recording import Allowance
from tb_memplugin.record.whole_device.host import host_memory
from tb_memplugin.store import files
from tb_memplugin.store.step_records import read_figures
from tb_memplugin.trace.step_figures import joined
from tests import full_disk
from tests.counting_allocator import CountingAllocator, Handle
from tests.store.test_step_records import values_of
from tests.training import MODELS

NAN = float("nan")


def written(folder):
    """The figures of all steps in a worker's folder, None where there are none."""
    parts = [
        read_figures(value.tensor.string_val[0])
        for path in sorted(Path(folder).glob("events*"))
        for _, value in values_of(path).get("memory/steps", [])
    ]
    return joined(parts) if parts else None


def monitor_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tb_memplugin monitor"]


@pytest.fixture
def allocator():
    return CountingAllocator()


@pytest.fixture
def handle():
    return Handle()


@pytest.fixture
def on_a_card(allocator, handle, monkeypatch):
    """As if the current device were one with counters."""
    peaks = SharedPeaks(allocator.doors)
    counters = lambda *_, **__: [AllocatorCounters(handle, lambda: peaks)]  # noqa: E731
    monkeypatch.setattr(tb_memplugin.record.monitor, "counters_of", counters)


def train(monitor, steps=3):
    torch.manual_seed(0)
    model = MODELS["cnn"]()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        x, y = model.batch()
        with monitor.phase("forward"):
            loss = F.cross_entropy(model(x), y)
        with monitor.phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_on_a_machine_without_an_accelerator_it_is_the_memory_of_the_process(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        train(monitor)
        told = monitor.last_step
    there = written(tmp_path / "rank0.steps")
    assert there.steps.tolist() == [0, 1, 2]
    (device,) = there.devices
    assert (device.name, device.kind, device.end_reserved) == ("process", "process", None)
    assert [phase.name for phase in there.phases] == ["forward", "backward"]
    assert told is not None
    assert there.durations_ns[-1] == told.duration_ns
    assert (device.peak[-1], device.end[-1]) == (told.devices[0].peak_allocated, told.devices[0].allocated)
    if sys.platform == "linux":
        assert set(device.whole_total.tolist()) == {host_memory(children=False).total}
        assert 0 < device.whole_free.min() < device.whole_total[0]


@pytest.mark.usefixtures("on_a_card")
def test_what_is_written_is_what_the_allocator_counted(tmp_path, allocator):
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        allocator.allocate(1000)
        for size in (300, 500):
            with monitor.phase("forward"):
                allocator.allocate(size)
            with monitor.phase("backward"):
                allocator.briefly(100)
                allocator.allocate(-size)
            allocator.retries += 1
            monitor.step()
    there = written(tmp_path / "rank0.steps")
    (device,) = there.devices
    assert device.peak.tolist() == [1400, 1600]
    assert device.end.tolist() == [1000, 1000]
    assert device.peak_reserved.tolist() == [1400, 1600]
    assert device.retries.tolist() == [1, 1]
    assert device.allocations.tolist() == [3, 2]
    assert (device.whole_free.tolist(), device.whole_total.tolist()) == ([60_000] * 2, [100_000] * 2)
    assert device.end_requested is None
    forward, backward = there.phases
    assert forward.devices[0].peak.tolist() == [1300, 1500]
    assert backward.devices[0].end.tolist() == [1000, 1000]
    assert allocator.user_peak() == 1600


def test_training_is_the_same_to_the_bit(tmp_path):
    class Nobody:
        def phase(self, _):
            return threading.Lock()  # a block that does nothing

        def step(self):
            pass

    with MemoryMonitor(tmp_path, "rank0") as monitor:
        watched = train(monitor)
    assert all(map(torch.equal, watched, train(Nobody())))


@pytest.mark.usefixtures("on_a_card")
def test_steps_are_on_disk_while_the_training_runs(tmp_path):
    monitor = MemoryMonitor(tmp_path, "rank0", flush_seconds=0.05)
    monitor.step()
    end = time.monotonic() + 20
    while written(tmp_path / "rank0.steps") is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    monitor.step()
    monitor.flush()
    assert len(written(tmp_path / "rank0.steps")) == 2
    monitor.close()


def test_what_a_durable_monitor_flushes_is_on_the_disk_each_time(tmp_path, monkeypatch):
    flushed, flush_path = list[str](), files.flush_path

    def slowly(path):
        time.sleep(0.02)
        flush_path(path)
        flushed.append(path)

    monkeypatch.setattr(files, "flush_path", slowly)
    monitor = MemoryMonitor(tmp_path, "rank0", flush_seconds=1000, durable=True)
    for times in (1, 2):  # the second one well within the pause that others make between flushes
        monitor.step()
        monitor.flush()
        (events,) = (tmp_path / "rank0.steps").glob("events.*")
        assert flushed.count(str(events)) == times
    monitor.close()


@pytest.mark.usefixtures("on_a_card")
def test_counters_that_fail_end_the_watching_not_the_training(tmp_path, allocator, caplog):
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        assert monitor.step() is not None
        allocator.broken = True
        with monitor.phase("forward"):
            pass
        assert monitor.step() is None
        assert monitor.step() is None
    assert len(written(tmp_path / "rank0.steps")) == 1
    assert caplog.text.count("The training continues") == 1
    assert "the driver is gone" in caplog.text


@pytest.mark.usefixtures("on_a_card")
def test_an_allocator_that_tells_nothing_from_the_start_ends_no_training(tmp_path, allocator, caplog):
    allocator.broken = True  # torch's pluggable allocators have no counters
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        assert monitor.step() is None
    assert caplog.text.count("The training continues") == 1
    assert not (tmp_path / "rank0.steps").exists()


@pytest.mark.usefixtures("on_a_card")
def test_where_no_thread_can_start_the_loop_writes_as_often(tmp_path, monkeypatch, caplog):
    def fail(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with MemoryMonitor(tmp_path, "rank0", flush_seconds=1000) as monitor:
        assert all(monitor.step() is not None for _ in range(3))
        assert len(written(tmp_path / "rank0.steps")) == 1
    assert len(written(tmp_path / "rank0.steps")) == 3
    assert caplog.text == ""


@pytest.mark.usefixtures("on_a_card")
def test_steps_wait_while_the_folder_cannot_be_written(tmp_path, caplog):
    (tmp_path / "runs").write_text("a file where a folder should be")
    monitor = MemoryMonitor(tmp_path / "runs", "rank0")
    for _ in range(3):
        monitor.step()
        monitor.flush()
    assert caplog.text.count("could not be written") == 1
    (tmp_path / "runs").unlink()
    monitor.close()
    assert len(written(tmp_path / "runs" / "rank0.steps")) == 3


@pytest.mark.usefixtures("on_a_card")
def test_of_steps_that_waited_too_long_the_oldest_go_and_that_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tb_memplugin.record.steps.recording.MOST_WAITING", 10)
    with MemoryMonitor(tmp_path, "rank0", flush_seconds=600) as monitor:
        for _ in range(25):
            monitor.step()
    there = written(tmp_path / "rank0.steps")
    assert there.steps.tolist() == list(range(15, 25))
    assert there.notes == ("15 steps could not be written and are missing.",)
    assert there.notes[0].code == "steps_missing"


@pytest.mark.usefixtures("on_a_card")
def test_steps_too_short_for_the_allowed_cost_have_figures_together_and_that_is_told(tmp_path, allocator):
    with MemoryMonitor(tmp_path, "rank0", flush_seconds=600, max_overhead=1e-9) as monitor:
        for size in range(1, 13):
            allocator.allocate(size)
            assert (monitor.step() is None) == (size > 10)
        monitor._allowance, joining = Allowance(None), monitor._allowance
        monitor.step()
        monitor._allowance = joining
        allocator.allocate(100)
        assert (monitor.step(), monitor.step()) == (None, None)
    there = written(tmp_path / "rank0.steps")
    assert there.steps.tolist() == [*range(10), 12, 14]
    assert there.devices[0].allocations.tolist() == [1] * 10 + [2, 1]
    assert there.devices[0].peak.tolist()[-2:] == [78, 178]  # 1 + 2 + ... + 12, and 100 more
    assert (there.step_count, there.steps_of(9), there.steps_of(10)) == (15, "step 9", "steps 10 to 12")
    assert [note.code for note in there.notes] == ["steps_joined"]


@pytest.mark.usefixtures("on_a_card")
def test_an_error_in_the_training_passes_through_and_ends_its_phase(tmp_path, allocator):
    with pytest.raises(KeyError), MemoryMonitor(tmp_path, "rank0") as monitor:  # noqa: PT012
        monitor.step()
        with monitor.phase("forward"):
            allocator.briefly(8)
            raise KeyError("of the user")
    assert len(written(tmp_path / "rank0.steps")) == 1
    assert monitor_threads() == []


@pytest.mark.usefixtures("on_a_card")
def test_a_thousand_steps_with_errors_and_ends_that_never_come(tmp_path, allocator):
    told: list[Any] = []
    expected = []
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        for number in range(1000):
            monitor.phase("never ended").__enter__()
            with suppress(KeyError), monitor.phase("forward"), monitor.phase("loss"):
                allocator.briefly(1000 + number)
                if number % 3 == 0:
                    raise KeyError("of the user")
            if number % 10 != 5:  # every tenth step is never ended: it is one with the next
                told.append(monitor.step())
                expected.append((1000 + number, 2 if number % 10 == 6 else 1))
        assert len(monitor._recording._phases) == 0
    assert [(one.devices[0].peak_allocated, one.phases[0].count) for one in told] == expected
    assert {phase.name for one in told for phase in one.phases} == {"forward", "loss"}
    assert written(tmp_path / "rank0.steps").devices[0].peak.tolist() == [peak for peak, _ in expected]


@pytest.mark.usefixtures("on_a_card")
def test_one_phase_object_may_stand_inside_itself(tmp_path, allocator):
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        block = monitor.phase("recursion")
        with block:
            allocator.briefly(8)
            with block:
                allocator.briefly(3)
        step: Any = monitor.step()
    (phase,) = step.phases
    assert (phase.count, phase.peak_bytes) == (2, (8,))


@pytest.mark.usefixtures("on_a_card")
def test_numbers_of_steps_may_be_given_and_must_rise(tmp_path, caplog):
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        for number in (1000, 1010, 1010, None):
            monitor.step(number)
    assert written(tmp_path / "rank0.steps").steps.tolist() == [1000, 1010, 1011, 1012]
    assert "Step 1010 does not follow" in caplog.text


@pytest.mark.usefixtures("on_a_card")
def test_a_device_that_nobody_uses_is_written_at_the_end_as_zeros(tmp_path, handle):
    handle.used = False
    monitor = MemoryMonitor(tmp_path, "rank0")
    monitor.step()
    monitor.flush()
    assert written(tmp_path / "rank0.steps") is None  # which device it will be is not known yet
    monitor.close()
    assert written(tmp_path / "rank0.steps").devices[0].peak.tolist() == [0]


@pytest.mark.usefixtures("on_a_card")
def test_a_monitor_that_is_forgotten_writes_the_rest_and_its_thread_ends(tmp_path, allocator):
    monitor = MemoryMonitor(tmp_path, "rank0", flush_seconds=600)
    monitor.step()
    del monitor
    gc.collect()
    assert monitor_threads() == []
    assert len(written(tmp_path / "rank0.steps")) == 1
    resets = allocator.resets
    allocator.user_peak()
    assert allocator.resets == resets


@pytest.mark.usefixtures("on_a_card")
def test_nothing_is_written_where_no_step_ended_and_closing_twice_is_fine(tmp_path):
    monitor = MemoryMonitor(tmp_path / "runs", "rank0")
    monitor.close()
    monitor.close()
    assert monitor.step() is None
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.usefixtures("on_a_card")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_forked_writes_nothing_of_ours(tmp_path):
    monitor = MemoryMonitor(tmp_path, "rank0", flush_seconds=600)
    monitor.step()
    child = os.fork()
    if child == 0:
        told = monitor.step()
        monitor.close()
        os._exit(0 if told is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    monitor.step()
    monitor.close()
    assert written(tmp_path / "rank0.steps").steps.tolist() == [0, 1]


def test_a_training_that_forgets_to_close_has_all_its_steps(tmp_path):
    code = f"""
from tb_memplugin import MemoryMonitor
monitor = MemoryMonitor({str(tmp_path)!r}, "rank0", device="process", flush_seconds=600)
for _ in range(5):
    monitor.step()
raise SystemExit("the user's error")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    recorded = f"tb_memplugin: figures of steps recorded in {tmp_path}"
    assert done.stderr.splitlines()[:2] == ["the user's error", recorded]
    assert len(written(tmp_path / "rank0.steps")) == 5


def test_what_a_thread_does_while_the_process_ends_is_no_error(tmp_path, caplog):
    monitor = MemoryMonitor(tmp_path, "rank0")
    monitor.step()
    monitor._end()  # as `atexit` does
    with monitor.phase("forward"):
        monitor.step()
    assert caplog.records == []


@pytest.mark.parametrize("device", ["cpu", "process", torch.device("cpu"), ["cpu", "process"]])
def test_the_cpu_is_the_process(tmp_path, device):
    with MemoryMonitor(tmp_path, "rank0", device=device) as monitor:
        step = monitor.step()
    assert step is not None
    assert [one.device for one in step.devices] == ["process"]


def test_a_device_that_is_not_here_is_refused_and_says_what_to_do(tmp_path):
    with pytest.raises(MemPluginError, match="This machine has no device 'xpu:7'"):
        MemoryMonitor(tmp_path, device="xpu:7")
    with pytest.raises(MemPluginError, match="No device"):
        MemoryMonitor(tmp_path, device=[])


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "monitor.md").read_text("utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    names = {
        "model": lambda batch: model(batch).sum(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [torch.ones(2, 4)] * 3,
    }
    exec(compile(code, "docs/monitor.md", "exec"), names)  # our own page
    (folder,) = (tmp_path / "runs" / "a").iterdir()
    assert [phase.name for phase in written(folder).phases] == ["forward", "backward"]
    assert len(written(folder)) == 3


def test_debug_tells_the_traceback(tmp_path, caplog, on_a_card, allocator):
    with caplog.at_level(logging.DEBUG, "tb_memplugin"), MemoryMonitor(tmp_path, "rank0") as monitor:
        allocator.broken = True
        monitor.step()
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "gpu"},
        {"device": 3},
        {"device": []},
        {"flush_seconds": 0},
        {"flush_seconds": NAN},
        {"max_overhead": 0},
    ],
)
def test_wrong_values_are_refused_at_once(tmp_path, wrong):
    with pytest.raises(MemPluginError):
        MemoryMonitor(tmp_path, **wrong)
    assert not monitor_threads()


@pytest.mark.parametrize("wrong", [{"worker_name": 5}, {"flush_seconds": "soon"}, {"max_overhead": "1 %"}])
def test_arguments_of_a_wrong_type_are_refused_at_once(tmp_path, wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        MemoryMonitor(tmp_path, **wrong)


def test_numbers_that_are_none_are_counted_on_and_told_once(tmp_path, caplog):
    """A loop that gives the number within the epoch gives falling ones, over and over."""
    with MemoryMonitor(tmp_path, "w", device="cpu") as monitor:
        given: list[Any] = [5, 0, 1, "7", 2**70, 1.5, float("nan"), torch.tensor(20)]
        told = [monitor.step(number) for number in given]
    assert [one.step for one in told if one is not None] == [5, 6, 7, 8, 9, 10, 11, 20]
    assert [record.message for record in caplog.records if "does not follow" in record.message] == [
        "Step 0 does not follow the step before it, so steps are numbered on from there. This is logged once."
    ]
    figures = written(tmp_path / "w.steps")
    assert figures is not None
    assert figures.steps.tolist() == [5, 6, 7, 8, 9, 10, 11, 20]


@pytest.mark.parametrize("freed", [True, False])
def test_a_full_disk_is_one_warning_and_once_it_is_free_one_folder_has_every_step(tmp_path, freed):
    code = f"""
from tb_memplugin import MemoryMonitor
monitor = MemoryMonitor(FOLDER, "w", device="cpu")
fill(0)
for _ in range(5):
    monitor.step()
    monitor.flush()
if {freed}:
    free()
monitor.close()
"""
    said = full_disk.run(code, str(tmp_path)).stderr
    assert said.count("could not be written") == 1
    assert "what is not taken by then is lost" in said
    assert [path.name for path in tmp_path.iterdir()] == ["w.steps"]
    figures = written(tmp_path / "w.steps")
    assert (figures and figures.steps.tolist()) == ([0, 1, 2, 3, 4] if freed else None)
