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
    return Levels(active, pending, active - pending, trace.reserved(device))


def fragmentation(trace: MemoryTrace, device: int, event: int) -> Fragmentation:
    """Return how much of a device's reserved memory is unused after an event (-1: before the first).

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    placed = layout(trace, device, event) if knows_segments(trace, device) else None
    return fragmentation_of(levels(trace, device), placed, event)


def fragmentation_of(memory: Levels, placed: Layout | None, event: int) -> Fragmentation:
    """Return `fragmentation` of known levels and a known layout, None if the segments are not known."""
    reserved = None if memory.reserved is None else int(memory.reserved[event + 1])
    allocated = int(memory.allocated[event + 1])
    free = None if placed is None else placed.free_bytes
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
    """Return whether the trace has segments or segment events of a device, or it never held any memory."""
    kind = trace.events.kind
    is_segment_event = (kind >= Kind.SEGMENT_ALLOC) & (kind <= Kind.SEGMENT_UNMAP)
    has_segments = (trace.segments.device == device).any()
    if has_segments or (is_segment_event & (trace.events.device == device)).any():
        return True
    reserved = trace.reserved(device)
    return reserved is not None and not reserved.any() and not trace.live(device).any()


def pools(trace: MemoryTrace, device: int, event: int) -> tuple[PoolState, ...]:
    """Return every pool and stream of a device after an event (-1: before the first), largest first.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    return pools_of(trace, device, event, layout(trace, device, event))


def pools_of(
    trace: MemoryTrace, device: int, event: int, placed: Layout, since: Int64 | None = None
) -> tuple[PoolState, ...]:
    """Return `pools` of a known layout; `since` is `pending_since` of the device, if it is known as well."""
    homes, of_segment, of_block = _homes(trace, placed)
    rows, count = np.concatenate((placed.rows, placed.misfits)), len(homes)
    rounded = np.concatenate((placed.extent, _rounded(trace, placed.misfits)))
    rule = np.concatenate((placed.by_rule, trace.allocations.rounded[placed.misfits] < 0))
    since = pending_since(trace, device) if since is None else since
    pending = since[rows] <= event
    size = trace.allocations.bytes[rows]
    columns = [
        sums(of_block, np.where(pending, 0, size), count),
        sums(of_block, np.where(pending, size, 0), count),
        sums(of_block, rounded, count),
        sums(of_block, np.where(rule, rounded, 0), count),
    ]
    has_segments = knows_segments(trace, device)
    columns += _reserve_of(placed, of_segment, count) if has_segments else ()
    states = [
        PoolState(
            pool_name(trace, pool),
            stream_name(trace, stream),
            *numbers,
            *(() if has_segments else (None,) * 4),
        )
        for (pool, stream), *numbers in zip(homes, *(column.tolist() for column in columns), strict=True)
    ]
    return tuple(sorted(states, key=lambda state: (-(state.reserved_bytes or 0), -state.active_bytes)))


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


def _rounded(trace: MemoryTrace, rows: np.ndarray) -> Int64:
    recorded = trace.allocations.rounded[rows]
    rounded: Int64 = np.where(recorded >= 0, recorded, rounded_by_rule(trace.allocations.bytes[rows]))
    return rounded


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
