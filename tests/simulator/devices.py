"""Allocators on small devices with addresses that are easy to follow: segments begin at 0, 2 MiB apart."""

from __future__ import annotations

from tb_memplugin.simulator import AllocatorSettings, CachingAllocator, DeviceMemory

K, M = 1 << 10, 1 << 20


def allocator(conf: str = "", capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.from_conf(conf), DeviceMemory(capacity, first_address=0))


def placed(made: CachingAllocator, *sizes: int, stream: int = 0, pool: tuple[int, int] = (0, 0)):
    """Allocate a block for each size; all must find memory."""
    blocks = [made.malloc(size, stream, pool) for size in sizes]
    assert None not in blocks
    return blocks


def where(*blocks):
    """Return (address, size) of each block."""
    return [(block.address, block.size) for block in blocks]
