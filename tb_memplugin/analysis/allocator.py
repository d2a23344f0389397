"""The allocator's own numbers on a device: active, pending, allocated, reserved, by pool and stream."""

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
    """Bytes on a device over time: int64, shape (events + 1,); entry e + 1 holds after event e.

    `active`: live until the free was completed, as requested. `pending`: the part of them whose free
    was requested. `allocated`: active - pending. `reserved`: None where the source tells none.
    """

    active: Int64
    pending: Int64
    allocated: Int64
    reserved: Int64 | None


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How much of a reserve is of no use. Bytes, and ratios: of 0 to 1 where the file is sound.

    Attributes:
        reserved_bytes: None where the source tells none.
        allocated_bytes: requested, without what is pending.
        unused: (reserved - allocated) / reserved, what rounding takes included. None without a reserve.
        free_bytes: in the reserve and in no block, None where segments are not known.
        largest_free_bytes: the longest stretch of them, within one segment.
        split: 1 - largest free / all free: 0 where all that is free is one stretch. None without any.
    """

    reserved_bytes: int | None
    allocated_bytes: int
    unused: float | None
    free_bytes: int | None
    largest_free_bytes: int | None
    split: float | None


@dataclass(frozen=True, slots=True)
class PoolState:
    """What one pool holds for one stream. Bytes; the numbers of all pools sum to the device's.

    Attributes:
        pool, stream: for people; a block in a segment counts where the segment does.
        allocated_bytes: requested, without what is pending.
        pending_bytes: requested, of blocks let go of but not yet free.
        rounded_bytes: what the allocator set aside for both; never less than this.
        by_rule_bytes: the part of `rounded_bytes` that follows from the rule of rounding: a lower bound.
        reserved_bytes, segments, free_bytes, largest_free_bytes: None where segments are not known.
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
        """Whether the file tells `rounded_bytes` to the byte."""
        return self.by_rule_bytes == 0

    @property
    def active_bytes(self) -> int:
        """Requested bytes of blocks that are not free: allocated and pending."""
        return self.allocated_bytes + self.pending_bytes


@dataclass(frozen=True, slots=True)
class PeakSplit:
    """A device's peak: what was alive before the window, and what came in it. They sum to the peak."""

    event: int
    bytes: int
    before_bytes: int
    came_bytes: int


def levels(trace: MemoryTrace, device: int) -> Levels:
    """Active, pending, allocated and reserved bytes after every event of a trace, on one device."""
    blocks, count = trace.allocations, len(trace.events)
    since = pending_since(trace, device)
    waits = np.flatnonzero(since < blocks.freed)
    change = sums(since[waits] + 1, blocks.bytes[waits], count + 2)
    change -= sums(blocks.freed[waits] + 1, blocks.bytes[waits], count + 2)
    active, pending = trace.live(device), np.cumsum(change)[: count + 1]
    return Levels(active, pending, active - pending, reserved_levels(trace, device))


def reserved_levels(trace: MemoryTrace, device: int) -> Int64 | None:
    """The reserve of a device: int64, shape (events + 1,); None where the source tells none.

    Before the first event it is `reserved_at_start`; where that is not told, the sum of the segments
    then, else what the first event reports.
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
    """How much of a device's reserve is of no use after an event (-1: before the first).

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
    """Whether the source tells where a device's reserve lies."""
    kind = trace.events.kind
    moved = (kind >= Kind.SEGMENT_ALLOC) & (kind <= Kind.SEGMENT_UNMAP)
    told = (trace.segments.device == device).any() or (moved & (trace.events.device == device)).any()
    return bool(told)


def pools(trace: MemoryTrace, device: int, event: int) -> tuple[PoolState, ...]:
    """Every pool of a device, by stream, after an event (-1: before the first); largest first.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    return pools_of(trace, device, event, layout(trace, device, event))


def pools_of(
    trace: MemoryTrace, device: int, event: int, found: Layout, since: Int64 | None = None
) -> tuple[PoolState, ...]:
    """As `pools`, of a layout that is at hand; `since` is `pending_since` of the device, if that is, too."""
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
    """Each pool and stream in use (rows of the tables), and which one each segment and each block is in.

    A block is where its segment is, as far as that is known; misfits come last and are where they say.
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
    """Reserved bytes, segments, free bytes and the longest free stretch of each home."""
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
    """What a device's peak is made of: bytes from before the window, and bytes that came in it."""
    event = int(np.argmax(trace.live(device))) - 1
    rows = trace.allocations.alive_at(event, device)
    size, came = trace.allocations.bytes[rows], trace.allocations.born[rows] >= 0
    return PeakSplit(event, int(size.sum()), int(size[~came].sum()), int(size[came].sum()))
