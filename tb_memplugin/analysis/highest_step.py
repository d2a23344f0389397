"""The step in which a device's peak is reached, and what its curve would be without some blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class HighestStep:
    """A step on a device and its live bytes.

    Attributes:
        row, number: of the step, in `trace.steps` and as profiled.
        first, end: its events, half-open.
        level: int64, shape (end - first + 1,); entry i holds before event first + i.
        peak_event: the event after which the peak is reached, first - 1 for the step's start.
    """

    row: int
    number: int
    first: int
    end: int
    level: Int64
    peak_event: int

    @property
    def peak_bytes(self) -> int:
        """The highest level."""
        return int(self.level[self.peak_event + 1 - self.first])

    def without(self, size: Int64, gone: Int64, back: Int64) -> Int64:
        """The level if blocks were absent before the events gone..back, both included. Clips to the step."""
        length = len(self.level)
        begin, end = np.clip(gone - self.first, 0, length), np.clip(back - self.first + 1, 0, length)
        change = np.zeros(length + 1, np.int64)
        real = end > begin
        np.subtract.at(change, begin[real], size[real])
        np.add.at(change, end[real], size[real])
        lower: Int64 = self.level + np.cumsum(change)[:-1]
        return lower


def step_on(trace: MemoryTrace, device: int, row: int) -> HighestStep:
    """One step of a trace on a device (rows)."""
    return stretch_on(trace, device, row, *trace.step_events(row))


def stretch_on(trace: MemoryTrace, device: int, row: int, first: int, end: int) -> HighestStep:
    """The events first..end, half-open, of a step on a device (rows)."""
    level = trace.live(device)[first : end + 1]
    return HighestStep(row, trace.steps[row].number, first, end, level, first - 1 + int(np.argmax(level)))


def highest_step(trace: MemoryTrace, device: int, rows: npt.ArrayLike | None = None) -> HighestStep:
    """The step with a device's highest peak, the first of several; `rows` names those to look at."""
    chosen = range(len(trace.steps)) if rows is None else np.unique(np.asarray(rows, np.int64)).tolist()
    return max((step_on(trace, device, row) for row in chosen), key=lambda step: step.peak_bytes)
