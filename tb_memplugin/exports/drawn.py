"""What a page draws of a device: all of its blocks, or those of a range, sampled or without freed ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64, Rows


@dataclass(frozen=True, slots=True)
class Plot:
    """What to draw.

    Attributes:
        first, last: the first and the last event, of any device; the moment before the first is drawn, too.
        sampling_rate: draw the level after every so many events of a device, and at its peak. Blocks that
            were allocated and freed between two of them are left out.
        filter_freed: leave out blocks that were freed by the last event.
        allocation_order: stack the parts from the bottom in the order in which they first allocated, in place
            of their size.

    Raises:
        MemPluginError: the sampling rate is below 1, or the range is empty.
    """

    first: int = 0
    last: int = sys.maxsize
    sampling_rate: int = 1
    filter_freed: bool = False
    allocation_order: bool = False

    def __post_init__(self) -> None:
        if self.sampling_rate < 1:
            raise MemPluginError(
                "The sampling rate must be 1 or more.", where="sampling rate", fix="1 draws every event."
            )
        if self.first < 0 or self.last < self.first - 1:
            raise MemPluginError("The range of events is empty.", where="range", fix="Begin before it ends.")

    def note(self, trace: MemoryTrace) -> str:
        """Say what is not drawn; "" if everything is."""
        count = len(trace.events)
        parts = []
        if self.first > 0 or self.last < count - 1:
            parts.append(f"events {self.first:,} to {min(self.last, count - 1):,} of {count:,}")
        if self.sampling_rate > 1:
            parts.append(f"the level after every {self.sampling_rate:,} events of a device, and its peak")
        if self.filter_freed:
            parts.append("blocks that were not freed by the last event")
        return f"This page shows only: {'; '.join(parts)}." if parts else ""


@dataclass(frozen=True, slots=True)
class Changes:
    """One row per change: the row of `trace.allocations`, the event, and the signed bytes."""

    block: Rows
    event: Int64
    change: Int64


@dataclass(frozen=True, slots=True)
class Drawn:
    """The blocks of a device that are drawn; columns of equal length.

    `rows` are rows of `trace.allocations`. A block is drawn after the events `born` to before `freed`: `born`
    is -1 if that is from the start, and `freed` is the number of events if it is to the end. `bytes`: int64.
    `before`: the event before the first that is drawn, -1 at the start of the window.
    """

    rows: Rows
    born: Int64
    freed: Int64
    bytes: Int64
    events: int
    before: int

    @property
    def start_bytes(self) -> int:
        """The bytes before the first event that is drawn."""
        return int(self.bytes[self.born < 0].sum())

    @property
    def at_start(self) -> Rows:
        """The rows of `trace.allocations` drawn before the first event."""
        return self.rows[self.born < 0]

    def changes(self) -> Changes:
        """Return the changes of the level. At the same event, frees come before allocations."""
        born, freed = np.flatnonzero(self.born >= 0), np.flatnonzero(self.freed < self.events)
        block = np.concatenate((self.rows[freed], self.rows[born]))
        event = np.concatenate((self.freed[freed], self.born[born]))
        change = np.concatenate((-self.bytes[freed], self.bytes[born]))
        order = np.argsort(event, kind="stable")
        return Changes(block[order], event[order], change[order])

    def peak(self, changes: Changes) -> tuple[int, int]:
        """Return the highest level in bytes, and the first event that reaches it; `before` at the start."""
        level = np.cumsum(changes.change) + self.start_bytes
        ends = np.flatnonzero(np.diff(changes.event, append=self.events))
        top = int(np.argmax(level[ends])) if len(ends) else 0
        if not len(ends) or level[ends[top]] <= self.start_bytes:
            return self.start_bytes, self.before
        return int(level[ends[top]]), int(changes.event[ends[top]])

    def alive_at(self, event: int) -> Rows:
        """Return the rows of `trace.allocations` that are drawn after an event."""
        return self.rows[(self.born <= event) & (self.freed > event)]


def drawn(trace: MemoryTrace, device: int, plot: Plot | None = None) -> Drawn:
    """Return the blocks of a device (its row) that are drawn; by default all."""
    plot = plot or Plot()
    blocks, count = trace.allocations, len(trace.events)
    first, end = min(plot.first, count), min(plot.last, count - 1) + 1
    rows = blocks.alive_between(first, end, device)
    born = np.where(blocks.born[rows] < first, -1, blocks.born[rows])
    freed = np.where(blocks.freed[rows] >= end, count, blocks.freed[rows])
    if plot.sampling_rate > 1:
        samples = _samples(trace, device, first, end, plot.sampling_rate)
        born = np.where(born >= 0, samples[np.searchsorted(samples, born)], born)
        freed = np.where(freed < count, samples[np.searchsorted(samples, freed)], freed)
    kept = (born < freed) & ((freed == count) | (not plot.filter_freed))
    rows = rows[kept]
    return Drawn(rows, born[kept], freed[kept], blocks.bytes[rows], count, first - 1)


def _samples(trace: MemoryTrace, device: int, first: int, end: int, rate: int) -> Int64:
    """Return the events after which the level is drawn, in order; the last entry is the number of events."""
    own = first + np.flatnonzero(trace.events.device[first:end] == device)
    peak = first - 1 + int(np.argmax(trace.live(device)[first : end + 1]))
    kept = np.concatenate((own[rate - 1 :: rate], own[-1:], own[own == peak]))
    return np.append(np.unique(kept), len(trace.events)).astype(np.int64)
