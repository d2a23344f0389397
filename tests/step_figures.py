"""Figures of steps in a line: what a monitor would have seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseBytes, PhaseFigures, StepFigures


def figures(
    peaks: Sequence[int] | np.ndarray,
    *,
    first: int = 0,
    device: str = "cuda:0",
    phases: Mapping[str, Sequence[int] | np.ndarray] | None = None,
    retries: Sequence[int] | np.ndarray | None = None,
    notes: Sequence[str] = (),
) -> StepFigures:
    """Steps of 100 ms that leave half of their peak; "process" has no reserve, others one of twice the peak.

    A phase is given by its peak in each step, 0 where it did not run.
    """
    peak = np.array(peaks, np.int64)
    count = len(peak)
    none = np.zeros(count, np.int64)
    exact = np.zeros(count, np.bool_)
    is_process = device == "process"
    of_allocator = {
        "peak_reserved": 2 * peak,
        "end_reserved": 2 * peak,
        "retries": none if retries is None else np.array(retries, np.int64),
        "ooms": none,
        "allocations": none + 7,
        "allocated_bytes": 3 * peak,
    }
    one = DeviceFigures(
        name=device,
        kind="process" if is_process else "allocator",
        product="" if is_process else "A Card",
        capacity=None if is_process else 1 << 40,
        peak=peak,
        at_least=exact,
        end=peak // 2,
        **({} if is_process else of_allocator),
    )
    ran = {name: np.array(highest, np.int64) for name, highest in (phases or {}).items()}
    return StepFigures(
        steps=np.arange(first, first + count),
        durations_ns=none + 100_000_000,
        devices=(one,),
        phases=tuple(
            PhaseFigures(
                name,
                (row > 0).astype(np.int64),
                np.where(row > 0, 1000, 0),
                (PhaseBytes(row, exact, row // 4),),
            )
            for name, row in ran.items()
        ),
        notes=tuple(Note(note, "steps_missing", level="warning") for note in notes),
    )


def same_figures(one: Any, other: Any) -> bool:
    """Whether two are equal in every column and its dtype."""
    if is_dataclass(one):
        return all(same_figures(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_figures, one, other))
    return bool(one == other)
