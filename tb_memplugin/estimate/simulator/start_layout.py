"""The allocator as it stood before a trace's first event: segments, live blocks, and what lay between.

Adjacent free blocks are always one, so the gaps between live blocks are the free blocks. What a block takes
beyond its request follows from the settings where the trace does not tell it; a rest that is too small to be
a block of its own belongs to the block before it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.estimate.simulator.allocator_settings import LARGEST_SMALL, SMALL_SEGMENT
from tb_memplugin.estimate.simulator.blocks import FREE, LIVE, UNMAPPED, Block, FreeBlocks, PoolId
from tb_memplugin.estimate.simulator.caching_allocator import CachingAllocator
from tb_memplugin.estimate.simulator.driver import space_for
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.allocator import DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class LiveAtStart:
    """A block of the start state: row of `trace.start`, where it lay, and what it takes; bytes."""

    row: int
    address: int
    size: int
    told: bool


@dataclass(frozen=True, slots=True)
class SegmentAtStart:
    """A stretch that was reserved before the first event."""

    address: int
    end: int
    stream: int
    pool: PoolId
    expandable: bool


def pool_of(trace: MemoryTrace, row: int) -> PoolId:
    """The id of a pool by its row; the default pool where it is not known."""
    return trace.pools[row] if row >= 0 else DEFAULT_POOL


def stream_of(trace: MemoryTrace, row: int) -> int:
    """The pointer of a stream by its row; the default stream where it is not known."""
    return trace.streams[row] if row >= 0 else 0


def lay_out(trace: MemoryTrace, device: int, allocator: CachingAllocator) -> dict[int, Block]:
    """Put a trace's start state into an allocator that is empty.

    Returns:
        The blocks by row of `trace.start`. A row is absent where no address is told, or no segment holds it.
    """
    return _Layout(trace, device, allocator).build()


class _Layout:
    def __init__(self, trace: MemoryTrace, device: int, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._segments = _segments(trace, device)
        self._live = _live(trace, device, allocator)
        self._starts = [block.address for block in self._live]
        self._requests = _Requests(trace, device, allocator)
        self._placed: dict[int, Block] = {}

    def build(self) -> dict[int, Block]:
        """Lay every segment out, in address order."""
        allocator = self._allocator
        before: tuple[SegmentAtStart, Block] | None = None
        for segment in self._segments:
            inside = self._live[
                bisect_left(self._starts, segment.address) : bisect_left(self._starts, segment.end)
            ]
            home = allocator.half(segment.pool, self._is_small(segment, inside)).on(segment.stream)
            origin = -1 if not segment.expandable else _origin(segment, before, home, allocator)
            first, last = self._filled(segment, inside, home, origin)
            self._bridge(before, segment, first)
            allocator.reserved += segment.end - segment.address
            before = segment, last
        self._bridge(before, None, None)
        allocator.peak_reserved = allocator.reserved
        return self._placed

    def _is_small(self, segment: SegmentAtStart, inside: list[LiveAtStart]) -> bool:
        """One that expands is of the pool whose requests it served; its size tells where it served none."""
        if not segment.expandable:
            return segment.end - segment.address == SMALL_SEGMENT
        largest = max(self._requests.largest(segment), max((block.size for block in inside), default=0))
        if largest:
            return largest <= LARGEST_SMALL
        return bool((segment.end - segment.address) % self._allocator.settings.large_segment_bytes)

    def _filled(
        self, segment: SegmentAtStart, inside: list[LiveAtStart], home: FreeBlocks, origin: int
    ) -> tuple[Block, Block]:
        """Live and free blocks, linked, from a segment's beginning to its end: the first and the last."""
        chain: list[Block] = []
        cursor = segment.address
        for place, live in enumerate(inside):
            if live.address < cursor:
                continue  # it overlaps the one before: the trace contradicts itself
            if live.address > cursor:
                chain.append(Block(cursor, live.address - cursor, home, FREE, origin))
            limit = inside[place + 1].address if place + 1 < len(inside) else segment.end
            size = self._extent(live, limit - live.address, home.small or segment.expandable)
            chain.append(Block(live.address, size, home, LIVE, origin))
            self._placed[live.row] = chain[-1]
            cursor = live.address + size
        if cursor < segment.end:
            chain.append(Block(cursor, segment.end - cursor, home, FREE, origin))
        for place, block in enumerate(chain):
            if place:
                block.put_behind(chain[place - 1])
            if block.state == FREE:
                home.put(block)
        return chain[0], chain[-1]

    def _extent(self, live: LiveAtStart, room: int, splits: bool) -> int:
        size, settings = min(live.size, room), self._allocator.settings
        if live.told or splits or settings.expandable_segments:
            return size
        return room if room - size <= LARGEST_SMALL or size >= settings.max_split_bytes else size

    def _bridge(
        self, before: tuple[SegmentAtStart, Block] | None, segment: SegmentAtStart | None, first: Block | None
    ) -> None:
        """Unmapped addresses behind a stretch that expands, up to the next or to the end of its space."""
        if before is None or not before[0].expandable:
            return
        self._allocator.simple = False
        stretch, last = before
        space = space_for(self._allocator.driver.capacity, self._allocator.settings.page(last.home.small))
        room = space if segment is None else segment.address - stretch.end
        if room <= 0:
            return
        rest = Block(stretch.end, min(room, space), last.home, UNMAPPED, last.origin)
        rest.put_behind(last)
        if first is not None and first.origin == last.origin:
            first.put_behind(rest)
        last.home.put(rest)


class _Requests:
    """Where requests were served during the window, to tell which pool a segment is of."""

    def __init__(self, trace: MemoryTrace, device: int, allocator: CachingAllocator) -> None:
        rows = np.flatnonzero((trace.events.kind == Kind.ALLOC) & (trace.events.device == device))
        rows = rows[np.argsort(trace.events.address[rows], kind="stable")]
        self._address = trace.events.address[rows]
        self._size = allocator.settings.rounded_all(trace.events.bytes[rows])

    def largest(self, segment: SegmentAtStart) -> int:
        """The largest request that a segment served, rounded; 0 if none."""
        edges = np.array([segment.address, segment.end], np.uint64)
        first, last = np.searchsorted(self._address, edges).tolist()
        return int(self._size[first:last].max(initial=0))


def _segments(trace: MemoryTrace, device: int) -> list[SegmentAtStart]:
    """What a device had reserved, in address order; stretches that touch and expand are one."""
    table = trace.segments
    rows = np.flatnonzero((table.device == device) & (table.bytes > 0))
    rows = rows[np.argsort(table.address[rows], kind="stable")]
    columns = (table.address, table.bytes, table.stream, table.pool, table.expandable)
    found: list[SegmentAtStart] = []
    for address, size, stream, pool, grows in zip(*(each[rows].tolist() for each in columns), strict=True):
        stretch = SegmentAtStart(
            address, address + size, stream_of(trace, stream), pool_of(trace, pool), bool(grows)
        )
        if found and grows and found[-1] == replace(stretch, address=found[-1].address, end=address):
            found[-1] = replace(found[-1], end=stretch.end)
        elif not found or address >= found[-1].end:
            found.append(stretch)
    return found


def _live(trace: MemoryTrace, device: int, allocator: CachingAllocator) -> list[LiveAtStart]:
    """The start state's blocks that have an address, in address order."""
    start = trace.start
    rows = np.flatnonzero((start.device == device) & (start.address != 0))
    rows = rows[np.argsort(start.address[rows], kind="stable")]
    told = start.rounded[rows] >= 0
    size = np.where(told, start.rounded[rows], allocator.settings.rounded_all(start.bytes[rows]))
    columns = (rows.tolist(), start.address[rows].tolist(), size.tolist(), told.tolist())
    return [LiveAtStart(*block) for block in zip(*columns, strict=True)]


def _origin(
    segment: SegmentAtStart,
    before: tuple[SegmentAtStart, Block] | None,
    home: FreeBlocks,
    allocator: CachingAllocator,
) -> int:
    """Where the segment of a stretch begins: with the one before it, if whole pages lie between."""
    if before is not None and before[1].home is home and before[1].origin >= 0:
        gap = segment.address - before[0].end
        page = allocator.settings.page(home.small)
        if gap % page == 0 and gap < space_for(allocator.driver.capacity, page):
            return before[1].origin
    return segment.address
