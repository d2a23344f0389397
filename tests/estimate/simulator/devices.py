"""Allocators on small devices whose addresses a person can follow: segments from 0 on, 2 MiB apart."""

from __future__ import annotations

from tb_memplugin.estimate import AllocatorSettings, CachingAllocator, DeviceMemory

K, M = 1 << 10, 1 << 20


def allocator(conf: str = "", capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.from_conf(conf), DeviceMemory(capacity, first_address=0))


def placed(made: CachingAllocator, *sizes: int, stream: int = 0, pool: tuple[int, int] = (0, 0)):
    """A block for each size; all must find memory."""
    blocks = [made.malloc(size, stream, pool) for size in sizes]
    assert None not in blocks
    return blocks


def where(*blocks):
    """Address and size of blocks."""
    return [(block.address, block.size) for block in blocks]
