"""No error of the handler reaches the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import memory_trace_handler
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Kind
from tests.faults.sweep import PARTS, ROW, Session, Training, sweep


class HandlerSession(Session):
    """A handler, and a profiler for each window."""

    boundary = ("record/module_calls.py:__del__",)
    second_warning = ("store/worker_folder.py:__init__",)  # the folder stays claimed, another one is used
    unobserved = ("record/profiler/window.py:freed",)

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


@pytest.mark.parametrize("part", range(PARTS))
def test_an_error_in_any_function_costs_at_most_that_window(tmp_path, part):
    fired, problems = sweep(HandlerSession, tmp_path, part, PARTS)
    assert problems == []
    assert fired > 100
