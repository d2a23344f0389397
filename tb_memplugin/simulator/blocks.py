"""Blocks of device memory, and the free blocks of a pool in search order.

They follow `Block`, `BlockPool` and `try_merge_blocks` in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort

FREE, LIVE, UNMAPPED = 0, 1, 2
"""States of a block. A live block may have been freed by the program and still wait for a stream."""

PoolId = tuple[int, int]

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
