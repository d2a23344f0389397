"""The loop of a replay: one pass over a device's events, from the allocator's state before the first.

That state is restored from the trace. Adjacent free blocks are always merged, so each gap between live blocks
is one free block. Where the trace has no rounded sizes, they follow from the settings; a rest that is too
small to be a block of its own belongs to the block before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator.allocator_settings import (
    UNLIMITED,
    AllocatorSettings,
    recorded_settings,
)
from tb_memplugin.simulator.caching_allocator import (
    FREE,
    LIVE,
    UNMAPPED,
    Block,
    CachingAllocator,
    FreeBlocks,
    SegmentChange,
)
from tb_memplugin.simulator.driver import (
    FIRST_ADDRESS,
    DeviceMemory,
    RecordedChange,
    RecordedDriver,
    space_for,
)
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.allocator import DEFAULT_POOL, SMALL_REQUEST, SMALL_SEGMENT, SMALLEST_BLOCK, PoolId
from tb_memplugin.trace.kinds import GROWS, SEGMENT_KINDS, SHRINKS
from tb_memplugin.trace.tables import Bool, Int64, UInt64


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


def lay_out(
    trace: MemoryTrace, device: int, allocator: CachingAllocator, least: Mapping[int, int]
) -> dict[int, Block]:
    """Put a trace's start state into an empty allocator.

    Args:
        least: the least bytes of some blocks, by row of `trace.start`; see `longer_block`.

    Returns:
        The blocks by row of `trace.start`. A row is missing if it has no address, or no segment contains it.
    """
    return _Layout(trace, device, allocator, least).build()


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


class _Layout:
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

    def build(self) -> dict[int, Block]:
        """Lay out every segment, in address order, and return the blocks by row."""
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


APART = 1 << 40
"""Made-up addresses begin at a multiple of this, at least this far beyond all recorded addresses."""

MOST_SURPRISES = 1_000
"""Above this number of surprises, a replay keeps no more of them."""

ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM = map(
    int, (Kind.ALLOC, Kind.FREE_COMPLETED, Kind.FREE_REQUESTED, Kind.OOM)
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that found no memory: its event, its rounded bytes, and the bytes reserved and live then.

    Event -1 means that the blocks live at the trace's start do not fit.
    """

    event: int
    requested_bytes: int
    reserved_bytes: int
    live_bytes: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the allocator did in a pass.

    Attributes:
        allocations: events of the allocations that were served, in order; int64, shape (n,).
        address, rounded: address and rounded size in bytes of each of them; shape (n,).
        start_address, start_rounded: the same for each row of `source.start`; 0 and -1 on other devices;
            shape (rows,).
        early: blocks that were freed before their stream was done, because memory ran short: the event at
            that time, the event of the recorded free (-1: not in the window), and the recorded address.
        changes: the changes of the reserved memory; `clock` is an event.
        reserved_at_start: bytes reserved before the first event.
        surprises: (event, sentence) where the recording differs; empty if it is not followed.
        failure: the request that found no memory here though it was served in the recording. The replay ends
            there.
        rescued: events of requests that failed in the recording and found memory here.
        end: the number of the trace's events that were replayed.
    """

    allocations: Int64
    address: UInt64
    rounded: Int64
    start_address: UInt64
    start_rounded: Int64
    early: tuple[tuple[int, int, int], ...]
    changes: tuple[SegmentChange, ...]
    reserved_at_start: int
    surprises: tuple[tuple[int, str], ...]
    failure: Failure | None
    rescued: tuple[int, ...]
    end: int


def run(
    trace: MemoryTrace,
    device: int,
    settings: AllocatorSettings,
    capacity: int | None,
    follow: bool,
    by_age: bool,
    least: Mapping[int, int],
) -> Outcome:
    """Replay one device. `follow`, `by_age`, `least`: see `replay`, `CachingAllocator` and `lay_out`."""
    beyond = first_made_up_address(trace)
    driver = RecordedDriver(beyond, capacity) if follow else DeviceMemory(capacity, first_address=beyond)
    allocator = CachingAllocator(settings, driver, by_age=by_age)
    return _Run(trace, device, allocator, least, trusts_start=follow and by_age).run()


def first_made_up_address(trace: MemoryTrace) -> int:
    """Return an address beyond all addresses in a trace."""
    tables = (trace.events, trace.start, trace.segments)
    top = max(int(table.address.max(initial=0)) for table in tables)
    return max((top // APART + 2) * APART, FIRST_ADDRESS)


class _Run:
    def __init__(
        self,
        trace: MemoryTrace,
        device: int,
        allocator: CachingAllocator,
        least: Mapping[int, int],
        *,
        trusts_start: bool,
    ) -> None:
        self._trace = trace
        self._least = least
        self._trusts_start = trusts_start and bool((trace.segments.device == device).any())
        self._device = device
        self._allocator = allocator
        self._recorded = allocator.driver if isinstance(allocator.driver, RecordedDriver) else None
        self._live: dict[int, Block] = {}
        self._waiting: dict[int, int] = {}
        self._destroyed_pools = _destroyed_pools(trace, device)
        self._rows: list[int] = []
        self._late_row = -1
        self._late_before = False
        self._served = (list[int](), list[int](), list[int]())
        self._start_address = np.zeros(len(trace.start), np.uint64)
        self._start_rounded = np.full(len(trace.start), -1, np.int64)
        self._early: list[tuple[int, int, int]] = []
        self._reserved_at_start = 0
        self._surprises: list[tuple[int, str]] = []
        self._failure: Failure | None = None
        self._rescued: list[int] = []
        self._end = len(trace.events)

    def run(self) -> Outcome:
        """Lay out the start state, then replay the events."""
        self._begin()
        if self._failure is None:
            self._events(*_columns(self._trace, self._device, self._allocator))
        if self._recorded is not None:
            self._empty_by_hand()
            self._note(self._end - 1)
        early = self._allocator.freed_early
        self._early += [(early[at], -1, address) for address, at in self._waiting.items() if at in early]
        events, address, rounded = self._served
        return Outcome(
            allocations=np.array(events, np.int64),
            address=np.array(address, np.uint64),
            rounded=np.array(rounded, np.int64),
            start_address=self._start_address,
            start_rounded=self._start_rounded,
            early=tuple(self._early),
            changes=tuple(self._allocator.changes),
            reserved_at_start=self._reserved_at_start,
            surprises=tuple(self._surprises),
            failure=self._failure,
            rescued=tuple(self._rescued),
            end=self._end,
        )

    def _begin(self) -> None:
        """Lay out the start state. Blocks without a known place are allocated before the first event."""
        trace, allocator, start = self._trace, self._allocator, self._trace.start
        allocator.clock = -1
        placed = lay_out(trace, self._device, allocator, self._least)
        self._reserved_at_start = allocator.reserved
        if isinstance(allocator.driver, DeviceMemory):
            self._make_room(allocator.driver)
        for row in np.flatnonzero(start.device == self._device).tolist():
            block = placed.get(row)
            if block is None:
                pool, stream = pool_of(trace, int(start.pool[row])), stream_of(trace, int(start.stream[row]))
                block = allocator.malloc(int(start.bytes[row]), stream, pool)
            if block is None:
                self._fail(-1, int(start.bytes[row]))
                return
            self._start_address[row], self._start_rounded[row] = block.address, block.size
            if start.pending[row]:
                self._waiting[int(start.address[row])] = allocator.defer_free(block)
            elif start.address[row]:
                self._live[int(start.address[row])] = block

    def _make_room(self, device: DeviceMemory) -> None:
        """Free unused segments first if the device has less memory than is reserved at the start."""
        allocator = self._allocator
        device.used = allocator.reserved
        if device.capacity is not None and device.used > device.capacity:
            allocator.empty_cache()
            if device.used > device.capacity:
                self._fail(-1, 0)

    def _events(
        self,
        rows: list[int],
        kinds: list[int],
        addresses: list[int],
        sizes: list[int],
        homes: list[FreeBlocks],
    ) -> None:
        """Replay the events. Only the most common kinds of events are handled here."""
        self._rows = rows
        allocator, live, recorded = self._allocator, self._live, self._recorded
        allocate, free = allocator.allocate, allocator.free
        served, put, took = (column.append for column in self._served)
        trusts_start = self._trusts_start
        upcoming = recorded.upcoming if recorded is not None else None
        surprised = recorded.surprises if recorded is not None else None
        for row, kind, address, size, home in zip(rows, kinds, addresses, sizes, homes, strict=True):
            if kind == ALLOC:
                if address in live:
                    free(live.pop(address))  # the recording misses its free
                allocator.clock = row
                if trusts_start:
                    allocator.recorded_address = address
                block = self._as_recorded(size, home) if upcoming else allocate(size, home)
                if block is None:
                    self._fail(row, size)
                    return
                live[address] = block
                served(row)
                put(block.address)
                took(block.size)
                if surprised:
                    self._note(row)
            elif kind == FREE_COMPLETED:
                if upcoming:
                    self._empty_by_hand()
                if address in live:
                    free(live.pop(address))
                elif address in self._waiting:
                    self._completed(row, address)
            else:
                self._rare(row, kind, address, size, home)

    def _rare(self, row: int, kind: int, address: int, size: int, home: FreeBlocks) -> None:
        """Handle the rarer events: segment changes, requested frees that wait for a stream, failures."""
        allocator = self._allocator
        if kind == FREE_REQUESTED:
            self._empty_by_hand()
            block = self._live.pop(address, None)
            if block is not None:
                self._waiting[address] = allocator.defer_free(block)
            return
        allocator.clock = row
        while self._destroyed_pools and self._destroyed_pools[0][0] <= row:
            allocator.destroyed.add(self._destroyed_pools.popleft()[1])
        if kind == OOM:
            self._request_that_failed(row, size, home)
        elif self._recorded is not None:
            if not self._recorded.upcoming:
                self._late_before = self._is_behind_late_free(row)
            self._recorded.upcoming.append(RecordedChange(Kind(kind), address, size))
        else:
            allocator.empty_cache()

    def _completed(self, row: int, address: int) -> None:
        self._late_row = row
        clock = self._allocator.complete(self._waiting.pop(address))
        if clock is not None:
            self._early.append((clock, row, address))

    def _as_recorded(self, size: int, home: FreeBlocks) -> Block | None:
        """Serve a request that follows recorded segment changes.

        Segments are freed when a request finds no memory, and when the program empties the cache. It was the
        program if the request would have found a free block. But a request that finds no memory also waits
        for all streams: it did not find the blocks whose frees completed directly before the changes.
        """
        recorded, allocator = self._recorded, self._allocator
        assert recorded is not None
        if allocator.settings.gc_threshold > 0:
            allocator.free_segments(recorded.collected(allocator.unused_segments().keys()))
        if recorded.frees_first() and allocator.has(size, home):
            allocator.empty_cache()
        failed_first = self._late_before and (recorded.grows() or recorded.fails)
        self._late_before = False
        block = allocator.allocate_anew(size, home) if failed_first else allocator.allocate(size, home)
        recorded.finish()
        return block

    def _empty_by_hand(self) -> None:
        """Empty the cache as the program did, if the recording changed segments without a request."""
        if self._recorded is not None and self._recorded.upcoming:
            self._allocator.empty_cache()
            self._recorded.finish()
            self._late_before = False

    def _request_that_failed(self, row: int, size: int, home: FreeBlocks) -> None:
        """Replay a request that failed in the recording. If it finds memory here, that is freed at once."""
        recorded = self._recorded
        if recorded is not None:
            recorded.fails = True
            self._late_before = self._late_before or self._is_behind_late_free(row)
            block = self._as_recorded(size, home)
            recorded.fails = False
        else:
            block = self._allocator.allocate(size, home)
        if block is not None:
            self._rescued.append(row)
            self._allocator.free(block)

    def _is_behind_late_free(self, row: int) -> bool:
        """Whether the event before `row` was the completed free of a block that had waited for a stream."""
        return self._rows[max(bisect_left(self._rows, row) - 1, 0)] == self._late_row

    def _note(self, row: int) -> None:
        """Move the driver's surprises into the result, with the event, up to `MOST_SURPRISES`."""
        assert self._recorded is not None
        if len(self._surprises) < MOST_SURPRISES:
            self._surprises += [(row, sentence) for sentence in self._recorded.surprises]
        self._recorded.surprises.clear()

    def _fail(self, row: int, size: int) -> None:
        live = int(self._trace.live(self._device)[max(row, 0)])
        self._failure = Failure(row, size, self._allocator.reserved, live)
        self._end = max(row, 0)


def _destroyed_pools(trace: MemoryTrace, device: int) -> deque[tuple[int, PoolId]]:
    """Return (event, pool) of the events that free memory of a private pool: it was destroyed by then."""
    events = trace.events
    private = np.array([pool != DEFAULT_POOL for pool in trace.pools] + [False], bool)
    rows = np.flatnonzero(np.isin(events.kind, SHRINKS) & (events.device == device))
    rows = rows[private[events.pool[rows]]]  # pool -1 (not known) picks the last entry, False
    return deque((row, pool_of(trace, int(events.pool[row]))) for row in rows.tolist())


def _columns(
    trace: MemoryTrace, device: int, allocator: CachingAllocator
) -> tuple[list[int], list[int], list[int], list[int], list[FreeBlocks]]:
    """Return the columns of a device's events that a replay needs: row, kind, address, size and home.

    Sizes of requests are rounded. A requested free is dropped if it completes at once. If the recording is
    not followed, its segment changes are dropped too, except those where the program emptied the cache.
    """
    events = trace.events
    rows = np.flatnonzero((events.device == device) & (events.kind != Kind.MARK))
    kind, address = events.kind[rows].astype(np.int64), events.address[rows]
    kind[kind == Kind.STORAGE_FREE] = FREE_COMPLETED
    at_once = np.zeros(len(rows), bool)
    at_once[:-1] = (
        (kind[:-1] == FREE_REQUESTED) & (kind[1:] == FREE_COMPLETED) & (address[:-1] == address[1:])
    )
    kept = ~at_once
    if not isinstance(allocator.driver, RecordedDriver):
        kept &= ~np.isin(kind, SEGMENT_KINDS)
        kept[emptied_by_hand(trace, device, rows, kind)] = True
    rows, kind, address = rows[kept], kind[kept], address[kept]
    asks = (kind == ALLOC) | (kind == OOM)
    size = events.bytes[rows]
    size[asks] = allocator.settings.rounded_all(size[asks])
    homes = _homes(trace, rows, asks, size, allocator)
    return rows.tolist(), kind.tolist(), address.tolist(), size.tolist(), homes


def _homes(
    trace: MemoryTrace, rows: Int64, asks: Bool, size: Int64, allocator: CachingAllocator
) -> list[FreeBlocks]:
    """Return the free blocks of the pool and stream of each request; other events get any."""
    pool, stream = trace.events.pool[rows].astype(np.int64), trace.events.stream[rows].astype(np.int64)
    small = (size <= SMALL_REQUEST).astype(np.int64)
    code = np.where(asks, ((pool + 1) * (len(trace.streams) + 1) + stream + 1) * 2 + small, -1)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    homes = [
        allocator.half(pool_of(trace, int(pool[row])), bool(small[row])).on(
            stream_of(trace, int(stream[row]))
        )
        for row in first.tolist()
    ]
    return [homes[home] for home in inverse.tolist()]


def emptied_by_hand(trace: MemoryTrace, device: int, rows: Int64, kind: Int64) -> Int64:
    """Return the indices in `rows` of the events at which the program emptied the cache.

    Such an event is the last of a run, which is several segment frees or unmaps in a row. The allocator also
    frees segments by itself when a request finds no memory, and a recording does not tell the two apart. A
    run is assumed to be a request's if an out-of-memory event follows directly, or a segment that, without
    the run, would have raised the reserved memory above its recorded peak. If the recorded settings let the
    allocator free segments at other times too, every segment allocated directly after a run counts.

    Args:
        rows, kind: the device's events and their kinds, shape (n,).
    """
    gives_back = np.isin(kind, SHRINKS)
    last = np.flatnonzero(gives_back & ~np.append(gives_back[1:], False))
    first = np.flatnonzero(gives_back & ~np.append(False, gives_back[:-1]))
    eager, level = _frees_eagerly(trace), trace.events.reserved[rows]
    most, start = int(level.max(initial=0)), trace.devices[device].reserved_at_start or 0
    by_hand = []
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        behind = end + 1
        grows = behind < len(kind) and kind[behind] in GROWS
        before = int(level[begin - 1]) if begin else start
        failed = grows and (eager or before + int(trace.events.bytes[rows[behind]]) > most)
        if not failed and not (behind < len(kind) and kind[behind] == Kind.OOM):
            by_hand.append(end)
    return np.array(by_hand, np.int64)


def _frees_eagerly(trace: MemoryTrace) -> bool:
    """Whether the recorded settings let the allocator free segments before memory runs out."""
    try:
        settings = recorded_settings(trace)
    except MemPluginError:
        return False
    return settings.max_split_bytes < UNLIMITED or settings.gc_threshold > 0
