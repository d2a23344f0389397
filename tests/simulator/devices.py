"""Allocators on small devices with addresses that are easy to follow: segments begin at 0, 2 MiB apart."""

from __future__ import annotations

import numpy as np

from tb_memplugin.simulator import AllocatorSettings, CachingAllocator, DeviceMemory, Replay
from tb_memplugin.trace import Kind

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


def reserved_misses(done: Replay) -> list[int]:
    """Events (allocations, completed frees) after which the reserved bytes differ from the recorded."""
    events = done.source.events
    comparable = (events.device == done.device) & (events.reserved >= 0)
    comparable &= np.isin(events.kind, (Kind.ALLOC, Kind.FREE_COMPLETED))
    rows = np.flatnonzero(comparable[: done.end])
    return rows[events.reserved[rows] != done.reserved[rows + 1]].tolist()
