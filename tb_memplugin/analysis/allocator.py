"""The allocator's figures on a device: active, pending, allocated and reserved bytes, by pool and stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.breakdown import sums
from tb_memplugin.analysis.layout import Layout, layout, rounded_by_rule
from tb_memplugin.analysis.pending import pending_since
from tb_memplugin.analysis.segments import pool_name, stream_name
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes on a device over time: int64, shape (events + 1,); entry e + 1 is the level after event e.

    `active`: requested bytes of blocks whose free is not yet completed. `pending`: the part of them whose
    free was requested. `allocated`: active - pending. `reserved`: None if the source does not report it.
    """

    active: Int64
    pending: Int64
    allocated: Int64
    reserved: Int64 | None


@dataclass(frozen=True, slots=True)
class Fragmentation:
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
class PoolState:
    """What one pool holds for one stream, in bytes. The values of all pools sum to the device's.

    Attributes:
        pool, stream: display names. A block within a segment counts to the segment's pool and stream.
        allocated_bytes: requested bytes, without pending blocks.
        pending_bytes: requested bytes of blocks whose free was requested but is not completed.
        rounded_bytes: what the allocator set aside for both: a lower bound unless `rounded_exact`.
        by_rule_bytes: the part of `rounded_bytes` that was computed by the rounding rule, because the file
            does not record it.
        reserved_bytes, segments, free_bytes, largest_free_bytes: None if the segments are not known.
    """

    pool: str
    stream: str
    allocated_bytes: int
    pending_bytes: int
    rounded_bytes: int
    by_rule_bytes: int
    reserved_bytes: int | None
    segments: int | None
    free_bytes: int | None
    largest_free_bytes: int | None

    @property
    def rounded_exact(self) -> bool:
        """Whether the file records all of `rounded_bytes`."""
        return self.by_rule_bytes == 0

    @property
    def active_bytes(self) -> int:
        """Requested bytes of the allocated and the pending blocks."""
        return self.allocated_bytes + self.pending_bytes


@dataclass(frozen=True, slots=True)
class PeakSplit:
    """A device's peak as the sum of bytes allocated before the window and bytes allocated in it."""

    event: int
    bytes: int
    before_bytes: int
    came_bytes: int


def levels(trace: MemoryTrace, device: int) -> Levels:
    """Return the active, pending, allocated and reserved bytes of a device after every event of a trace."""
    blocks, count = trace.allocations, len(trace.events)
    since = pending_since(trace, device)
    waits = np.flatnonzero(since < blocks.freed)
    change = sums(since[waits] + 1, blocks.bytes[waits], count + 2)
    change -= sums(blocks.freed[waits] + 1, blocks.bytes[waits], count + 2)
    active, pending = trace.live(device), np.cumsum(change)[: count + 1]
    return Levels(active, pending, active - pending, reserved_levels(trace, device))


def reserved_levels(trace: MemoryTrace, device: int) -> Int64 | None:
    """Return the reserved bytes of a device over time: int64, shape (events + 1,); None if not reported.

    The level before the first event is `reserved_at_start`. If that is not known, it is the sum of the
    segments at the start; if there are none, the value that the first event reports.
    """
    known = np.flatnonzero((trace.events.device == device) & (trace.events.reserved >= 0))
    start = _reserved_at_start(trace, device)
    if not trace.devices[device].has_reserved or (start is None and not len(known)):
        return None
    told = trace.events.reserved[known]
    told = np.concatenate((told[:1] if start is None else [start], told)).astype(np.int64)
    held = np.diff(known, prepend=-1, append=len(trace.events))
    level: Int64 = np.repeat(told, held)
    return level


def _reserved_at_start(trace: MemoryTrace, device: int) -> int | None:
    told = trace.devices[device].reserved_at_start
    here = trace.segments.device == device
    return int(trace.segments.bytes[here].sum()) if told is None and here.any() else told


def fragmentation(trace: MemoryTrace, device: int, event: int) -> Fragmentation:
    """Return how much of a device's reserved memory is unused after an event (-1: before the first).

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    now = levels(trace, device)
    reserved = None if now.reserved is None else int(now.reserved[event + 1])
    allocated = int(now.allocated[event + 1])
    free = layout(trace, device, event).free_bytes if knows_segments(trace, device) else None
    total, largest = (None, None) if free is None else (int(free.sum()), int(free.max(initial=0)))
    return Fragmentation(
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        unused=(reserved - allocated) / reserved if reserved else None,
        free_bytes=total,
        largest_free_bytes=largest,
        split=1 - largest / total if total and largest else None,
    )


def knows_segments(trace: MemoryTrace, device: int) -> bool:
    """Return whether the trace has segments or segment events of a device."""
    kind = trace.events.kind
    moved = (kind >= Kind.SEGMENT_ALLOC) & (kind <= Kind.SEGMENT_UNMAP)
    told = (trace.segments.device == device).any() or (moved & (trace.events.device == device)).any()
    return bool(told)


def pools(trace: MemoryTrace, device: int, event: int) -> tuple[PoolState, ...]:
    """Return every pool and stream of a device after an event (-1: before the first), largest first.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    return pools_of(trace, device, event, layout(trace, device, event))


def pools_of(
    trace: MemoryTrace, device: int, event: int, found: Layout, since: Int64 | None = None
) -> tuple[PoolState, ...]:
    """Return `pools` of a known layout; `since` is `pending_since` of the device, if it is known as well."""
    homes, of_segment, of_block = _homes(trace, found)
    rows, count = np.concatenate((found.rows, found.misfits)), len(homes)
    rounded = np.concatenate((found.extent, _rounded(trace, found.misfits)))
    rule = np.concatenate((found.by_rule, trace.allocations.rounded[found.misfits] < 0))
    since = pending_since(trace, device) if since is None else since
    pending = since[rows] <= event
    size = trace.allocations.bytes[rows]
    columns = [
        sums(of_block, np.where(pending, 0, size), count),
        sums(of_block, np.where(pending, size, 0), count),
        sums(of_block, rounded, count),
        sums(of_block, np.where(rule, rounded, 0), count),
    ]
    known = knows_segments(trace, device)
    columns += _reserve_of(found, of_segment, count) if known else ()
    states = [
        PoolState(
            pool_name(trace, pool), stream_name(trace, stream), *numbers, *(() if known else (None,) * 4)
        )
        for (pool, stream), *numbers in zip(homes, *(column.tolist() for column in columns), strict=True)
    ]
    return tuple(sorted(states, key=lambda state: (-(state.reserved_bytes or 0), -state.active_bytes)))


def _homes(trace: MemoryTrace, found: Layout) -> tuple[list[tuple[int, int]], Int64, Int64]:
    """Return the (pool, stream) pairs in use (rows of the tables) and the pair of each segment and block.

    A block belongs to its segment's pool and stream if those are known, else to its own. Misfits come last.
    """
    blocks, segments = trace.allocations, found.segments
    rows = np.concatenate((found.rows, found.misfits))
    pool, stream = blocks.pool[rows].astype(np.int64), blocks.stream[rows].astype(np.int64)
    for own, of_segment in ((pool, segments.pool), (stream, segments.stream)):
        told = of_segment[found.segment]
        own[: len(told)] = np.where(told >= 0, told, own[: len(told)])
    pool, stream = np.concatenate((segments.pool, pool)), np.concatenate((segments.stream, stream))
    width = int(stream.max(initial=-1)) + 2
    homes, place = np.unique((pool + 1) * width + stream + 1, return_inverse=True)
    pairs = [(home // width - 1, home % width - 1) for home in homes.tolist()]
    place = place.astype(np.int64)
    return pairs, place[: len(segments)], place[len(segments) :]


def _rounded(trace: MemoryTrace, rows: np.ndarray) -> Int64:
    known = trace.allocations.rounded[rows]
    rounded: Int64 = np.where(known >= 0, known, rounded_by_rule(trace.allocations.bytes[rows]))
    return rounded


def _reserve_of(found: Layout, of_segment: Int64, count: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Reserved bytes, segments, free bytes and the longest free stretch of each pool and stream."""
    of_free = of_segment[found.free_segment]
    largest = np.zeros(count, np.int64)
    np.maximum.at(largest, of_free, found.free_bytes)
    return (
        sums(of_segment, found.segments.bytes, count),
        np.bincount(of_segment, minlength=count),
        sums(of_free, found.free_bytes, count),
        largest,
    )


def peak_split(trace: MemoryTrace, device: int) -> PeakSplit:
    """Split a device's peak into bytes allocated before the window and bytes allocated in it."""
    event = int(np.argmax(trace.live(device))) - 1
    rows = trace.allocations.alive_at(event, device)
    size, came = trace.allocations.bytes[rows], trace.allocations.born[rows] >= 0
    return PeakSplit(event, int(size.sum()), int(size[~came].sum()), int(size[came].sum()))
