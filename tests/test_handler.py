"""The handler as people use it: any profiler set-up, beside others, and never in the way."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import profiler as autograd_profiler
from torch.optim import optimizer as optimizer_module
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from tb_memplugin import MemoryMonitor, combine_handlers, memory_trace_handler
from tb_memplugin.record import module_calls, profiler_windows
from tb_memplugin.record.profiler.window import WindowRecorder
from tb_memplugin.store import files
from tb_memplugin.store.reader import full_summary, load_window, read_recordings
from tb_memplugin.store.worker_steps import worker_steps
from tests.flushing import wait_for_the_disk
from tests.training import CNN
from tests.watched import is_watched

ONE_STEP = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}


def loop(handler, *, model=None, optimizer=None, steps=4, plan=ONE_STEP, step_the_profiler=True, **options):
    """A training loop as it stands in scripts; gives the losses."""
    model = model or CNN()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = {"profile_memory": True, **options}
    losses = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(**plan) if plan else None,
        on_trace_ready=handler,
        **options,
    ) as prof:
        for _ in range(steps):
            x, y = CNN.batch()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step_the_profiler:
                prof.step()
    return losses


def recorded_steps(folder) -> list[int]:
    found = read_recordings(str(folder))
    assert found.problems == ()
    return [step.metadata.step for step in found.steps]


def notes_of(folder) -> list[str]:
    (step,) = read_recordings(str(folder)).steps
    return [note.text for note in full_summary(step).notes]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CNN()


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("shapes", [False, True])
def test_every_combination_of_options_is_recorded(tmp_path, model, stack, shapes):
    loop(memory_trace_handler(tmp_path, model=model), model=model, with_stack=stack, record_shapes=shapes)
    assert recorded_steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("plan", "steps", "expected"),
    [
        ({"wait": 1, "warmup": 1, "active": 2, "repeat": 2}, 9, [2, 3, 6, 7]),
        ({"wait": 0, "warmup": 1, "active": 1, "repeat": 3}, 7, [1, 3, 5]),
        ({"wait": 0, "warmup": 0, "active": 1}, 3, [0, 1, 2]),
        ({"skip_first": 3, "wait": 0, "warmup": 1, "active": 2, "repeat": 1}, 7, [4, 5]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_any_schedule_yields_its_active_steps(tmp_path, model, plan, steps, expected):
    loop(memory_trace_handler(tmp_path, model=model), model=model, plan=plan, steps=steps)
    assert recorded_steps(tmp_path) == expected


def test_without_a_schedule_each_profile_is_one_step(tmp_path, model):
    handler = memory_trace_handler(tmp_path, model=model)
    for _ in range(2):
        loop(handler, model=model, plan=None, steps=2, step_the_profiler=False)
    assert recorded_steps(tmp_path) == [0, 1]


def test_without_a_model(tmp_path):
    loop(memory_trace_handler(tmp_path))
    assert recorded_steps(tmp_path) == [2]


def test_a_window_that_waits_is_written_as_without_a_profile_with_another_handler(tmp_path, model):
    calls = []
    for name, other in (("alone", None), ("waiting", memory_trace_handler(tmp_path / "other"))):
        handler = memory_trace_handler(tmp_path / name, model=model)
        with profile(profile_memory=True) as waiting:
            model(CNN.batch()[0])
        if other is not None:
            loop(other, plan=None)
        handler(waiting)
        (step,) = read_recordings(str(tmp_path / name)).steps
        trace = load_window(str(step.side_file), step.metadata)
        calls.append([trace.modules[row].key for row in trace.calls.name.tolist()])
    assert calls[0] == calls[1] != []


@pytest.mark.parametrize("order", [0, 1])
def test_beside_another_handler_both_get_the_whole_profile(tmp_path, model, order):
    ours = memory_trace_handler(tmp_path / "memory", model=model)
    theirs = tensorboard_trace_handler(str(tmp_path / "kineto"))
    loop(combine_handlers(*((ours, theirs) if order else (theirs, ours))), model=model)
    (exported,) = (tmp_path / "kineto").glob("*.json")
    names = [event.get("name") for event in json.loads(exported.read_text())["traceEvents"]]
    assert "[memory]" in names
    assert recorded_steps(tmp_path / "memory") == [2]


def test_our_hooks_leave_no_mark_in_the_trace_of_another_handler(tmp_path, model):
    def ops(name, handler):
        torch.manual_seed(0)
        loop(combine_handlers(handler, tensorboard_trace_handler(str(tmp_path / name))), model=model)
        (exported,) = (tmp_path / name).glob("*.json")
        return [
            e["name"]
            for e in json.loads(exported.read_text())["traceEvents"]
            if e.get("cat") in ("cpu_op", "user_annotation")
        ]

    with_us = ops("a", memory_trace_handler(tmp_path / "m", model=model))
    gc.collect()
    assert with_us == ops("b", lambda prof: None)


def test_combined_handlers_are_all_called_and_the_first_error_is_raised():
    called = []

    def failing(prof):
        called.append("failing")
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        combine_handlers(failing, lambda prof: called.append("second"))(profile())
    assert called == ["failing", "second"]
    with pytest.raises(TypeError, match="combine_handlers takes functions; this is a int"):
        combine_handlers(failing, 3)  # type: ignore[arg-type]


def test_training_is_bit_for_bit_the_same(tmp_path):
    def run(handler_of):
        torch.manual_seed(3)
        model = CNN()
        losses = loop(handler_of(model), model=model)
        return losses, [p.detach().clone() for p in model.parameters()]

    losses, weights = run(lambda model: lambda prof: None)
    ours, our_weights = run(lambda model: memory_trace_handler(tmp_path, model=model))
    assert ours == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, our_weights, strict=True))


def test_outside_profiled_steps_no_hook_is_there(tmp_path, model, monkeypatch):
    monkeypatch.setattr(profiler_windows, "_listeners", {})  # those of other tests have hooks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handler = memory_trace_handler(tmp_path, model=model, optimizer=optimizer)
    seen: list[tuple[bool, bool, int]] = []

    def watches():
        steps = len(optimizer_module._global_optimizer_pre_hooks) + len(
            optimizer_module._global_optimizer_post_hooks
        )
        own = [module for module in model.modules() if module is not model.head]
        return any(module._forward_hooks or module._forward_pre_hooks for module in own), is_watched(), steps

    handle = model.head.register_forward_hook(lambda *_: seen.append(watches()))
    loop(handler, model=model, optimizer=optimizer)
    nothing, inside = (False, False, 0), (False, True, 2)
    assert seen == [nothing, nothing, inside, nothing]
    handle.remove()
    assert watches() == nothing


def test_hooks_are_gone_when_the_training_raises_inside_a_profiled_step(tmp_path, model):
    handler = memory_trace_handler(tmp_path, model=model)
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        profile(profile_memory=True, on_trace_ready=handler),
    ):
        model(torch.randn(1, 3, 99, 99))
    assert not is_watched(model)


def test_a_dead_handler_leaves_nothing_behind(tmp_path, model):
    others = list(profiler_windows._listeners)  # of other tests
    handler = memory_trace_handler(tmp_path, model=model)
    assert len(profiler_windows._listeners) == len(others) + 1
    del handler  # nothing refers to it in a circle: it dies at once
    assert set(profiler_windows._listeners) == set(others)
    with profile(profile_memory=True):
        assert id(model) not in module_calls._of_module


def test_the_handler_keeps_neither_model_nor_optimizer_alive(tmp_path):

    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = memory_trace_handler(tmp_path, model=model, optimizer=optimizer)
    references = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    loop(handler)  # and goes on without them
    assert recorded_steps(tmp_path) == [2]


class TestWhenItGoesWrong:
    """One clear warning, training goes on unchanged, earlier steps stay readable."""

    @pytest.fixture
    def warnings(self, caplog):
        caplog.set_level(logging.WARNING, logger="tb_memplugin")
        return lambda: [
            record.getMessage() for record in caplog.records if record.name.startswith("tb_memplugin")
        ]

    def test_profile_memory_off(self, tmp_path, model, warnings):
        plan = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
        losses = loop(
            memory_trace_handler(tmp_path, model=model), model=model, plan=plan, profile_memory=False
        )
        assert len(losses) == 4
        (warning,) = warnings()
        assert "profile_memory=True" in warning

    def test_an_unwritable_folder(self, tmp_path, model, warnings):
        (tmp_path / "file").write_text("a file stands where the folder should be")
        losses = loop(memory_trace_handler(tmp_path / "file" / "run", model=model), model=model)
        assert len(losses) == 4
        (warning,) = warnings()
        assert "file" in warning

    def test_a_window_that_cannot_even_be_undone_is_told(self, tmp_path, model, warnings, monkeypatch):
        def undo(self):
            raise ValueError("injected")

        handler = memory_trace_handler(tmp_path, "w", model=model)
        monkeypatch.setattr(WindowRecorder, "_undo", undo)
        assert len(loop(handler, model=model)) == 4
        assert ["ValueError: injected" in text for text in warnings()] == [True]
        monkeypatch.undo()
        loop(handler, model=model)
        assert len(recorded_steps(tmp_path)) == 1

    def test_an_error_of_the_thread_that_flushes_is_logged_once_and_later_windows_are_flushed(
        self, tmp_path, model, warnings, monkeypatch
    ):
        wait_for_the_disk()  # what a test before this one wrote
        flushed, flush = [], files.flush_path
        errors = iter([ValueError("injected"), ValueError("injected")])

        def flushing(path):
            for error in errors:
                raise error
            flushed.append(path)
            flush(path)

        monkeypatch.setattr(files, "flush_path", flushing)
        handler = memory_trace_handler(tmp_path, "w", model=model)
        for _ in range(3):
            loop(handler, model=model)
            wait_for_the_disk()
        assert len(recorded_steps(tmp_path)) == 3
        (told,) = warnings()
        assert "may not outlive a crash of this machine (ValueError: injected)" in told
        assert any(path.endswith("window-000002.mem") for path in flushed)

    def test_a_full_disk_keeps_earlier_steps(self, tmp_path, model, warnings, monkeypatch):
        handler = memory_trace_handler(tmp_path, "w", model=model)
        loop(handler, model=model)
        before = recorded_steps(tmp_path)
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        import signal

        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # every file ends at 1,000 bytes: EFBIG
        try:
            losses = loop(handler, model=model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, previous)
        assert len(losses) == 4
        (told,) = [warning for warning in warnings() if "was not given to" not in warning]
        assert "disk" in told
        assert recorded_steps(tmp_path) == before == [2]
        assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]

    @pytest.mark.parametrize("start", ["all", "given"])
    def test_an_optimizer_that_was_replaced(self, tmp_path, model, warnings, start):
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        handler = memory_trace_handler(tmp_path, model=model, optimizer=first, start=start)
        loop(handler, model=model, optimizer=torch.optim.Adam(model.parameters()))
        missing = [warning for warning in warnings() if "Adam" in warning]
        assert len(missing) == (start == "given")  # else the search has found its state
        assert recorded_steps(tmp_path) == [2]

    def test_a_model_that_is_garbage(self, tmp_path, warnings):
        handler = memory_trace_handler(tmp_path, model=CNN())
        gc.collect()
        loop(handler)
        (warning,) = warnings()
        assert "no longer exist" in warning
        assert recorded_steps(tmp_path) == [2]

    def test_a_profile_without_steps_says_so_in_the_tab(self, tmp_path, model):
        loop(memory_trace_handler(tmp_path, model=model), model=model, plan=None, step_the_profiler=False)
        assert any("whole window is shown as one" in note for note in notes_of(tmp_path))

    def test_called_outside_a_window(self, tmp_path, model, warnings):
        memory_trace_handler(tmp_path, model=model)(profile())
        (warning,) = warnings()
        assert "window" in warning

    def test_a_second_process_in_the_same_folder(self, tmp_path, model, warnings):
        code = (
            "import sys, tests.test_handler as t, torch\n"
            "from tb_memplugin import memory_trace_handler\n"
            "t.loop(memory_trace_handler(sys.argv[1], 'w'))\n"
        )
        for _ in range(2):
            subprocess.run(
                [sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[1]
            )
        assert recorded_steps(tmp_path) == [2, 2]


@pytest.mark.parametrize(("steps", "recorded"), [(3, [1]), (5, [1, 3])])
def test_a_last_window_in_which_nothing_ran_is_no_trouble(tmp_path, model, caplog, steps, recorded):
    """A loop that ends just where the schedule begins a window: it asks for nothing that is there."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = memory_trace_handler(tmp_path, model=model, optimizer=optimizer)
    loop(handler, model=model, optimizer=optimizer, steps=steps, plan={"wait": 0, "warmup": 1, "active": 1})
    assert recorded_steps(tmp_path) == recorded
    assert not caplog.messages


@pytest.mark.parametrize("stopped_by", ["an error", "the loop's end"])
def test_a_last_step_that_did_not_end_is_no_growth_and_none_at_all_if_it_allocated_nothing(
    tmp_path, model, stopped_by
):
    """The loop keeps 4 MiB in step 2, 4 bytes in step 3, and 8 MiB in step 4, in which an error ends it."""
    kept: list[torch.Tensor] = []

    def kept_in(step: int) -> None:
        if step == 4 and stopped_by == "an error":
            kept.append(torch.empty(8 << 20, dtype=torch.uint8))
            raise ValueError
        if step > 1:
            kept.append(torch.empty((4 << 20) if step == 2 else 4, dtype=torch.uint8))

    plan, recorded = schedule(wait=1, warmup=1, active=9), memory_trace_handler(tmp_path, model=model)
    with (
        contextlib.suppress(ValueError),
        profile(profile_memory=True, schedule=plan, on_trace_ready=recorded) as prof,
    ):
        for step in range(4 if stopped_by == "the loop's end" else 9):
            kept_in(step)
            prof.step()
    found = read_recordings(str(tmp_path)).steps
    codes = [note.code for note in full_summary(found[-1]).notes]
    (device,) = worker_steps("w", [step.metadata for step in found], None)
    if stopped_by == "an error":
        assert ([step.metadata.step for step in found], "step_not_ended" in codes) == ([2, 3, 4], True)
        assert device.growth is None  # of the two steps that ended, not 4 MiB more with every step
    else:
        assert ([step.metadata.step for step in found], "step_not_ended" in codes) == ([2, 3], False)


def test_an_only_window_in_which_nothing_ran_is_told_and_profile_memory_is_not_asked_for(
    tmp_path, model, caplog
):
    handler = memory_trace_handler(tmp_path, model=model)
    loop(handler, model=model, steps=1, plan={"wait": 0, "warmup": 1, "active": 1})
    (said,) = caplog.messages
    assert "active steps" in said
    assert "profile_memory" not in said


_Config: Any = torch._C._profiler._ExperimentalConfig
_SWITCHES: list[str] = re.findall(r"(\w+): bool", _Config.__init__.__doc__)


@pytest.mark.parametrize("switch", _SWITCHES)
def test_with_every_experimental_switch_a_window_is_recorded_or_its_name_is_told(
    tmp_path, model, caplog, switch
):
    config = _Config(**{switch: True})
    loop(memory_trace_handler(tmp_path, model=model), model=model, experimental_config=config)
    said = "".join(caplog.messages)
    assert (recorded_steps(tmp_path) == [2] and not said) or (not recorded_steps(tmp_path) and switch in said)


def test_a_relative_folder_is_that_of_the_moment_when_the_handler_was_made(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handler = memory_trace_handler("runs", "w", model=model)
    for below in ("first", "second"):
        (tmp_path / below).mkdir()
        monkeypatch.chdir(tmp_path / below)
        loop(handler, model=model)
    assert recorded_steps(tmp_path / "runs") == [2, 2]


def test_the_home_folder_and_bytes_are_paths_and_a_number_is_a_name(tmp_path, model, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    loop(memory_trace_handler("~/home", 3, model=model), model=model)  # type: ignore[arg-type]
    loop(memory_trace_handler(b"bytes", model={7: model}), model=model)  # type: ignore[arg-type,dict-item]
    assert "failed" not in caplog.text
    assert recorded_steps(tmp_path / "home" / "3") == recorded_steps(tmp_path / "bytes") == [2]


def test_it_says_once_where_it_wrote_and_how_to_see_it(tmp_path, model, capfd):
    handler = memory_trace_handler(tmp_path / "a run", model=model)
    for _ in range(2):
        loop(handler, model=model)
    told = [line for line in capfd.readouterr().err.splitlines() if "tensorboard --logdir" in line]
    assert told == [f"  see it in the Memory tab: tensorboard --logdir '{tmp_path}/a run'"]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [("3", "rank3"), (None, f"_{os.getpid()}")],
    ids=["rank", "host and process"],  # not the name itself, which holds the process id
)
def test_the_default_worker_name_is_the_rank_or_the_host_and_process(
    tmp_path, model, monkeypatch, rank, expected
):
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    loop(memory_trace_handler(tmp_path, model=model), model=model)
    (step,) = read_recordings(str(tmp_path)).steps
    assert step.metadata.worker.endswith(expected)


def test_a_program_that_forbids_sockets_is_recorded(tmp_path, model, monkeypatch, caplog):
    def refuse():
        raise PermissionError("no network")

    monkeypatch.setattr("socket.gethostname", refuse)
    handler = memory_trace_handler(tmp_path, model=model)
    with MemoryMonitor(tmp_path) as monitor:
        loop(handler, model=model)
        monitor.step(7)
    (watched,) = read_recordings(str(tmp_path)).watched
    assert (recorded_steps(tmp_path), watched.figures.steps.tolist(), caplog.messages) == ([2], [7], [])


def test_torch_still_calls_what_we_wrap():
    """The two functions that mark a window's start and end are torch's own business: notice if they go."""
    assert callable(autograd_profiler._run_on_profiler_start)
    assert callable(autograd_profiler._run_on_profiler_stop)


@pytest.mark.parametrize("stack", [False, True])
def test_a_second_thread_that_only_waits_changes_nothing(tmp_path, model, stack):
    """With stacks, the profiler numbers such a thread 2**64 - 1."""
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    try:
        loop(memory_trace_handler(tmp_path, model=model), model=model, with_stack=stack)
    finally:
        done.set()
        waiting.join()
    assert recorded_steps(tmp_path) == [2]


def test_a_torch_that_does_not_tell_when_a_profiler_starts_is_told_once_and_changes_nothing(
    tmp_path, model, caplog, monkeypatch
):
    monkeypatch.delattr(autograd_profiler, "_run_on_profiler_start")
    handler = memory_trace_handler(tmp_path, model=model)
    assert "does not report when a profiler starts" in caplog.text
    assert handler(profile()) is None
