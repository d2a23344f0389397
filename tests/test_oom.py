"""When memory runs out, what filled it is written, and the error goes on as it was."""

from __future__ import annotations

import gc
import inspect
import logging
import mmap
import pickle
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import container, linear
from torch.utils._traceback import CapturedTraceback

import tb_memplugin
from tb_memplugin.record import oom
from tb_memplugin.record.history.allocators import HistorySwitch
from tb_memplugin.record.oom import OomRecorder, record_on_oom
from tb_memplugin.record.whole_device.card import CardMemory
from tb_memplugin.store.reader import load_window, read_recordings
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import DevicePart, Kind, Moment
from tests.allocators import StandIn
from tests.read.layers.stacks import CALL, MAIN, modules, snapshot_of
from tests.read.snapshot.test_real import path_of, real
from tests.snapshots import load_plain, load_snapshot
from tests.traces import trace


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="tb_memplugin")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "tb_memplugin"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(oom, "card_memory", lambda _name: None)  # there is none behind a stand-in
    return StandIn()


@pytest.fixture
def recording(tmp_path, gpu):
    """A recorder on the stand-in GPU that is closed after the test."""
    made = []

    def begin(folder=tmp_path, *, on=gpu, observes=True, switch=None, **options) -> OomRecorder:
        recorder = OomRecorder(str(folder), "w", **options)
        recorder.begin([on.as_allocator(observes=observes)], switch=switch or HistorySwitch())
        made.append(recorder)
        return recorder

    yield begin
    for recorder in made:
        recorder.close()


def runs(folder) -> list[str]:
    found = read_recordings(str(folder))
    assert found.problems == ()
    return [step.metadata.worker for step in found.steps]


def test_it_is_a_public_name():
    assert tb_memplugin.record_on_oom is record_on_oom


class TestWithoutAGpu:
    @pytest.fixture(autouse=True)
    def _no_gpu(self):
        if torch.cuda.is_available() or torch.xpu.is_available():
            pytest.skip("there is a GPU here")

    def test_one_warning_and_a_handle_that_does_nothing(self, tmp_path, warnings):
        with record_on_oom(tmp_path / "run") as recorder:
            recorder.close()
        (warning,) = warnings()
        assert "no CUDA or XPU device" in warning
        assert not (tmp_path / "run").exists()

    def test_an_error_in_the_block_goes_on(self, tmp_path):
        error = torch.OutOfMemoryError("full")
        with pytest.raises(torch.OutOfMemoryError) as raised, record_on_oom(tmp_path):
            raise error
        assert raised.value is error


@pytest.mark.parametrize("bad", [{"max_entries": 0}, {"most_dumps": 0}, {"stacks": "cpp"}])
def test_a_wrong_argument_is_refused_at_once(tmp_path, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        record_on_oom(tmp_path, **bad)


class TestWhenMemoryRunsOut:
    def test_the_pickle_and_the_run_hold_the_failed_request(self, tmp_path, gpu, recording):
        recorder = recording()
        gpu.note("alloc", 0x1000, 400, 1)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 5000 bytes"):
            gpu.ask(5000, time_us=2)
        (path,) = recorder.dumps
        assert load_snapshot(path).events.bytes.tolist() == [400, 5000]
        (step,) = read_recordings(str(tmp_path)).steps
        assert (step.metadata.worker, step.metadata.dump_of) == ("oom_w", "w")
        (side_file,) = tmp_path.rglob("*.mem")
        assert load_window(str(side_file)).events.kind.tolist() == [Kind.ALLOC, Kind.OOM]

    @pytest.mark.parametrize(("names", "dump_of"), [(["mine", "else"], "mine"), (["mine", "w"], "w")])
    def test_the_run_is_of_the_worker_that_the_process_records(
        self, tmp_path, gpu, recording, names, dump_of
    ):
        """Whatever name a handler or a monitor was given: else the dump would be another rank."""
        for name in names:
            RunWriter(tmp_path, name).write(trace("step 0", "alloc 10 a device=cuda:0"))
        recording()
        for time_us in (2, 3):
            with pytest.raises(torch.OutOfMemoryError):
                gpu.ask(5000, time_us=time_us)
        dumps = [step.metadata for step in read_recordings(str(tmp_path)).steps if step.metadata.dump_of]
        assert [(dump.worker, dump.dump_of) for dump in dumps] == [("oom_w", dump_of)] * 2

    def test_the_run_of_a_second_recorder_is_of_no_dump_of_the_first(self, tmp_path, gpu, recording):
        for time_us in (1, 2):
            recorder = recording()
            with pytest.raises(torch.OutOfMemoryError):
                gpu.ask(5000, time_us=time_us)
            recorder.close()
        assert {step.metadata.dump_of for step in read_recordings(str(tmp_path)).steps} == {"w"}

    def test_the_run_has_what_filled_the_whole_device(self, tmp_path, gpu, recording, monkeypatch):
        known = {DevicePart.REQUESTED: 400, DevicePart.CACHED: 100, DevicePart.FREE: 20}
        monkeypatch.setattr(oom, "card_memory", lambda name: {"cuda:0": CardMemory(1000, known)}[name])
        recording()
        gpu.note("alloc", 0x1000, 400, 1)
        with pytest.raises(torch.OutOfMemoryError):
            gpu.ask(5000, time_us=2)
        (side_file,) = tmp_path.rglob("*.mem")
        (whole,) = load_window(str(side_file)).whole_devices
        assert (whole.moment, whole.total, dict(whole.parts)) == (
            Moment.END,
            1000,
            {**known, DevicePart.UNKNOWN: 480},
        )
        (step,) = read_recordings(str(tmp_path)).steps
        assert step.metadata.devices[0].capacity_bytes == 1000

    def test_the_run_has_the_layers_that_its_stacks_show(self, tmp_path, gpu, recording):
        stack = [MAIN, CALL, ("forward", "model.py", 10), CALL, ("forward", "block.py", 20)]
        snapshot = snapshot_of((8, stack), (8, stack[:3]))
        recorder = recording()
        recorder.handle("cuda", 0, snapshot)
        (step,) = read_recordings(str(tmp_path)).steps
        assert modules(load_window(str(step.side_file))) == ["block:10", ""]

    def test_layers_have_the_names_of_the_programs_models(self, tmp_path, recording):
        """Both linears have the same stack. Where the models cannot be read, it says what stacks do."""
        model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        loop = ("forward", container.__file__, nn.Sequential.forward.__code__.co_firstlineno + 1)
        inner = ("forward", linear.__file__, nn.Linear.forward.__code__.co_firstlineno + 1)
        snapshot = snapshot_of(*[(8, [MAIN, CALL, loop, CALL, loop, CALL, inner])] * 2)
        recorder = recording()
        recorder.program = lambda: ({"": model}, ())
        recorder.handle("cuda", 0, snapshot)
        recorder.program = lambda: 1 // 0
        recorder.handle("cuda", 0, snapshot)
        first, second = (
            modules(load_window(str(step.side_file))) for step in read_recordings(str(tmp_path)).steps
        )
        assert first == ["0.0", "0.1"]
        assert all("?" in name for name in second)

    def test_it_says_where(self, tmp_path, gpu, recording, warnings):
        recorder = recording()
        with pytest.raises(torch.OutOfMemoryError):
            gpu.ask(5000)
        (warning,) = warnings()
        assert recorder.dumps[0] in warning
        assert f"tensorboard --logdir {tmp_path}" in warning

    def test_no_more_than_so_many_files_for_each_device(self, gpu, recording, warnings):
        recorder = recording(most_dumps=2)
        for device in (0, 0, 0, 0, 1):
            with pytest.raises(torch.OutOfMemoryError):
                gpu.ask(5000, device=device)
        assert [path.count("cuda0") for path in recorder.dumps] == [1, 1, 0]
        assert sum("later failures are not written" in warning for warning in warnings()) == 1

    def test_two_recorders_of_one_folder_write_once(self, gpu, recording):
        switch = HistorySwitch()
        both = recording(switch=switch), recording(switch=switch)
        with pytest.raises(torch.OutOfMemoryError):
            gpu.ask(5000)
        assert [len(recorder.dumps) for recorder in both] == [0, 1]

    def test_nested_recorders_of_two_folders_write_both(self, tmp_path, gpu, recording):
        switch = HistorySwitch()
        outer = recording(tmp_path / "a", switch=switch)
        with pytest.raises(torch.OutOfMemoryError), recording(tmp_path / "b", switch=switch) as inner:
            gpu.ask(5000)
        assert (len(outer.dumps), len(inner.dumps)) == (1, 1)
        assert gpu.recording
        outer.close()
        assert not gpu.recording

    def test_threads_that_run_out_together_both_write(self, gpu, recording):
        recorder = recording()

        def fail():
            with pytest.raises(torch.OutOfMemoryError):
                gpu.ask(5000)

        threads = [threading.Thread(target=fail) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(recorder.dumps)) == 2

    def test_running_out_while_writing_does_not_begin_anew(self, tmp_path, gpu):
        recorder = OomRecorder(str(tmp_path), "w")
        allocator = gpu.as_allocator()

        def snapshot():
            recorder.failed(allocator, 0)
            return gpu.snapshot()

        nested = type(allocator)(
            **{name: getattr(allocator, name) for name in allocator.__slots__} | {"snapshot": snapshot}
        )
        recorder.failed(nested, 0)
        assert len(recorder.dumps) == 1


class TestTheHistory:
    def test_is_on_until_closed(self, gpu, recording):
        recorder = recording()
        assert gpu.recording
        assert gpu.settings["max_entries"] == 100_000
        recorder.close()
        recorder.close()
        assert not gpu.recording

    def test_of_a_user_stays_on(self, gpu, recording):
        gpu.recording = True
        recording().close()
        assert gpu.recording

    def test_begins_once_the_gpu_is_in_use(self, gpu, recording):
        gpu.in_use = False
        recording()
        assert not gpu.recording
        gpu.come_into_use()
        assert gpu.recording

    def test_never_begins_when_closed_before(self, gpu, recording):
        gpu.in_use = False
        recording().close()
        gpu.come_into_use()
        assert not gpu.recording
        assert gpu.observers == []

    def test_is_not_watched_after_closing(self, gpu, recording):
        recorder = recording()
        recorder.close()
        with pytest.raises(torch.OutOfMemoryError):
            gpu.ask(5000)
        assert recorder.dumps == []

    def test_each_allocator_gets_one_observer_for_good(self, gpu, recording):
        observe, switch = gpu.as_allocator(), HistorySwitch()
        for _ in range(3):
            recorder = OomRecorder("unused")
            recorder.begin([observe], switch=switch)
            recorder.close()
        assert len(gpu.observers) == 1


def test_where_torch_does_not_observe_the_blocks_end_does(tmp_path, gpu, recording, warnings):
    with pytest.raises(torch.OutOfMemoryError), recording(observes=False) as recorder:
        gpu.ask(5000)
    assert len(recorder.dumps) == 1
    assert "with record_on_oom(...)" in warnings()[0]


def test_an_error_that_the_observer_saw_is_not_written_again_at_the_blocks_end(gpu, recording):
    with pytest.raises(torch.OutOfMemoryError), recording() as recorder:
        gpu.ask(5000)
    assert len(recorder.dumps) == 1


class TestWhenItGoesWrong:
    """One warning, and torch's own error."""

    def test_an_unwritable_folder(self, tmp_path, gpu, recording, warnings):
        (tmp_path / "file").write_text("a file stands where the folder should be")
        recording(tmp_path / "file" / "run", most_dumps=2)
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                gpu.ask(5000)
        (warning,) = warnings()
        assert "could not be written" in warning
        assert "unchanged" in warning

    def test_a_full_disk_leaves_no_half_file(self, tmp_path, gpu, recording, warnings):
        import resource
        import signal

        gpu.note("alloc", 0x1000, 400, 1)
        recorder = recording()
        for number in range(200):
            gpu.note("alloc", 0x1000 * number, 400, number)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # every file ends at 1,000 bytes: EFBIG
        try:
            with pytest.raises(torch.OutOfMemoryError):
                gpu.ask(5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, previous)
        assert len(warnings()) == 1
        assert recorder.dumps == []
        assert list(tmp_path.rglob("*.*")) == []

    def test_a_history_that_cannot_be_taken(self, gpu, recording, warnings):
        gpu.broken = "snapshot"
        recording()
        with pytest.raises(torch.OutOfMemoryError):
            gpu.ask(5000)
        (warning,) = warnings()
        assert "the host is full too" in warning

    def test_a_history_that_cannot_be_switched_on(self, gpu, recording, warnings):
        gpu.broken = "record"
        recording()
        (warning,) = warnings()
        assert "no history here" in warning

    def test_a_snapshot_that_cannot_be_read_is_kept_as_a_file(self, tmp_path, gpu, recording, warnings):
        gpu.segments = [{"device": "not a number"}]
        recorder = recording()
        with pytest.raises(torch.OutOfMemoryError):
            gpu.ask(5000)
        (warning,) = warnings()
        assert "could not be added to the Memory tab" in warning
        with Path(recorder.dumps[0]).open("rb") as stream:
            assert load_plain(stream, "test") == gpu.snapshot()


@real
def test_a_real_snapshot_of_an_out_of_memory_comes_into_the_tab(tmp_path, warnings):
    source = path_of("01")
    recorder = OomRecorder(str(tmp_path), "w")
    recorder.handle("cuda", 1, pickle.loads(source.read_bytes()))
    (side_file,) = tmp_path.rglob("*.mem")
    told, expected = load_window(str(side_file)), load_snapshot(source)
    assert [device.name for device in told.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert told.live(1).max() == expected.live(1).max() == 84_063_351_764
    assert told.ooms == expected.ooms
    assert len(told.ooms) > 0
    assert load_snapshot(recorder.dumps[0]).live(1).max() == 84_063_351_764
    assert len(warnings()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="VmRSS is Linux's")
def test_a_stack_takes_at_most_32_bytes_for_each_frame_and_keeps_its_code_alive():
    """Torch's history keeps stacks in the same way: 16 bytes for a frame, in a vector that doubles."""
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE  # noqa: E731

    def stacks(depth: int, count: int) -> list[CapturedTraceback]:
        if depth:
            return stacks(depth - 1, count)
        return [CapturedTraceback.extract(cpp=False) for _ in range(count)]

    before = resident()
    kept = stacks(100, 20_000)
    frames = 100 + len(inspect.stack(0))
    assert resident() - before < 20_000 * (1_024 + 32 * frames)
    names: dict[str, Any] = {"stacks": stacks}
    exec("def compiled():\n    return stacks(0, 1)", names)
    code = weakref.ref(names["compiled"].__code__)
    kept = names.pop("compiled")()
    assert code() is not None
    del kept
    gc.collect()
    assert code() is None
