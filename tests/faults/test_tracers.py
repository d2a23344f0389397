"""No error of a tracer reaches the code that it traces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tb_memplugin import LineTracer, MemoryTracer
from tb_memplugin.trace import Kind, MemoryTrace
from tests.faults.sweep import PARTS, Session, Training, sweep


def allocations(trace: MemoryTrace) -> list[int]:
    """The bytes of every allocation, in order. (Phases outside of layers depend on the clock.)"""
    sizes: list[int] = trace.events.bytes[trace.events.kind == Kind.ALLOC].tolist()
    return sizes


_ENTRIES = (
    "record/tracer/mode.py:__torch_dispatch__",
    "record/tracer/mode.py:_should_skip_dynamo",
    "record/tracer/mode.py:make_hidden_call",
    "record/tracer/kernels.py:run",
    "record/tracer/recording.py:around",
    "record/tracer/recording.py:_get_rng_state",
    "record/tracer/recording.py:_resize",
    "record/tracer/recording.py:_report",
)
"""What torch calls, and what calls torch: none of them does more than call what is guarded."""


class TracerSession(Session):
    """A tracer with a phase, and a block for each window."""

    boundary = (
        *_ENTRIES,
        "record/memory_tracer.py:trace",  # the user's call
        "record/memory_tracer.py:track_phase",
        "record/memory_tracer.py:__init__",  # of what `trace` returns
        "record/memory_tracer.py:__enter__",
        "record/arguments.py:checked_model",
        "record/arguments.py:checked_optimizers",
    )

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self.tracer = MemoryTracer()

    def window(self) -> None:
        tracer = self.tracer
        with tracer.trace(self.training.model, self.training.optimizer), tracer.track_phase("step"):
            self.training.step()
        if tracer._result is not None:
            self.windows.append(allocations(tracer._result.trace))

    def close(self) -> None:
        pass


class LineSession(Session):
    """A line tracer for each window."""

    boundary = (*_ENTRIES, "record/line_tracer.py:__enter__", "record/line_tracer.py:__exit__")

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self.tracer = LineTracer()

    def window(self) -> None:
        tracer = self.tracer
        with tracer:
            self.training.step()
        if tracer._recorded is not None:
            self.windows.append(allocations(tracer._recorded.trace))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("part", range(PARTS))
def test_an_error_in_any_function_of_memory_tracer_costs_at_most_that_block(tmp_path, part):
    fired, problems = sweep(TracerSession, tmp_path, part, PARTS)
    assert problems == []
    assert fired > 20


@pytest.mark.parametrize("part", range(PARTS))
def test_an_error_in_any_function_of_line_tracer_costs_at_most_that_block(tmp_path, part):
    fired, problems = sweep(LineSession, tmp_path, part, PARTS)
    assert problems == []
    assert fired > 20


@pytest.mark.parametrize(("tracer", "name"), [(MemoryTracer, "trace"), (LineTracer, "__enter__")])
def test_a_fault_of_each_block_is_logged_once_and_another_one_as_well(caplog, monkeypatch, tracer, name):
    model, recorder = nn.Linear(2, 1), tracer()
    for error in (ValueError("a"), ValueError("a"), OSError("b"), OSError("b"), ValueError("a")):

        def failing(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(recorder, "_recording", failing)
        with recorder.trace(model) if name == "trace" else recorder:
            model(torch.ones(1, 2))
    assert [text.partition(":")[0] for text in caplog.messages] == [
        "The trace could not be read (ValueError",
        "The trace could not be read (OSError",
    ]
