"""Replay any trace through a simulated allocator, with the recorded settings or with others."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator.allocator_settings import (
    UNLIMITED,
    AllocatorSettings,
    recorded_settings,
)
from tb_memplugin.simulator.caching_allocator import Block, CachingAllocator, FreeBlocks, SegmentChange
from tb_memplugin.simulator.driver import FIRST_ADDRESS, DeviceMemory, RecordedChange, RecordedDriver
from tb_memplugin.simulator.start_layout import StartLayout, longer_block, pool_of, stream_of
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.allocator import DEFAULT_POOL, SMALL_REQUEST, PoolId
from tb_memplugin.trace.kinds import GROWS, SEGMENT_KINDS, SHRINKS
from tb_memplugin.trace.tables import Bool, Int64, UInt64, code_mask

MOST_LONGER = 8
"""How many blocks of the start state are made longer at most, each at the cost of one replay."""

APART = 1 << 40
"""Made-up addresses begin at a multiple of this, at least this far beyond all recorded addresses."""

MOST_SURPRISES = 1_000
"""Above this number of surprises, a replay keeps no more of them."""

ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM = map(
    int, (Kind.ALLOC, Kind.FREE_COMPLETED, Kind.FREE_REQUESTED, Kind.OOM)
)


@dataclass(frozen=True, slots=True)
class FirstMiss:
    """The first allocation whose simulated address differs from the recorded one.

    `event` is an index into the trace's events, `bytes` the requested size, `cause` a sentence.
    """

    event: int
    bytes: int
    recorded_address: int
    simulated_address: int
    cause: str


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
class Replay:
    """What the simulated allocator did on one device of a trace.

    Attributes:
        source, device, settings, capacity: what was replayed; `capacity` in bytes, None for no limit.
        follows_record: whether the driver answered as recorded, so that addresses can be compared.
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

    source: MemoryTrace
    device: int
    settings: AllocatorSettings
    capacity: int | None
    follows_record: bool
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

    @property
    def allocs(self) -> int:
        """The number of allocations that were served."""
        return len(self.allocations)

    @cached_property
    def exact(self) -> np.ndarray:
        """Whether each allocation is at the recorded address: bool, shape (allocations,)."""
        return np.asarray(self.address == self.source.events.address[self.allocations])

    @property
    def exact_addresses(self) -> int:
        """The number of allocations at the recorded address."""
        return int(np.count_nonzero(self.exact))

    @cached_property
    def reserved(self) -> Int64:
        """The simulated reserved bytes: int64, shape (end + 1,); entry e + 1 holds after event e.

        What a request freed before it failed is not in it: `failure.reserved_bytes` says what was left.
        """
        level = np.zeros(self.end + 1, np.int64)
        level[0] = self.reserved_at_start
        for change in self.changes:
            if change.clock < self.end:
                level[change.clock + 1] += change.growth
        return np.cumsum(level)

    @cached_property
    def reserved_peak(self) -> int:
        """The highest reserved bytes at any time, also while a request is being served."""
        growth = (change.growth for change in self.changes)
        return max(accumulate(growth, initial=self.reserved_at_start))

    @property
    def reserved_peak_recorded(self) -> int | None:
        """The highest recorded reserved bytes; None if the trace does not record them."""
        reserved = self.source.reserved(self.device)
        return None if reserved is None else int(reserved.max())

    @cached_property
    def first_miss(self) -> FirstMiss | None:
        """The first allocation at another address than recorded; None also if nothing can be compared."""
        missed = np.flatnonzero(~self.exact)
        if not self.follows_record or not len(missed):
            return None
        row = int(missed[0])
        event = int(self.allocations[row])
        why = [sentence for clock, sentence in self.surprises if clock <= event]
        return FirstMiss(
            event,
            int(self.source.events.bytes[event]),
            int(self.source.events.address[event]),
            int(self.address[row]),
            why[-1] if why else "another free block fits best",
        )


def replay(
    trace: MemoryTrace,
    device: int,
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
    *,
    recorded: bool | None = None,
) -> Replay:
    """Replay a device's events through a simulated allocator, from the state in which the trace begins.

    Args:
        trace: any trace. The blocks and segments at its start stay as they are: other settings apply from
            the first event on.
        settings: of the allocator; the recorded ones if None.
        capacity: total bytes that the allocator can reserve; None for no limit.
        recorded: whether to follow the recording: segments at the recorded addresses, and no memory where
            there was none. It is never followed if it has no segments. None: follow it if neither settings
            nor a capacity are given.

    Raises:
        MemPluginError: the trace's own settings cannot be simulated.
    """
    follow = settings is None and capacity is None if recorded is None else recorded
    follow = follow and trace.records_segments(device)
    chosen = recorded_settings(trace) if settings is None else settings
    result = _with_longer_blocks(_Run(trace, device, chosen, capacity, follow).replay())
    if result.first_miss is None:
        return result
    other = _Run(trace, device, chosen, capacity, follow, by_age=False).replay()  # by an older PyTorch
    return max(result, other, key=lambda candidate: candidate.exact_addresses)


def _with_longer_blocks(result: Replay) -> Replay:
    """Replay again as long as a request that went elsewhere tells of a longer block at the start.

    One replay more for each such block, `MOST_LONGER` at the most.
    """
    trace, device, least = result.source, result.device, dict[int, int]()
    for _ in range(MOST_LONGER):
        miss = result.first_miss
        if miss is None:
            break
        request = result.settings.rounded(miss.bytes)
        longer = longer_block(trace, device, miss.simulated_address, miss.event, request)
        if longer is None:
            break
        least[longer[0]] = longer[1]
        settings, capacity, follows = result.settings, result.capacity, result.follows_record
        again = _Run(trace, device, settings, capacity, follows, least=least).replay()
        if again.exact_addresses <= result.exact_addresses:
            break
        result = again
    return result


def first_made_up_address(trace: MemoryTrace) -> int:
    """Return an address beyond all addresses in a trace, but those of the upper half (XPU's are there)."""
    address = np.concatenate([table.address for table in (trace.events, trace.start, trace.segments)])
    top = int(address.max(initial=0, where=address < 1 << 63))
    return max((top // APART + 2) * APART, FIRST_ADDRESS)


class _Run:
    """One pass over a device's events. `by_age`, `least`: see `CachingAllocator` and `StartLayout`."""

    def __init__(
        self,
        trace: MemoryTrace,
        device: int,
        settings: AllocatorSettings,
        capacity: int | None,
        follow: bool,
        *,
        by_age: bool = True,
        least: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._trace, self._device, self._capacity, self._least = trace, device, capacity, least
        beyond = first_made_up_address(trace)
        self._recorded = RecordedDriver(capacity, beyond) if follow else None
        self._allocator = CachingAllocator(
            settings, self._recorded or DeviceMemory(capacity, beyond), by_age=by_age
        )
        self._trusts_start = follow and by_age and bool((trace.segments.device == device).any())
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

    def replay(self) -> Replay:
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
        return Replay(
            source=self._trace,
            device=self._device,
            settings=self._allocator.settings,
            capacity=self._capacity,
            follows_record=self._recorded is not None,
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
        placed = StartLayout(trace, self._device, allocator, self._least).put()
        self._reserved_at_start = allocator.reserved
        if self._recorded is None:
            self._make_room()
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

    def _make_room(self) -> None:
        """Free unused segments first if the device has less memory than is reserved at the start."""
        allocator, device = self._allocator, self._allocator.driver
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
        block = allocator.allocate(size, home, searches=not failed_first)
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
    rows = np.flatnonzero(code_mask(SHRINKS)[events.kind] & (events.device == device))
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
        kept &= ~code_mask(SEGMENT_KINDS)[kind]
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
    gives_back = code_mask(SHRINKS)[kind]
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
