"""The step in which a device reaches its peak, and that step's curve without some blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class HighestStep:
    """A step on a device and its live bytes.

    Attributes:
        row, number: the step's row in `trace.steps`, and its number.
        first, end: its events, end excluded.
        level: live bytes: int64, shape (end - first + 1,); entry i is the level before event first + i.
        peak_event: the event after which the peak is reached; first - 1 if it is at the step's start.
    """

    row: int
    number: int
    first: int
    end: int
    level: Int64
    peak_event: int

    @property
    def peak_bytes(self) -> int:
        """The step's peak: its highest level."""
        return int(self.level[self.peak_event + 1 - self.first])

    def without(self, size: Int64, gone: Int64, back: Int64) -> Int64:
        """Return the level as it would be without some blocks for part of the step.

        Block i, of size[i] bytes, is missing from the levels before the events gone[i] to back[i], both
        included; what lies outside the step is ignored.
        """
        length = len(self.level)
        begin, end = np.clip(gone - self.first, 0, length), np.clip(back - self.first + 1, 0, length)
        change = np.zeros(length + 1, np.int64)
        real = end > begin
        np.subtract.at(change, begin[real], size[real])
        np.add.at(change, end[real], size[real])
        lower: Int64 = self.level + np.cumsum(change)[:-1]
        return lower


def step_on(trace: MemoryTrace, device: int, row: int) -> HighestStep:
    """Return one step of a trace (its row) on a device (its row)."""
    return stretch_on(trace, device, row, *trace.step_events(row))


def stretch_on(trace: MemoryTrace, device: int, row: int, first: int, end: int) -> HighestStep:
    """Return the events first to end, end excluded, of a step (its row) on a device (its row)."""
    level = trace.live(device)[first : end + 1]
    return HighestStep(row, trace.steps[row].number, first, end, level, first - 1 + int(np.argmax(level)))


def highest_step(trace: MemoryTrace, device: int, rows: Sequence[int] | None = None) -> HighestStep:
    """Return the step with a device's highest peak, the first of equals.

    `rows` limits the search to these steps (rows of `trace.steps`).
    """
    searched = range(len(trace.steps)) if rows is None else rows
    return max((step_on(trace, device, row) for row in searched), key=lambda step: step.peak_bytes)
