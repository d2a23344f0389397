"""The allocator's figures on a device: at an event by pool and stream, and as columns of a chart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.columns import Cuts, extremes, highest
from tb_memplugin.analysis.layout import Layout, Placement, extents, pending_since
from tb_memplugin.analysis.pool_names import pool_name, stream_name
from tb_memplugin.analysis.sums import sums
from tb_memplugin.trace import Allocations, MemoryTrace
from tb_memplugin.trace.indexes import Runs, runs_of
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import Int64, pieces_of


@dataclass(frozen=True, slots=True)
class Levels(AnalysisResult):
    """Bytes on a device over time: int64, shape (events + 1,); entry e + 1 is the level after event e.

    `active`: requested bytes of blocks whose free is not yet completed. `pending`: the part of them whose
    free was requested. `allocated`: active - pending. `reserved`: None if the source does not report it.
    """

    active: Int64
    pending: Int64
    allocated: Int64
    reserved: Int64 | None


@dataclass(frozen=True, slots=True)
class Fragmentation(AnalysisResult):
    """How much of the reserved memory is unused. Sizes are bytes; ratios are 0 to 1 if the file is sound.

    Attributes:
        reserved_bytes: None if the source does not report it.
        allocated_bytes: requested bytes, without pending blocks.
        unused: (reserved - allocated) / reserved; rounding counts as unused. None if nothing is reserved.
        free_bytes: reserved bytes that lie in no block; None if the segments are not known.
        largest_free_bytes: the longest free stretch within one segment.
        split: 1 - largest free / all free: 0 if all free memory is one stretch, None if nothing is free.
    """

    reserved_bytes: int | None
    allocated_bytes: int
    unused: float | None
    free_bytes: int | None
    largest_free_bytes: int | None
    split: float | None


@dataclass(frozen=True, slots=True)
class PoolState(AnalysisResult):
    """What a pool holds for a stream. Each column of the pools sums to the device's."""

    pool: str
    stream: str
    """Their names. A block within a segment counts to the segment's."""
    allocated_bytes: int
    pending_bytes: int
    """Requested bytes; pending: the free was requested and is not completed."""
    rounded_bytes: int
    """What the allocator uses for the allocated and pending bytes: a lower bound if `by_rule_bytes` is not
    0."""
    by_rule_bytes: int
    """The part of it that the file does not contain and that follows from the rule of rounding."""
    reserved_bytes: int | None
    segments: int | None
    free_bytes: int | None
    largest_free_bytes: int | None
    """Of the segments; None if they are not known."""

    @property
    def rounded_exact(self) -> bool:
        """Whether the file records all of `rounded_bytes`."""
        return self.by_rule_bytes == 0

    @property
    def active_bytes(self) -> int:
        """Requested bytes of the allocated and the pending blocks."""
        return self.allocated_bytes + self.pending_bytes


@dataclass(frozen=True, slots=True)
class PeakSplit(AnalysisResult):
    """A device's peak as the sum of bytes allocated before the window and bytes allocated in it."""

    event: int
    bytes: int
    before_bytes: int
    came_bytes: int


def levels(trace: MemoryTrace, device: int) -> Levels:
    """Return the active, pending, allocated and reserved bytes of a device after every event of a trace."""
    kept, since = trace.events.kept, pending_since(trace, device)
    return _levels(trace.allocations, since, trace.live(device), trace.reserved(device), kept)


def _levels(
    blocks: Allocations, since: Int64, active: Int64, reserved: Int64 | None, kept: Callable[..., Int64]
) -> Levels:
    waits, moments = np.flatnonzero(since < blocks.freed), len(active)
    if not len(waits):
        return Levels(active, np.broadcast_to(np.int64(0), moments), active, reserved)
    change = sums(since[waits] + 1, blocks.bytes[waits], moments + 1)
    change -= sums(blocks.freed[waits] + 1, blocks.bytes[waits], moments + 1)
    pending = np.cumsum(change)[:moments]
    allocated = kept(lambda: (active[rows] - pending[rows] for rows in pieces_of(moments)))
    return Levels(active, kept(lambda: (pending,)), allocated, reserved)


class AllocatorHistory:
    """A device's levels and layouts. What needs a replay of the window is computed once, for all events.

    It does not hold the trace, so that it may be cached for as long as that is in memory.

    Attributes:
        knows_segments: as the function of this name.
        pending_since: that of `analysis.layout`.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """

    def __init__(self, trace: MemoryTrace, device: int) -> None:
        self.placement = Placement(trace, device)
        self.pending_since = pending_since(trace, device)
        self.knows_segments = knows_segments(trace, device)
        self.active_runs, self.reserved_runs = trace.live_runs(device), trace.reserved_runs(device)
        self._blocks, self._kept = trace.allocations, trace.events.kept
        self._live, self._reserved = trace.live(device), trace.reserved(device)

    @cached_property
    def levels(self) -> Levels:
        """The device's levels."""
        return _levels(self._blocks, self.pending_since, self._live, self._reserved, self._kept)

    @cached_property
    def unused(self) -> Ratio | None:
        """(reserved - allocated) / reserved after every event; -inf if nothing is reserved then."""
        reserved, allocated = self.levels.reserved, self.levels.allocated
        if reserved is None:
            return None
        return self._kept(
            lambda: (_unused(reserved[rows], allocated[rows]) for rows in pieces_of(len(reserved)))
        )

    @cached_property
    def unused_runs(self) -> Runs[np.float64] | None:
        """The runs of `unused`."""
        return None if self.unused is None else runs_of(self.unused)

    def curve(self, cuts: Cuts) -> ReserveCurve:
        """Reduce the levels to columns that keep the highest and lowest of each.

        Args:
            cuts: the result of `time_cuts` or `event_cuts`.
        """
        memory = self.levels
        low, high, at = extremes(memory.active, cuts, self.active_runs)
        reserved = unused = None
        if memory.reserved is not None and self.unused is not None:
            reserved = highest(memory.reserved, cuts, self.reserved_runs)
            unused = highest(self.unused, cuts, self.unused_runs)
            unused = np.where(np.isneginf(unused), np.nan, unused)
        pending = memory.pending[at]
        return ReserveCurve(low, high - pending, pending, reserved, unused)

    def fragmentation(self, event: int, placed: Layout) -> Fragmentation:
        """Return how much of the reserved memory is unused after an event, whose layout is `placed`."""
        memory = self.levels
        reserved = None if memory.reserved is None else int(memory.reserved[event + 1])
        allocated = int(memory.allocated[event + 1])
        total = largest = None
        if self.knows_segments:
            total, largest = int(placed.free_bytes.sum()), int(placed.free_bytes.max(initial=0))
        return Fragmentation(
            reserved_bytes=reserved,
            allocated_bytes=allocated,
            unused=(reserved - allocated) / reserved if reserved else None,
            free_bytes=total,
            largest_free_bytes=largest,
            split=1 - largest / total if total and largest else None,
        )

    def pools(self, trace: MemoryTrace, event: int, placed: Layout) -> ResultTable[PoolState]:
        """Return every pool and stream after an event, whose layout is `placed`, largest first."""
        homes, of_segment, of_block = _homes(trace, placed)
        rows, count = np.concatenate((placed.rows, placed.misfits)), len(homes)
        of_misfits, by_rule = extents(trace.allocations, placed.misfits)
        rounded = np.concatenate((placed.extent, of_misfits))
        rule = np.concatenate((placed.by_rule, by_rule))
        pending = self.pending_since[rows] <= event
        size = trace.allocations.bytes[rows]
        columns = [
            sums(of_block, np.where(pending, 0, size), count),
            sums(of_block, np.where(pending, size, 0), count),
            sums(of_block, rounded, count),
            sums(of_block, np.where(rule, rounded, 0), count),
        ]
        columns += _reserve_of(placed, of_segment, count) if self.knows_segments else ()
        states = [
            PoolState(
                pool_name(trace, pool),
                stream_name(trace, stream),
                *numbers,
                *(() if self.knows_segments else (None,) * 4),
            )
            for (pool, stream), *numbers in zip(homes, *(column.tolist() for column in columns), strict=True)
        ]
        return ResultTable(
            sorted(states, key=lambda state: (-(state.reserved_bytes or 0), -state.active_bytes))
        )


def fragmentation(trace: MemoryTrace, device: int, event: int) -> Fragmentation:
    """Return how much of a device's reserved memory is unused after an event (-1: before the first).

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    history = AllocatorHistory(trace, device)
    return history.fragmentation(event, history.placement.at(event))


def knows_segments(trace: MemoryTrace, device: int) -> bool:
    """Return whether the trace has segments or segment events of a device, or it never held any memory."""
    if trace.records_segments(device):
        return True
    reserved = trace.reserved(device)
    return reserved is not None and not reserved.any() and not trace.live(device).any()


def pools(trace: MemoryTrace, device: int, event: int) -> ResultTable[PoolState]:
    """Return every pool and stream of a device after an event (-1: before the first), largest first.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    history = AllocatorHistory(trace, device)
    return history.pools(trace, event, history.placement.at(event))


def _homes(trace: MemoryTrace, placed: Layout) -> tuple[list[tuple[int, int]], Int64, Int64]:
    """Return the (pool, stream) pairs in use (rows of the tables) and the pair of each segment and block.

    A block belongs to its segment's pool and stream if those are known, else to its own. Misfits come last.
    """
    blocks, segments = trace.allocations, placed.segments
    rows = np.concatenate((placed.rows, placed.misfits))
    pool, stream = blocks.pool[rows].astype(np.int64), blocks.stream[rows].astype(np.int64)
    for own, of_segment in ((pool, segments.pool), (stream, segments.stream)):
        recorded = of_segment[placed.segment]
        own[: len(recorded)] = np.where(recorded >= 0, recorded, own[: len(recorded)])
    pool, stream = np.concatenate((segments.pool, pool)), np.concatenate((segments.stream, stream))
    width = int(stream.max(initial=-1)) + 2
    homes, home_of = np.unique((pool + 1) * width + stream + 1, return_inverse=True)
    pairs = [(home // width - 1, home % width - 1) for home in homes.tolist()]
    home_of = home_of.astype(np.int64)
    return pairs, home_of[: len(segments)], home_of[len(segments) :]


def _reserve_of(placed: Layout, of_segment: Int64, count: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Reserved bytes, segments, free bytes and the longest free stretch of each pool and stream."""
    of_free = of_segment[placed.free_segment]
    largest = np.zeros(count, np.int64)
    np.maximum.at(largest, of_free, placed.free_bytes)
    return (
        sums(of_segment, placed.segments.bytes, count),
        np.bincount(of_segment, minlength=count),
        sums(of_free, placed.free_bytes, count),
        largest,
    )


def peak_split(trace: MemoryTrace, device: int) -> PeakSplit:
    """Split a device's peak into bytes allocated before the window and bytes allocated in it."""
    event = int(np.argmax(trace.live(device))) - 1
    rows = trace.allocations.alive_at(event, device)
    size, in_window = trace.allocations.bytes[rows], trace.allocations.born[rows] >= 0
    return PeakSplit(event, int(size.sum()), int(size[~in_window].sum()), int(size[in_window].sum()))


Ratio = npt.NDArray[np.float64]

SAMPLED_MOMENTS = 200
"""How many layouts a curve computes at most: 200 layouts of a million events take less than a second."""


def _unused(reserved: Int64, allocated: Int64) -> Ratio:
    ratio = np.full(len(reserved), -np.inf)
    np.divide(reserved - allocated, reserved, out=ratio, where=reserved > 0)
    return ratio


def sampled_events(cuts: Cuts, moments: int = SAMPLED_MOMENTS) -> Int64:
    """Return the last event of at most `moments` columns, evenly chosen: int64, ascending, each once."""
    last = np.unique(cuts[1:] - 1)
    if len(last) <= moments:
        return last
    chosen: Int64 = last[np.linspace(0, len(last) - 1, moments).astype(np.int64)]
    return chosen


@dataclass(frozen=True, slots=True)
class ReserveCurve:
    """A device's levels in pixel columns: int64, shape (columns,), bytes.

    `low`: the lowest active bytes. `allocated`, `pending`: their values at the column's highest active
    bytes, to which they sum. `reserved`: the highest reserved bytes, None if not reported. `unused`: the
    highest (reserved - allocated) / reserved, 0 to 1, NaN if nothing is reserved; None if not reported.
    """

    low: Int64
    allocated: Int64
    pending: Int64
    reserved: Int64 | None
    unused: Ratio | None


def split_moments(placement: Placement, cuts: Cuts) -> tuple[tuple[int, float], ...]:
    """Return (event, 1 - largest free stretch / all free bytes) at the events of `sampled_events`.

    Moments at which nothing is free are left out.
    """
    events = sampled_events(cuts)
    free = zip(events.tolist(), *(each.tolist() for each in placement.free_after(events)), strict=True)
    return tuple((event, 1 - largest / total) for event, total, largest in free if total)
