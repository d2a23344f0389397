"""No error of the handler reaches the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from tb_memplugin import combine_handlers, memory_trace_handler
from tb_memplugin.record.profiler.window import WindowRecorder
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Kind
from tests.faults.sweep import PARTS, ROW, Session, Training, sweep


class HandlerSession(Session):
    """A handler, and a profiler for each window."""

    second_warning = ("store/worker_folder.py:__init__",)  # the folder stays claimed, another one is used

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self.handler = memory_trace_handler(folder, "w", model=training.model, optimizer=training.optimizer)

    def window(self) -> None:
        before = len(WRITTEN)
        with profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            on_trace_ready=self.handler,
        ):
            self.training.step()
        self.windows += WRITTEN[before:]

    def close(self) -> None:
        del self.handler


WRITTEN: list[list[tuple[int, ...]]] = []
"""(bytes, category, module, phase) of every allocation of each window that was written."""


@pytest.fixture(autouse=True)
def traces_written(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the allocations of every trace that is written."""
    write = RunWriter.write

    def writing(self: RunWriter, trace):
        written = write(self, trace)
        events = trace.events
        born = events.kind == Kind.ALLOC
        WRITTEN.append(list(zip(*(getattr(events, name)[born].tolist() for name in ROW), strict=True)))
        return written

    WRITTEN.clear()
    monkeypatch.setattr(RunWriter, "write", writing)
    monkeypatch.setattr("tb_memplugin.record.handler.say_where", lambda *_: None)


@pytest.mark.parametrize("always", [False, True], ids=["once a window", "at every call"])
@pytest.mark.parametrize("part", range(PARTS))
def test_an_error_in_any_function_costs_at_most_that_window(tmp_path, part, always):
    fired, problems = sweep(HandlerSession, tmp_path, part, PARTS, always=always)
    assert problems == []
    assert fired > 100


@pytest.mark.parametrize(
    ("error", "is_another", "recorded"),
    [(KeyboardInterrupt, False, [3]), (KeyboardInterrupt, True, [3]), (ValueError, True, [1, 3])],
    ids=["Ctrl-C", "Ctrl-C in another handler", "another handler's error"],
)
def test_what_ends_a_handler_within_a_schedule_reaches_the_program_and_torch_does_not_crash(
    tmp_path, monkeypatch, error, is_another, recorded
):
    """Every second step is a window. That of step 1 ends with the error, that of step 3 is recorded."""
    errors, write = [error()], RunWriter.write

    def fail_once(*arguments):
        if errors:
            raise errors.pop()
        return None if is_another else write(*arguments)

    handler = memory_trace_handler(tmp_path, "w")
    if is_another:
        handler = combine_handlers(fail_once, handler)
    else:
        monkeypatch.setattr(RunWriter, "write", fail_once)
    prof = profile(profile_memory=True, on_trace_ready=handler, schedule=schedule(wait=0, warmup=1, active=1))
    prof.start()
    with pytest.raises(error):
        train(prof, 2)
    assert prof.current_action is ProfilerAction.NONE  # else `stop` would crash
    train(prof, 2)
    prof.stop()
    steps = [step.metadata.step for step in read_recordings(str(tmp_path)).steps]
    assert steps == recorded


def test_ctrl_c_before_the_first_statement_of_a_handler_does_not_crash_torch(tmp_path, monkeypatch):
    def interrupted(_handler, _prof):
        raise KeyboardInterrupt

    handler = memory_trace_handler(tmp_path, "w")
    prof = profile(profile_memory=True, on_trace_ready=handler, schedule=schedule(wait=0, warmup=1, active=1))
    prof.start()
    with monkeypatch.context() as during:
        during.setattr(vars(type(handler))["__call__"].__wrapped__, "__code__", interrupted.__code__)
        with pytest.raises(KeyboardInterrupt):
            train(prof, 2)
    assert prof.current_action is ProfilerAction.NONE  # else `stop` would crash
    train(prof, 2)
    prof.stop()
    assert [step.metadata.step for step in read_recordings(str(tmp_path)).steps] == [3]


def test_ctrl_c_while_a_window_stops_reaches_the_program_and_torch_does_not_crash(tmp_path, monkeypatch):
    errors, stop = [KeyboardInterrupt()], WindowRecorder.stop

    def interrupted(recorder):
        if errors:
            raise errors.pop()
        stop(recorder)

    monkeypatch.setattr(WindowRecorder, "stop", interrupted)
    handler = memory_trace_handler(tmp_path, "w")
    with (
        pytest.raises(KeyboardInterrupt),
        profile(
            profile_memory=True, on_trace_ready=handler, schedule=schedule(wait=0, warmup=1, active=1)
        ) as prof,
    ):
        train(prof, 2)
    with profile(profile_memory=True, on_trace_ready=handler):
        torch.ones(3)
    assert len(read_recordings(str(tmp_path)).steps) == 1


def train(prof: profile, steps: int) -> None:
    for _ in range(steps):
        torch.ones(3)
        prof.step()
