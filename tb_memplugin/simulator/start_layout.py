"""The state of the allocator before the first event, restored from a trace.

Adjacent free blocks are always merged, so each gap between live blocks is one free block. Where the trace has
no rounded sizes, they follow from the settings; a rest that is too small to be a block of its own belongs to
the block before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.simulator.caching_allocator import FREE, LIVE, UNMAPPED, Block, CachingAllocator, FreeBlocks
from tb_memplugin.simulator.driver import space_for
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.allocator import DEFAULT_POOL, SMALL_REQUEST, SMALL_SEGMENT, SMALLEST_BLOCK, PoolId


@dataclass(frozen=True, slots=True)
class LiveAtStart:
    """A block of the start state: its row of `trace.start`, its address, and its rounded size in bytes.

    `size_recorded` says whether the trace recorded that size.
    """

    row: int
    address: int
    size: int
    size_recorded: bool


@dataclass(frozen=True, slots=True)
class SegmentAtStart:
    """A segment, or a mapped range of an expandable one, that was reserved before the first event."""

    address: int
    end: int
    stream: int
    pool: PoolId
    expandable: bool


def pool_of(trace: MemoryTrace, row: int) -> PoolId:
    """Return the id of a pool by its row; the default pool if the row is not known."""
    return trace.pools[row] if row >= 0 else DEFAULT_POOL


def stream_of(trace: MemoryTrace, row: int) -> int:
    """Return the pointer of a stream by its row; the default stream if the row is not known."""
    return trace.streams[row] if row >= 0 else 0


def longer_block(
    trace: MemoryTrace, device: int, gap: int, event: int, request: int
) -> tuple[int, int] | None:
    """Return the block at the start before a gap that was too small for a request, and its least bytes.

    A simulation put the request at the front of the gap, and the recording did not, although the gap fits
    best. So the gap is smaller, and the block before it has a rest; None if it cannot have such a rest.

    Args:
        gap: the address at which the gap begins in the simulation; the event is the first that differs.
        request: its rounded bytes.
    """
    start, table = trace.start, trace.segments
    own = np.flatnonzero((start.device == device) & (start.address != 0))
    alive = own[trace.allocations.freed[own] > event]
    before, behind = alive[start.address[alive] < gap], own[start.address[own] >= gap]
    ends = table.address + table.bytes.astype(np.uint64)
    home = np.flatnonzero((table.device == device) & (table.address <= gap) & (ends > gap))
    if not len(before) or not len(home):
        return None
    row, end = int(before[np.argmax(start.address[before])]), int(ends[home[0]])
    address, size = int(start.address[row]), int(start.bytes[row])
    if start.rounded[row] >= 0 or address < table.address[home[0]] or gap - address - size > SMALL_REQUEST:
        return None
    if len(behind) and int(start.address[behind].min()) < end:
        following = int(behind[np.argmin(start.address[behind])])
        if following not in alive:
            return None
        end = int(start.address[following])
    least = end - request + SMALLEST_BLOCK - address
    return (row, least) if 0 < least - size <= SMALL_REQUEST else None


class StartLayout:
    """A trace's start state, to be put into an empty allocator.

    Args:
        least: the least bytes of some blocks, by row of `trace.start`; see `longer_block`.
    """

    def __init__(
        self, trace: MemoryTrace, device: int, allocator: CachingAllocator, least: Mapping[int, int]
    ) -> None:
        self._allocator = allocator
        self._least = least
        self._segments = _segments(trace, device)
        self._live = _live(trace, device, allocator)
        self._starts = [block.address for block in self._live]
        self._requests = _Requests(trace, device, allocator)
        self._placed: dict[int, Block] = {}

    def put(self) -> dict[int, Block]:
        """Lay out every segment, in address order.

        Returns:
            The blocks by row of `trace.start`. A row is missing if it has no address, or no segment contains
            it.
        """
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
        """Whether a segment belongs to the small pool.

        For an expandable one, the largest request that it served decides, or its size if it served none.
        """
        if not segment.expandable:
            return segment.end - segment.address == SMALL_SEGMENT
        largest = max(self._requests.largest(segment), max((block.size for block in inside), default=0))
        if largest:
            return largest <= SMALL_REQUEST
        return bool((segment.end - segment.address) % self._allocator.settings.large_segment_bytes)

    def _filled(
        self, segment: SegmentAtStart, inside: list[LiveAtStart], home: FreeBlocks, origin: int
    ) -> tuple[Block, Block]:
        """Fill a segment with linked live and free blocks; return the first and the last."""
        chain: list[Block] = []
        cursor = segment.address
        for index, live in enumerate(inside):
            if live.address < cursor:
                continue  # it overlaps the block before it: the trace is inconsistent
            if live.address > cursor:
                chain.append(Block(cursor, live.address - cursor, home, FREE, origin))
            limit = inside[index + 1].address if index + 1 < len(inside) else segment.end
            size = self._extent(live, limit, home.small or segment.expandable)
            chain.append(Block(live.address, size, home, LIVE, origin))
            self._placed[live.row] = chain[-1]
            cursor = live.address + size
        if cursor < segment.end:
            chain.append(Block(cursor, segment.end - cursor, home, FREE, origin))
        for index, block in enumerate(chain):
            if index:
                block.put_behind(chain[index - 1])
            if block.state == FREE:
                home.put(block)
        return chain[0], chain[-1]

    def _extent(self, live: LiveAtStart, limit: int, splits: bool) -> int:
        """Return the rounded size of a block that ends at or before the address `limit`."""
        room, settings = limit - live.address, self._allocator.settings
        size = min(live.size, room)
        if live.size_recorded or splits or settings.expandable_segments:
            return size
        behind = self._requests.first_behind(live, limit)
        if size <= behind - live.address <= size + SMALL_REQUEST:
            return behind - live.address
        size = max(size, self._least.get(live.row, 0))
        return room if room - size <= SMALL_REQUEST or size >= settings.max_split_bytes else size

    def _bridge(
        self, before: tuple[SegmentAtStart, Block] | None, segment: SegmentAtStart | None, first: Block | None
    ) -> None:
        """Add the unmapped block after an expandable range, up to the next range or the end of its space."""
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
    """The requests that the trace recorded: what they say of the segments and blocks at its start."""

    def __init__(self, trace: MemoryTrace, device: int, allocator: CachingAllocator) -> None:
        events = trace.events
        rows = np.flatnonzero((events.kind == Kind.ALLOC) & (events.device == device))
        self._rows = rows[np.argsort(events.address[rows], kind="stable")]
        self._address = events.address[self._rows]
        self._size = allocator.settings.rounded_all(events.bytes[self._rows])
        self._unmaps = np.flatnonzero((events.kind == Kind.SEGMENT_UNMAP) & (events.device == device))
        self._unmapped = events.address[self._unmaps]
        self._freed = trace.allocations.freed

    def first_behind(self, live: LiveAtStart, limit: int) -> int:
        """Return the address of the first request between a block and `limit`; 0 if none.

        Only requests while the block was alive count: later the gap is one with the memory of the block.
        """
        inside = slice(
            *np.searchsorted(self._address, np.array([live.address + 1, limit], np.uint64)).tolist()
        )
        if inside.start == inside.stop:
            return 0
        first = inside.start + int(np.argmin(self._rows[inside]))
        return int(self._address[first]) if self._rows[first] < self._freed[live.row] else 0

    def largest(self, segment: SegmentAtStart) -> int:
        """Return the rounded size of the largest request that a segment served; 0 if none.

        Once pages of it are unmapped, its addresses can belong to another segment.
        """
        edges = np.array([segment.address, segment.end], np.uint64)
        here = slice(*np.searchsorted(self._address, edges).tolist())
        gone = self._unmaps[(self._unmapped >= edges[0]) & (self._unmapped < edges[1])]
        mine = self._rows[here] < gone[0] if len(gone) else slice(None)
        return int(self._size[here][mine].max(initial=0))


def _segments(trace: MemoryTrace, device: int) -> list[SegmentAtStart]:
    """Return a device's segments in address order; adjacent expandable ranges are joined."""
    table = trace.segments
    rows = np.flatnonzero((table.device == device) & (table.bytes > 0))
    rows = rows[np.argsort(table.address[rows], kind="stable")]
    columns = (table.address, table.bytes, table.stream, table.pool, table.expandable)
    segments: list[SegmentAtStart] = []
    for address, size, stream, pool, grows in zip(*(each[rows].tolist() for each in columns), strict=True):
        stretch = SegmentAtStart(
            address, address + size, stream_of(trace, stream), pool_of(trace, pool), bool(grows)
        )
        if segments and grows and segments[-1] == replace(stretch, address=segments[-1].address, end=address):
            segments[-1] = replace(segments[-1], end=stretch.end)
        elif not segments or address >= segments[-1].end:
            segments.append(stretch)
    return segments


def _live(trace: MemoryTrace, device: int, allocator: CachingAllocator) -> list[LiveAtStart]:
    """Return the blocks of the start state that have an address, in address order."""
    start = trace.start
    rows = np.flatnonzero((start.device == device) & (start.address != 0))
    rows = rows[np.argsort(start.address[rows], kind="stable")]
    recorded = start.rounded[rows] >= 0
    size = np.where(recorded, start.rounded[rows], allocator.settings.rounded_all(start.bytes[rows]))
    columns = (rows.tolist(), start.address[rows].tolist(), size.tolist(), recorded.tolist())
    return [LiveAtStart(*block) for block in zip(*columns, strict=True)]


def _origin(
    segment: SegmentAtStart,
    before: tuple[SegmentAtStart, Block] | None,
    home: FreeBlocks,
    allocator: CachingAllocator,
) -> int:
    """Return the first address of the expandable segment to which a mapped range belongs.

    It is the segment of the range before it, if both have the same home and whole pages lie between them.
    """
    if before is not None and before[1].home is home and before[1].origin >= 0:
        gap = segment.address - before[0].end
        page = allocator.settings.page(home.small)
        if gap % page == 0 and gap < space_for(allocator.driver.capacity, page):
            return before[1].origin
    return segment.address
