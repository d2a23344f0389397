"""Steps: the figures of each on a device, the one with the highest peak, and many as columns of a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tb_memplugin.analysis.columns import first_hits
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.replay import window_levels
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import Bool, Int64

if TYPE_CHECKING:
    from tb_memplugin.trace.step_figures import StepFigures


@dataclass(frozen=True, slots=True)
class StepStats(AnalysisResult):
    """One step on one device. Bytes and epoch nanoseconds.

    Attributes:
        peak_bytes: highest live bytes in the step, the moment of its start included.
        peak_event: index of the event after which the peak was reached; one less than the step's first
            event if that was at its start.
        peak_time_ns: when the peak was reached.
        start_bytes: bytes alive when the profiled *window* began (the same for all its steps).
        entry_bytes: bytes alive when this step began.
        end_bytes: bytes alive when this step ended.
        window_peak_bytes: the highest running sum, at this step's events, of what the source has reported
            since the window began.
        peak_reserved_bytes: highest reserved bytes, including those at the step's start; None if the device
            reserves no memory or it is not known.
        allocated_bytes, allocations: what was allocated in this step.
        stayed_bytes, stayed: what was allocated in this step and alive at its end.
    """

    step: int
    start_ns: int
    end_ns: int
    peak_bytes: int
    peak_event: int
    peak_time_ns: int
    start_bytes: int
    entry_bytes: int
    end_bytes: int
    window_peak_bytes: int
    peak_reserved_bytes: int | None
    allocated_bytes: int
    allocations: int
    stayed_bytes: int
    stayed: int


def step_stats(trace: MemoryTrace, device: int) -> ResultTable[StepStats]:
    """Return the statistics of every step on one device (a row in `trace.devices`), in time order."""
    window, bounds = trace.window(device), map(trace.step_events, range(len(trace.steps)))
    return ResultTable(
        _stats_of(trace, device, row, window[first : end + 1]) for row, (first, end) in enumerate(bounds)
    )


def stats_of_step(trace: MemoryTrace, device: int, row: int) -> StepStats:
    """Return the statistics of one step (a row in `trace.steps`) on one device, without those of others."""
    return _stats_of(trace, device, row, window_levels(trace.events, device, *trace.step_events(row)))


def _stats_of(trace: MemoryTrace, device: int, row: int, window: Int64) -> StepStats:
    first, end = trace.step_events(row)
    step = trace.steps[row]
    live, reserved = trace.live(device), trace.reserved(device)
    peak_event = first - 1 + int(np.argmax(live[first : end + 1]))
    time_ns = trace.events.time_ns
    begin_ns = min(step.start_ns, int(time_ns[first])) if end > first else step.start_ns
    reported = window[1:][_reported(trace, device, first, end)]
    blocks = trace.allocations
    born_first, born_end = np.searchsorted(blocks.born, (first, end))
    own = blocks.device[born_first:born_end] == device
    size = blocks.bytes[born_first:born_end][own]
    stayed = blocks.freed[born_first:born_end][own] >= end
    return StepStats(
        step=step.number,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        peak_bytes=int(live[peak_event + 1]),
        peak_event=peak_event,
        peak_time_ns=int(time_ns[peak_event]) if peak_event >= first else begin_ns,
        start_bytes=int(live[0]),
        entry_bytes=int(live[first]),
        end_bytes=int(live[end]),
        window_peak_bytes=int(reported.max()) if len(reported) else int(window[0]),
        peak_reserved_bytes=None if reserved is None else int(reserved[first : end + 1].max()),
        allocated_bytes=int(size.sum()),
        allocations=len(size),
        stayed_bytes=int(size[stayed].sum()),
        stayed=int(np.count_nonzero(stayed)),
    )


def _reported(trace: MemoryTrace, device: int, first: int, end: int) -> Bool:
    """Return the mask of the events from first to end that the source reported for a device."""
    kind = trace.events.kind[first:end]
    mask: Bool = (trace.events.device[first:end] == device) & (
        (kind == Kind.ALLOC) | (kind == Kind.FREE_COMPLETED)
    )
    return mask


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

    def saved(self, size: Int64, gone: Int64, back: Int64) -> int:
        """Return by how much the peak falls without some blocks for part of the step, see `without`."""
        return self.peak_bytes - int(self.without(size, gone, back).max())


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


def step_columns(steps: int, most: int) -> tuple[Int64, Int64]:
    """Divide steps into at most `most` columns of nearly equally many.

    Returns:
        The index of the first and of the last step of each column: int64, shape (columns,).
    """
    columns = min(most, steps)
    first = np.arange(columns, dtype=np.int64) * steps // max(columns, 1)
    return first, np.append(first[1:], steps)[:columns] - 1


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The peaks of a device's steps, in columns of about equally many steps."""

    first: Int64
    last: Int64
    """The first and last step of each column."""
    low: Int64
    high: Int64
    """The lowest and highest peak of each column."""
    high_step: Int64
    """The first step that has the highest."""
    reserved: Int64 | None
    """The highest reserved bytes of each column, or None."""
    count: int
    """Steps in all columns."""


def step_series(figures: StepFigures, device: int, first: int, last: int, columns: int) -> StepSeries:
    """Return the steps from `first` to `last`, inclusive, in at most `columns` columns.

    Args:
        device: row in `figures.devices`.
        first, last: numbers of steps, which need not exist.
        columns: at least 1.
    """
    begin, end = np.searchsorted(figures.steps, [first, last + 1])
    steps = figures.steps[begin:end]
    if not len(steps):
        none = np.zeros(0, np.int64)
        return StepSeries(none, none, none, none, none, None, 0)
    peak, reserved = figures.devices[device].peak, figures.devices[device].peak_reserved
    peak = peak[begin:end]
    starts, ends = step_columns(len(steps), columns)
    high = np.maximum.reduceat(peak, starts)
    return StepSeries(
        first=steps[starts],
        last=steps[ends],
        low=np.minimum.reduceat(peak, starts),
        high=high,
        high_step=steps[first_hits(peak, starts, high)[1]],
        reserved=None if reserved is None else np.maximum.reduceat(reserved[begin:end], starts),
        count=len(steps),
    )
