"""Expandable segments: each is one range of addresses to which memory is mapped page by page.

They follow `ExpandableSegment`, `find_expandable_block`, `map_block` and `unmap_block` in
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

from tb_memplugin.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.simulator.blocks import FREE, LIVE, UNMAPPED, Block, FreeBlocks, join
from tb_memplugin.simulator.driver import Driver
from tb_memplugin.trace import Kind

Log = Callable[[Kind, int, int, FreeBlocks], None]
"""Called for every change of the reserved memory: `log(kind, address, bytes, home)`."""


class ExpandableSegments:
    """Grows and shrinks the expandable segments of one allocator.

    Args:
        settings: the settings of the allocator.
        driver: maps and unmaps pages.
        log: called for every change; see `Log`.
    """

    def __init__(self, settings: AllocatorSettings, driver: Driver, log: Log) -> None:
        self._settings = settings
        self._driver = driver
        self._log = log

    def extend(self, home: FreeBlocks, size: int) -> Block | None:
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

    def release(self, block: Block) -> None:
        """Unmap the whole pages within a free block; the rest of it stays free."""
        home = block.home
        page = self._settings.page(home.small)
        base = block.origin
        begin = base - (base - block.address) // page * page
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        home.take(block)
        self._cut_off(block, begin, end)
        block.address, block.size, block.state = begin, end - begin, UNMAPPED
        self._driver.unmap(begin, end - begin)
        join(block)
        if not block.is_whole:
            home.put(block)  # else its address space is released too
        self._log(Kind.SEGMENT_UNMAP, begin, end - begin, home)

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
        start, space = self._driver.reserve(self._settings.page(home.small))
        block = Block(start, max(space, size), home, UNMAPPED, start)
        home.put(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the first pages of an unmapped block, and merge free neighbours; False when out of memory."""
        home = block.home
        page = self._settings.page(home.small)
        size = min(-(-size // page) * page, block.size)
        start = block.address
        if not self._driver.map(start, size):
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
        self._log(Kind.SEGMENT_MAP, start, size, home)
        return True


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.state != LIVE:
        room += block.size
        block = block.next
    return room >= size
