"""Where the live blocks lie in the reserved memory, the free stretches between them, and what is pending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.trace import Allocations, Kind, MemoryTrace
from tb_memplugin.trace.allocator import SMALL_REQUEST, SMALL_SEGMENT, cut_ranges, rounded_by_rule
from tb_memplugin.trace.kinds import EXPANDS, GROWS, SEGMENT_KINDS
from tb_memplugin.trace.replay import address_order, match_frees
from tb_memplugin.trace.tables import Bool, Int32, Int64, Rows, UInt64, code_mask, ranges


@dataclass(frozen=True, slots=True)
class SegmentColumns:
    """Segments in address order. `stream`, `pool`: rows of the trace's tables, -1 if not known."""

    address: UInt64
    bytes: Int64
    stream: Int32
    pool: Int32
    expandable: Bool

    def __len__(self) -> int:
        return len(self.address)

    @property
    def small(self) -> Bool:
        """The mask of segments that serve only requests up to `SMALL_REQUEST`.

        It is False for expandable segments, for which this is not known.
        """
        mask: Bool = ~self.expandable & (self.bytes == SMALL_SEGMENT)
        return mask

    def rows(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """Iterate over address, bytes, stream, pool and whether it can expand, of each segment."""
        columns = (self.address, self.bytes, self.stream, self.pool, self.expandable)
        return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments, blocks and free stretches of one device after one event, each in address order.

    Attributes:
        segments: the reserved segments.
        rows: live blocks that lie in a segment, as rows of `trace.allocations`.
        segment: the index of the segment in which each of these blocks lies.
        extent: the bytes that each block takes. Extents and free bytes of a segment sum to its bytes.
        by_rule: whether an extent was computed by the rounding rule (`rounded_by_rule`) because the file
            does not record it.
        free_address, free_bytes, free_segment: the free stretches.
        misfits: rows of live blocks that lie in no segment (all of them, if segments are not known).
        overlaps: how many blocks would reach into the next block or beyond their segment; they are cut off.
    """

    segments: SegmentColumns
    rows: Rows
    segment: Int64
    extent: Int64
    by_rule: Bool
    free_address: UInt64
    free_bytes: Int64
    free_segment: Int64
    misfits: Rows
    overlaps: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where blocks lie: which are `inside` a segment, and of these the segment, offset and size."""

    segments: SegmentColumns
    inside: Bool
    segment: Int64
    offset: Int64
    size: Int64
    by_rule: Bool


class Placement:
    """One device's blocks and reserved memory, from which it computes layouts.

    Replaying the segments is the expensive part: keep the object to compute the layout at many events.
    """

    def __init__(self, trace: MemoryTrace, device: int) -> None:
        self._blocks, self._device = trace.allocations, device
        self.reserve = reserve(trace, device)
        self._changes = np.unique(np.concatenate((self.reserve.born, self.reserve.freed)))
        self._last: tuple[int, SegmentColumns] | None = None

    def at(self, event: int) -> Layout:
        """Return the layout after an event (-1: before the first)."""
        rows = self._blocks.alive_at(event, self._device)
        rows = rows[address_order(self._blocks.address[rows])]
        return _laid_out(self._placed(event, rows), rows)

    def free_after(self, events: Int64) -> tuple[Int64, Int64]:
        """Return the free bytes after each of some events, and those of the largest free stretch.

        Args:
            events: int64, shape (n,), ascending. It is much faster than `at` for each.

        Returns:
            Both int64, shape (n,).
        """
        total, largest = np.zeros((2, len(events)), np.int64)
        if not len(events):
            return total, largest
        alive = self._blocks.alive_after(events, self._device)
        rows, first, end = alive.of(address_order(self._blocks.address[alive.rows]))
        changes = np.searchsorted(self._changes, events, side="right")
        bounds = np.append(np.flatnonzero(np.diff(changes, prepend=-1)), len(events)).tolist()
        for begin, stop in pairwise(bounds):  # the segments are the same after each of these events
            near = (first < stop) & (end > begin)
            span = first[near].clip(begin) - begin, end[near].clip(max=stop) - begin
            part = slice(begin, stop)
            total[part], largest[part] = self._free(int(events[begin]), rows[near], *span, stop - begin)
        return total, largest

    def _free(self, event: int, rows: Rows, first: Int32, end: Int32, count: int) -> tuple[Int64, Int64]:
        """Return `free_after` for events between which no segment changes.

        Args:
            rows: the blocks, in order of address.
            first, end: each is alive after these of the events.
        """
        placed = self._placed(event, rows)
        segments, lies_in_one = placed.segments, placed.inside
        if not len(segments):
            return np.zeros(count, np.int64), np.zeros(count, np.int64)
        first, end = first[lies_in_one], end[lies_in_one]
        of_event, block = ranges(first, end), np.repeat(np.arange(len(first)), end - first)
        order = np.argsort(of_event.astype(np.min_scalar_type(count)), kind="stable")  # by digits
        of_event, block = of_event[order], block[order]
        # As if each event had segments of its own, one after another.
        home = of_event * len(segments) + placed.segment[block]
        offset, size, by_rule = placed.offset[block], placed.size[block], placed.by_rule[block]
        _, gap, head = _filled(segments, home, offset, size, by_rule, count)
        head = head.reshape(count, len(segments))
        behind = np.append(0, np.cumsum(gap))[np.searchsorted(of_event, np.arange(count + 1))]
        largest = head.max(axis=1)
        np.maximum.at(largest, of_event, gap)
        return head.sum(axis=1) + np.diff(behind), largest

    def _segments(self, event: int) -> SegmentColumns:
        """Return the segments after an event; most events change none."""
        change, last = int(np.searchsorted(self._changes, event, side="right")), self._last
        if last is None or last[0] != change:
            last = self._last = (change, _segments(self.reserve, event))
        return last[1]

    def _placed(self, event: int, rows: Rows) -> _Placed:
        """Return where blocks, in order of address, lie in the segments after an event."""
        segments = self._segments(event)
        address = self._blocks.address[rows]
        segment = np.searchsorted(segments.address, address, side="right") - 1
        inside = segment >= 0
        start = segments.address[segment[inside]]
        inside[inside] = address[inside] - start < segments.bytes[segment[inside]].astype(np.uint64)
        fit, segment = rows[inside], segment[inside].astype(np.int64)
        offset = (address[inside] - segments.address[segment]).astype(np.int64)
        return _Placed(segments, inside, segment, offset, *extents(self._blocks, fit))


def extents(blocks: Allocations, rows: Rows) -> tuple[Int64, Bool]:
    """Return what the allocator uses for blocks, and whether that follows from the rule of rounding alone."""
    recorded = blocks.rounded[rows]
    by_rule: Bool = recorded < 0
    return np.where(by_rule, rounded_by_rule(blocks.bytes[rows]), recorded), by_rule


def layout(trace: MemoryTrace, device: int, event: int) -> Layout:
    """Return the segments, blocks and free stretches of a device after an event (-1: before the first).

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    return Placement(trace, device).at(event)


def faults(trace: MemoryTrace, device: int, event: int) -> tuple[str, ...]:
    """Return the contradictions in a device's segments and blocks after an event, one sentence each.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    placement = Placement(trace, device)
    placed, reserved = placement.at(event), placement.reserve
    misfits = placed.misfits if len(reserved) else placed.misfits[:0]
    lost = int(trace.allocations.bytes[misfits].sum())
    counts = {
        f"live blocks ({lost:,} bytes) lie outside every segment": len(misfits),
        "live blocks overlap the next one or the end of their segment; cut off there": placed.overlaps,
        "address ranges were reserved although they already were": reserved.doubled,
        "address ranges were released although they were not reserved": reserved.strays,
    }
    return tuple(
        f"{trace.devices[device].name}: {count:,} {fault}." for fault, count in counts.items() if count
    )


def _segments(reserve: Reserve, event: int) -> SegmentColumns:
    """Join adjacent pieces into segments: pieces reserved as one, or both expandable.

    An expandable segment belongs to one stream and pool. A piece for which the file does not record them
    takes them from the adjacent pieces; pieces of different streams or pools are not joined.
    """
    rows = np.flatnonzero((reserve.born <= event) & (reserve.freed > event))
    address, size, origin = reserve.address[rows], reserve.bytes[rows], reserve.origin[rows]
    stream, pool, expandable = reserve.stream[rows], reserve.pool[rows], reserve.expandable[rows]
    if not len(rows):
        return SegmentColumns(address, size, stream, pool, expandable)
    touch = np.diff(address) == size[:-1].astype(np.uint64)
    grown = touch & expandable[1:] & expandable[:-1]
    run = np.cumsum(np.concatenate(([0], ~grown)))
    stream, pool = _completed(stream, run), _completed(pool, run)
    same_home = grown & (stream[1:] == stream[:-1]) & (pool[1:] == pool[:-1])
    same_origin = touch & (origin[1:] == origin[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~(same_home | same_origin))))
    return SegmentColumns(
        address[first], np.add.reduceat(size, first), stream[first], pool[first], expandable[first]
    )


def _completed(column: Int32, run: Int64) -> Int32:
    """Fill unknown entries (-1) with the known one before them in their run, or else with the next one."""
    for _ in range(2):
        nearest = np.maximum.accumulate(np.where(column >= 0, np.arange(len(column)), 0))
        column = np.where((column < 0) & (run[nearest] == run), column[nearest], column)
        column, run = column[::-1], run[::-1]
    return column


def _filled(
    segments: SegmentColumns, home: Int64, offset: Int64, size: Int64, by_rule: Bool, copies: int = 1
) -> tuple[Int64, Int64, Int64]:
    """Return what blocks take of segments, the gaps behind them, and those before the first of each segment.

    Args:
        home: the segment of each block, in copies of all segments: copy * segments + segment, ascending.
        offset: where it begins in the segment, ascending within one.
    """
    count, segment = len(home), home % max(len(segments), 1)
    last = np.append(home[1:] != home[:-1], True)[:count]
    limit = np.append(offset[1:], 0)[:count]
    limit[last] = segments.bytes[segment[last]]
    room = limit - offset
    extent = np.clip(size, 0, room)
    gap = room - extent
    unsplit = ~segments.expandable & ~segments.small
    tail = by_rule & (gap <= SMALL_REQUEST) & unsplit[segment]
    extent, gap = extent + np.where(tail, gap, 0), np.where(tail, 0, gap)
    head = np.tile(segments.bytes, copies)  # the whole segment if it has no block
    first = np.flatnonzero(np.append(True, last[:-1]))[:count]
    head[home[first]] = offset[first]
    return extent, gap, head


def _laid_out(placed: _Placed, rows: Rows) -> Layout:
    """Return the layout of blocks (in order of address) and the gaps before, between and after them."""
    segments, segment, by_rule = placed.segments, placed.segment, placed.by_rule
    extent, gap, head = _filled(segments, segment, placed.offset, placed.size, by_rule)
    address = segments.address[segment] + placed.offset.astype(np.uint64)
    free_address = np.concatenate((segments.address, address + extent.astype(np.uint64)))
    free_bytes = np.concatenate((head, gap))
    free_segment = np.concatenate((np.arange(len(segments)), segment))
    free = np.flatnonzero(free_bytes)
    free = free[np.argsort(free_address[free], kind="stable")]
    return Layout(
        segments=segments,
        rows=rows[placed.inside],
        segment=segment,
        extent=extent,
        by_rule=by_rule,
        free_address=free_address[free],
        free_bytes=free_bytes[free],
        free_segment=free_segment[free].astype(np.int64),
        misfits=rows[~placed.inside],
        overlaps=int(np.count_nonzero(placed.size > extent + gap)),
    )


@dataclass(frozen=True, slots=True)
class Reserve:
    """Pieces of one device's reserved memory in address order, in columns of equal length.

    A piece is reserved after event e if born <= e < freed; born is -1 if it was reserved before the window,
    freed is the number of events if it is never released. `stream` and `pool` are rows of the trace's
    tables, -1 if not known. Pieces with the same `origin` were reserved together, by one event or as one
    segment of the start state. `doubled` counts pieces that were reserved while already reserved, `strays`
    pieces that were released while not reserved; both are 0 in a sound file.
    """

    address: UInt64
    bytes: Int64
    born: Int64
    freed: Int64
    stream: Int32
    pool: Int32
    expandable: Bool
    origin: Int64
    doubled: int
    strays: int

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class _Changes:
    """The segments at the start, then the segment events, in time order."""

    event: Int64
    address: UInt64
    bytes: Int64
    gives: Bool
    expandable: Bool
    stream: Int32
    pool: Int32


def reserve(trace: MemoryTrace, device: int) -> Reserve:
    """Return every piece of address space that a device's allocator reserved at some time in the window.

    Expandable segments are mapped and unmapped in parts: see `cut_ranges`.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    changes = _changes(trace, device)
    try:
        cuts, piece, origin = cut_ranges(changes.address, changes.bytes)
    except ValueError as error:
        raise UnreadableFileError(
            f"The segment events of {trace.devices[device].name} contradict each other: {error}.",
            where=trace.source,
            fix="Take the snapshot again: segments in this one overlap in a way that no allocator produces.",
        ) from error
    gives, same = changes.gives[origin], piece[1:] == piece[:-1]
    ends = gives[:-1] & same
    freed = np.full(len(piece), len(trace.events), np.int64)
    freed[:-1][ends] = changes.event[origin[1:][ends]]
    reserving = np.flatnonzero(gives)
    cut, origin = piece[reserving], origin[reserving]
    return Reserve(
        address=cuts[cut],
        bytes=(cuts[cut + 1] - cuts[cut]).astype(np.int64),
        born=changes.event[origin],
        freed=freed[reserving],
        stream=changes.stream[origin],
        pool=changes.pool[origin],
        expandable=changes.expandable[origin],
        origin=origin.astype(np.int64),
        doubled=int(np.count_nonzero(ends & gives[1:])),
        strays=int(np.count_nonzero(~gives) - np.count_nonzero(ends & ~gives[1:])),
    )


def _changes(trace: MemoryTrace, device: int) -> _Changes:
    segments, events = trace.segments, trace.events
    start = np.flatnonzero((segments.device == device) & (segments.bytes > 0))
    kind = events.kind
    rows = np.flatnonzero(code_mask(SEGMENT_KINDS)[kind])
    rows = rows[(events.device[rows] == device) & (events.bytes[rows] > 0)]
    return _Changes(
        event=np.concatenate((np.full(len(start), -1, np.int64), rows)),
        address=np.concatenate((segments.address[start], events.address[rows])),
        bytes=np.concatenate((segments.bytes[start], events.bytes[rows])),
        gives=np.concatenate((np.ones(len(start), bool), code_mask(GROWS)[kind[rows]])),
        expandable=np.concatenate((segments.expandable[start] != 0, code_mask(EXPANDS)[kind[rows]])),
        stream=np.concatenate((segments.stream[start], events.stream[rows])),
        pool=np.concatenate((segments.pool[start], events.pool[rows])),
    )


def pending_since(trace: MemoryTrace, device: int) -> Int64:
    """Return when each block's free was requested: int64, one entry per row of `trace.allocations`.

    An entry is the index of the event that requested the free, -1 if that was before the window, or the
    block's `freed` if nothing requested it before the block was freed. So a block is pending after event e
    if since <= e < freed. Blocks of other devices are never pending.

    If the free of a start-state block is completed in the window but not requested in it, the request came
    before the window, because CUDACachingAllocator.cpp records a request before each completion. If a source
    records no requests for the device, only the `pending` of the start state counts.
    """
    blocks, events = trace.allocations, trace.events
    at_start = blocks.device[: len(trace.start)] == device
    before = np.flatnonzero(at_start & (trace.start.pending != 0))
    if not len(before) and not (events.kind == Kind.FREE_REQUESTED).any():
        return blocks.freed
    changes = np.flatnonzero(
        ((events.kind == Kind.ALLOC) | (events.kind == Kind.FREE_REQUESTED)) & (events.device == device)
    )
    is_alloc = events.kind[changes] == Kind.ALLOC
    if is_alloc.all() and not len(before):
        return blocks.freed
    since: Int64 = blocks.freed.copy()
    if not is_alloc.all():
        rows = np.concatenate(
            (
                np.flatnonzero(at_start & (trace.start.address != 0)),
                len(trace.start) + np.flatnonzero(blocks.device[len(trace.start) :] == device),
            )
        )
        requested = _first_request(trace, rows, changes, is_alloc)
        since[rows] = np.minimum(since[rows], requested)
        before = np.union1d(before, _completed_only(trace, since, device))
    since[before] = -1
    return trace.events.kept(lambda: (since,))


def _first_request(trace: MemoryTrace, rows: Int64, changes: Int64, is_alloc: Bool) -> Int64:
    """Return the event that requested the free of each block; the number of events if none did.

    Args:
        rows: blocks of one device, in order of allocation.
        changes: that device's allocations and free requests, in time order.
    """
    old = len(rows) - int(np.count_nonzero(is_alloc))
    allocates = np.concatenate((np.ones(old, bool), is_alloc))
    event = np.concatenate((np.full(old, -1, np.int64), changes))
    address = np.concatenate((trace.allocations.address[rows[:old]], trace.events.address[changes]))
    began, ended, _ = match_frees(address, np.zeros(len(address), np.uint8), allocates)
    by_request = ~allocates[ended]
    requested = np.full(len(rows), len(trace.events), np.int64)
    index = np.cumsum(allocates) - 1  # index in `rows` of each allocation
    requested[index[began[by_request]]] = event[ended[by_request]]
    return requested


def _completed_only(trace: MemoryTrace, since: Int64, device: int) -> Int64:
    """Return the rows of the start state whose free is completed, but not requested, in the window."""
    blocks = trace.allocations
    rows = np.flatnonzero(blocks.device[: len(trace.start)] == device)
    rows = rows[(blocks.freed[rows] < len(trace.events)) & (since[rows] == blocks.freed[rows])]
    completed: Int64 = rows[trace.events.kind[blocks.freed[rows]] == Kind.FREE_COMPLETED]
    return completed
