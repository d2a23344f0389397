"""Simulate PyTorch's caching allocator for one device: the block that each request gets, and the segments.

The rules are those of the native backend (`Block`, `BlockPool` and `try_merge_blocks` among them, in
c10/cuda/CUDACachingAllocator.cpp); they are described in docs/design/allocator_simulator.md. An expandable
segment is one range of addresses to which memory is mapped page by page (`ExpandableSegment`,
`find_expandable_block`, `map_block` and `unmap_block` there). Sizes and addresses are bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from tb_memplugin.simulator.allocator_settings import UNLIMITED, AllocatorSettings
from tb_memplugin.simulator.driver import DeviceMemory
from tb_memplugin.trace import Kind
from tb_memplugin.trace.allocator import DEFAULT_POOL, SMALL_REQUEST, SMALLEST_BLOCK, PoolId
from tb_memplugin.trace.kinds import GROWS

FREE, LIVE, UNMAPPED = 0, 1, 2
"""States of a block. A live block may have been freed by the program and still wait for a stream."""

ADDRESS_BITS, AGE_BITS = 64, 32
SIZE_SHIFT = ADDRESS_BITS + AGE_BITS
AGES = (1 << AGE_BITS) - 1


class Block:
    """A part of a segment. `prev` and `next` are its neighbours there, None at the ends of the segment.

    `address` and `size` are bytes. `origin` is the first address of its segment if that is expandable, else
    -1. `age` is the number of its segment, counted from the first one; among blocks of one size, the lowest
    is taken. `since` is the pool's count of searches at the time when the block became free.
    """

    __slots__ = ("address", "age", "home", "next", "origin", "prev", "since", "size", "state")

    def __init__(
        self, address: int, size: int, home: FreeBlocks, state: int, origin: int = -1, age: int = 0
    ) -> None:
        self.address = address
        self.size = size
        self.home = home
        self.state = state
        self.origin = origin
        self.age = age
        self.prev: Block | None = None
        self.next: Block | None = None
        self.since = 0

    @property
    def key(self) -> int:
        """The block's place in search order (BlockComparatorSize): size, age, address."""
        return self.size << SIZE_SHIFT | self.age << ADDRESS_BITS | self.address

    @property
    def is_whole(self) -> bool:
        """Whether the block is its whole segment."""
        return self.prev is None and self.next is None

    def put_before(self, other: Block) -> None:
        """Link the block into the list directly before another one."""
        self.prev, self.next = other.prev, other
        if other.prev is not None:
            other.prev.next = self
        other.prev = self

    def put_behind(self, other: Block) -> None:
        """Link the block into the list directly after another one."""
        self.prev, self.next = other, other.next
        if other.next is not None:
            other.next.prev = self
        other.next = self


class Pool:
    """The small or the large half of a pool. `searches` is counted only if garbage collection is on."""

    __slots__ = ("id", "searches", "small", "streams")

    def __init__(self, pool: PoolId, small: bool) -> None:
        self.id = pool
        self.small = small
        self.searches = 0
        self.streams: dict[int, FreeBlocks] = {}

    def on(self, stream: int) -> FreeBlocks:
        """Return the free blocks of a stream."""
        if stream not in self.streams:
            self.streams[stream] = FreeBlocks(self, stream)
        return self.streams[stream]

    def in_order(self) -> list[Block]:
        """Return every free block in search order, stream by stream."""
        return [blocks.at[key] for _, blocks in sorted(self.streams.items()) for key in blocks.keys]


class FreeBlocks:
    """The free blocks of one stream in a pool: a sorted list of (size, age, address), packed in one number.

    A search is a bisection in C, and one number sorts and hashes faster than a tuple. `unmapped` holds the
    sorted addresses of the unmapped blocks of expandable segments.
    """

    __slots__ = ("at", "keys", "pool", "small", "stream", "unmapped", "unmapped_at")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.small = pool.small
        self.stream = stream
        self.keys: list[int] = []
        self.at: dict[int, Block] = {}
        self.unmapped: list[int] = []
        self.unmapped_at: dict[int, Block] = {}

    def put(self, block: Block) -> None:
        """Add a block, free or unmapped as its state says."""
        if block.state == UNMAPPED:
            insort(self.unmapped, block.address)
            self.unmapped_at[block.address] = block
            return
        block.since = self.pool.searches
        key = block.key
        insort(self.keys, key)
        self.at[key] = block

    def take(self, block: Block) -> None:
        """Remove a block, free or unmapped as its state says."""
        if block.state == UNMAPPED:
            del self.unmapped[bisect_left(self.unmapped, block.address)]
            del self.unmapped_at[block.address]
            return
        key = block.key
        del self.keys[bisect_left(self.keys, key)]
        del self.at[key]

    def first_of(self, size: int) -> int:
        """Return the index in `keys` of the first of the smallest blocks of at least a size."""
        return bisect_left(self.keys, size << SIZE_SHIFT)

    def block(self, index: int) -> Block:
        """Return the block at an index in `keys`."""
        return self.at[self.keys[index]]


def join(block: Block) -> None:
    """Merge a block that is in no list with its neighbours in the same state, free or unmapped."""
    home, before, behind = block.home, block.prev, block.next
    if before is not None and before.state == block.state:
        home.take(before)
        block.address = before.address
        block.size += before.size
        block.prev = before.prev
        if before.prev is not None:
            before.prev.next = block
    if behind is not None and behind.state == block.state:
        home.take(behind)
        block.size += behind.size
        block.next = behind.next
        if behind.next is not None:
            behind.next.prev = block


@dataclass(frozen=True, slots=True)
class SegmentChange:
    """A change of the reserved memory: `kind` is a segment kind, `clock` the allocator's clock then."""

    clock: int
    kind: Kind
    address: int
    bytes: int
    stream: int
    pool: PoolId

    @property
    def growth(self) -> int:
        """By how many bytes the reserved memory grew; below 0 where it shrank."""
        return self.bytes if self.kind in GROWS else -self.bytes


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        clock: set by the caller; it is recorded in every change of the reserved memory.
        changes: the changes of the reserved memory, in order.
        reserved, peak_reserved: bytes.
        pending: blocks that the program freed and that still wait for a stream, by ticket.
        freed_early: the clocks at which some of these were freed without waiting any longer, by ticket.
        destroyed: private pools that no graph uses any more; other private pools never free segments.
        recorded_address: where the recording has the next block, 0 if it is not followed. Nobody recorded
            the ages of segments from before the recording: among their blocks of one size, this one is taken.
        simple: whether the first block that is large enough is always taken; False with expandable
            segments, `max_split_bytes` or garbage collection.

    Args:
        settings: of the allocator; PyTorch's defaults if None.
        driver: provides memory; a device without limit if None.
        by_age: whether the block of the oldest segment is taken among blocks of one size, as in PyTorch
            2.13; if not, the one at the lowest address, as in earlier versions.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        driver: DeviceMemory | None = None,
        *,
        by_age: bool = True,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.driver = driver or DeviceMemory()
        self.reserved = 0
        self.peak_reserved = 0
        self.clock = 0
        self.changes: list[SegmentChange] = []
        self.pending: dict[int, Block] = {}
        self.freed_early: dict[int, int] = {}
        self._tickets = 0
        self.recorded_address = 0
        self._age_step, self._newest = int(by_age), 0
        self.destroyed: set[PoolId] = set()
        self._pools: dict[tuple[PoolId, bool], Pool] = {}
        self._expands = self.settings.expandable_segments
        self._max_split = self.settings.max_split_bytes
        self._collects = self.settings.gc_threshold > 0 and self._allowed is not None
        self.simple = not self._expands and self._max_split == UNLIMITED and not self._collects

    @property
    def _allowed(self) -> int | None:
        """Bytes that may be reserved; None where `memory_fraction` does not limit them."""
        share, capacity = self.settings.memory_fraction, self.driver.capacity
        return None if share is None or capacity is None else int(share * capacity)

    def malloc(self, size: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> Block | None:
        """Return the block for a request of `size` bytes; None when out of memory."""
        rounded = self.settings.rounded(size)
        return self.allocate(rounded, self.home(rounded, stream, pool))

    def home(self, rounded: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> FreeBlocks:
        """Return the free blocks from which a request of a rounded size is served."""
        return self.half(pool, rounded <= SMALL_REQUEST).on(stream)

    def half(self, pool: PoolId, small: bool) -> Pool:
        """Return the small or the large half of a pool."""
        if (pool, small) not in self._pools:
            self._pools[pool, small] = Pool(pool, small)
        return self._pools[pool, small]

    def allocate(self, size: int, home: FreeBlocks, *, searches: bool = True) -> Block | None:
        """Return the block for a request of a rounded size; None when out of memory.

        A request whose search failed already, before some blocks were freed, does not search again.
        """
        block = (self._best_fit(size, home) if searches else None) or self._new(size, home)
        return None if block is None else self._cut(block, size)

    def free(self, block: Block) -> None:
        """Free a block and merge it with its free neighbours."""
        block.state = FREE
        join(block)
        block.home.put(block)

    def defer_free(self, block: Block) -> int:
        """Record that the program freed a block that another stream may still use.

        Returns:
            A ticket for `complete`.
        """
        self._tickets += 1
        self.pending[self._tickets] = block
        return self._tickets

    def complete(self, ticket: int) -> int | None:
        """Free a block from `defer_free`, since no stream uses it any more.

        Returns:
            The clock at which it was already freed because memory ran short; None if it was freed now.
        """
        block = self.pending.pop(ticket, None)
        if block is None:
            return self.freed_early.pop(ticket, None)
        self.free(block)
        return None

    def has(self, size: int, home: FreeBlocks) -> bool:
        """Return whether a request of a rounded size would find a free block."""
        return self._candidate(size, home) >= 0

    def empty_cache(self) -> None:
        """Wait for all streams, then free unused segments and the unused pages of expandable segments."""
        self.freed_early.update(dict.fromkeys(self.pending, self.clock))
        while self.pending:
            self.free(self.pending.pop(next(iter(self.pending))))
        for small in (False, True):
            self._release(self.half(DEFAULT_POOL, small))
        for pool in sorted(self.destroyed):
            for small in (True, False):
                self._release(self.half(pool, small))

    def unused_segments(self) -> dict[int, Block]:
        """Return the free blocks that are whole segments of the default pool, by address."""
        halves = (self.half(DEFAULT_POOL, small) for small in (False, True))
        blocks = (block for half in halves for block in half.in_order())
        return {block.address: block for block in blocks if block.origin < 0 and block.is_whole}

    def free_segments(self, addresses: Iterable[int]) -> None:
        """Free these unused segments, and no other."""
        unused = self.unused_segments()
        for address in addresses:
            self._free_segment(unused[address])

    def changed(self, kind: Kind, address: int, size: int, home: FreeBlocks) -> None:
        """Record that the reserved memory grew or shrank."""
        self.changes.append(SegmentChange(self.clock, kind, address, size, home.stream, home.pool.id))
        self.reserved += self.changes[-1].growth
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _cut(self, block: Block, size: int) -> Block:
        """Make a free block live, and split off the rest if that can be a block of its own (should_split)."""
        home = block.home
        rest = block.size - size
        if rest >= SMALLEST_BLOCK and (
            home.small or self._expands or (rest > SMALL_REQUEST and size < self._max_split)
        ):
            front = Block(block.address, size, home, LIVE, block.origin, block.age)
            front.put_before(block)
            block.address += size
            block.size = rest
            home.put(block)
            return front
        block.state = LIVE
        return block

    def _best_fit(self, size: int, home: FreeBlocks) -> Block | None:
        """Remove and return the best fit among the free blocks, None if nothing fits (get_free_block)."""
        if self.simple:
            index = home.first_of(size)
            if index == len(home.keys):
                return None
        else:
            home.pool.searches += self._collects
            index = self._candidate(size, home)
            if index < 0:
                return None
        key = home.keys[index]
        if self.recorded_address and not key >> ADDRESS_BITS & AGES and home.at[key].origin < 0:
            recorded_key = key >> ADDRESS_BITS << ADDRESS_BITS | self.recorded_address
            index = home.keys.index(recorded_key, index) if recorded_key in home.at else index
        return home.at.pop(home.keys.pop(index))

    def _candidate(self, size: int, home: FreeBlocks) -> int:
        """Return the index of the best fit, -1 if there is none."""
        index, count = home.first_of(size), len(home.keys)
        if index == count:
            return -1
        if home.block(index).origin >= 0:
            index = self._best_to_expand(index, home) if self._expands else _fixed(index, home)
            if index == count:
                return -1
        block_size, limit = home.block(index).size, self._max_split
        if size < limit:
            return index if block_size < limit else -1
        return index if block_size < size + self.settings.max_rounding_bytes else -1

    @staticmethod
    def _best_to_expand(index: int, home: FreeBlocks) -> int:
        """Return the index of the best fit where blocks can grow.

        The size of such a block includes the unmapped addresses behind it, so that a larger block that
        cannot grow may be the better fit.
        """
        block = home.block(index)
        while block.origin >= 0 and index + 1 < len(home.keys):
            behind = home.block(index + 1)
            if _room(behind) >= _room(block):
                break
            index, block = index + 1, behind
        return index

    def _new(self, size: int, home: FreeBlocks) -> Block | None:
        """Return a block of new memory; None if there is none even after all cached memory was freed."""
        if self._collects:
            self._collect()
        block = self._grown(size, home)
        if block is None and self._max_split < UNLIMITED and self._release_oversize(size, home):
            block = self._grown(size, home)
        if block is None:
            self.empty_cache()
            block = self._grown(size, home)
        return block

    def _grown(self, size: int, home: FreeBlocks) -> Block | None:
        segment, allowed = self.settings.segment_size(size), self._allowed
        if allowed is not None and self.reserved + segment > allowed:
            return None
        if self._expands:
            return self._extended(home, size)
        address = self.driver.allocate(segment)
        if address is None:
            return None
        self.changed(Kind.SEGMENT_ALLOC, address, segment, home)
        self._newest += self._age_step
        return Block(address, segment, home, FREE, age=self._newest)

    def _release(self, pool: Pool) -> None:
        """Free the unused memory of a pool: first whole segments, then pages of expandable ones."""
        blocks = pool.in_order()
        for block in blocks:
            if block.origin < 0 and block.is_whole:
                self._free_segment(block)
        for block in blocks:
            if block.origin >= 0:
                self._unmap_pages(block)

    def _free_segment(self, block: Block) -> None:
        block.home.take(block)
        self.driver.free(block.address, block.size)
        self.changed(Kind.SEGMENT_FREE, block.address, block.size, block.home)

    def _release_oversize(self, size: int, home: FreeBlocks) -> bool:
        """Free one cached block that is large enough, or else several of at least `max_split_bytes`.

        Returns whether enough was freed. For expandable blocks the pages are freed, where PyTorch's own code
        stops with an assertion.
        """
        wanted = max(size, self._max_split)
        index = home.first_of(wanted)
        if index < len(home.keys):
            return self._free_cached(home.block(index)) > 0
        released = 0
        for key in reversed(home.keys[home.first_of(self._max_split) :]):
            if released < wanted:
                released += self._free_cached(home.at[key])
        return released >= wanted

    def _free_cached(self, block: Block) -> int:
        """Free the memory of a cached block as far as possible; return the bytes freed."""
        before = self.reserved
        if block.origin >= 0:
            self._unmap_pages(block)
        elif block.is_whole:
            self._free_segment(block)
        return before - self.reserved

    def _collect(self) -> None:
        """Collect garbage: free the segments unused for the longest, while too much is reserved."""
        allowed = self._allowed
        limit = int(self.settings.gc_threshold * allowed) if allowed is not None else self.reserved
        wanted = self.reserved - limit
        pool = self.half(DEFAULT_POOL, False)
        segments = [block for block in pool.in_order() if block.is_whole and block.origin < 0]
        total = sum(pool.searches - block.since for block in segments)
        while wanted > 0 and segments:
            average = total / len(segments)
            old = [block for block in segments if pool.searches - block.since >= average]
            for block in old:
                wanted -= block.size
                total -= pool.searches - block.since
                segments.remove(block)
                self._free_segment(block)
            if not old:
                return

    def _extended(self, home: FreeBlocks, size: int) -> Block | None:
        """Map pages for a free block of at least a size and return it, in no list; None when out of memory.

        Pages that were mapped before memory ran out stay mapped and free.
        """
        block = self._lowest(home, size)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.next
            if behind is None or not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind
        home.take(block)
        return block

    def _unmap_pages(self, block: Block) -> None:
        """Unmap the whole pages within a free block; the rest of it stays free."""
        home = block.home
        page = self.settings.page(home.small)
        base = block.origin
        begin = base - (base - block.address) // page * page
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        home.take(block)
        self._cut_off(block, begin, end)
        block.address, block.size, block.state = begin, end - begin, UNMAPPED
        self.driver.unmap(begin, end - begin)
        join(block)
        if not block.is_whole:
            home.put(block)  # else its address space is released too
        self.changed(Kind.SEGMENT_UNMAP, begin, end - begin, home)

    def _cut_off(self, block: Block, begin: int, end: int) -> None:
        """Split the parts of a free block before `begin` and after `end` off, as free blocks of their own."""
        if block.address < begin:
            before = Block(block.address, begin - block.address, block.home, FREE, block.origin)
            before.put_before(block)
            block.home.put(before)
        if block.address + block.size > end:
            behind = Block(end, block.address + block.size - end, block.home, FREE, block.origin)
            behind.put_behind(block)
            block.home.put(behind)

    def _lowest(self, home: FreeBlocks, size: int) -> Block:
        """Return the first block of the lowest free and unmapped addresses that hold a size.

        If there are none, a new segment is created.
        """
        for address in home.unmapped:
            block = home.unmapped_at[address]
            if block.prev is not None and block.prev.state == FREE:
                block = block.prev
            if _has_room(block, size):
                return block
        start, space = self.driver.reserve(self.settings.page(home.small))
        block = Block(start, max(space, size), home, UNMAPPED, start)
        home.put(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the first pages of an unmapped block, and merge free neighbours; False when out of memory."""
        home = block.home
        page = self.settings.page(home.small)
        size = min(-(-size // page) * page, block.size)
        start = block.address
        if not self.driver.map(start, size):
            return False
        home.take(block)
        if size < block.size:
            rest = Block(start + size, block.size - size, home, UNMAPPED, block.origin)
            rest.put_behind(block)
            home.put(rest)
            block.size = size
        block.state = FREE
        join(block)
        home.put(block)
        self.changed(Kind.SEGMENT_MAP, start, size, home)
        return True


def _room(block: Block) -> int:
    """Return the bytes that a free block could hold if the unmapped addresses behind it were mapped."""
    behind = block.next
    return block.size + (behind.size if behind is not None and behind.state not in (FREE, LIVE) else 0)


def _fixed(index: int, home: FreeBlocks) -> int:
    """Return the next index of a block that is not expandable, for settings without expandable segments."""
    while index < len(home.keys) and home.block(index).origin >= 0:
        index += 1
    return index


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.state != LIVE:
        room += block.size
        block = block.next
    return room >= size
