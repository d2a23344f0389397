"""Segments and their blocks at any moment, one object each; many at once are columns in `layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.analysis.layout import Layout, layout
from tb_memplugin.analysis.pending import pending_since
from tb_memplugin.analysis.pool_names import NOT_KNOWN, pool_key, stream_key
from tb_memplugin.trace import MemoryTrace

BlockKind = Literal["allocated", "pending", "free"]


@dataclass(frozen=True, slots=True)
class BlockState:
    """A stretch of a segment. Addresses and bytes.

    Attributes:
        address: where it begins.
        bytes: what was requested; 0 of a free one.
        extent_bytes: what it takes of the segment; the extents of a segment's blocks sum to its bytes.
        rounded_bytes: `extent_bytes` where the file tells them or the block is free, None where they
            follow from the rule of rounding only.
        state: "pending" means let go of, but not yet free.
        allocation: row of `trace.allocations`, -1 of a free one.
    """

    address: int
    bytes: int
    extent_bytes: int
    rounded_bytes: int | None
    state: BlockKind
    allocation: int


@dataclass(frozen=True, slots=True)
class SegmentState:
    """One stretch of reserved memory and its blocks in address order, free ones among them."""

    address: int
    bytes: int
    stream: str
    pool: str
    expandable: bool
    blocks: tuple[BlockState, ...]


def segments_at(trace: MemoryTrace, device: int, event: int) -> tuple[SegmentState, ...]:
    """What a device's allocator holds after an event (-1: before the first), in address order.

    Blocks that lie in no segment are in `layout(…).misfits`; there are none in a sound file.

    Args:
        trace: any trace; without segments the result is empty.
        device: row in `trace.devices`.
        event: index of an event, of any device.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    found = layout(trace, device, event)
    blocks = sorted(
        (*_live(trace, device, event, found), *_free(found)), key=lambda item: (item[0], item[1].address)
    )
    inside: list[list[BlockState]] = [[] for _ in range(len(found.segments))]
    for segment, block in blocks:
        inside[segment].append(block)
    return tuple(
        SegmentState(
            address, size, stream_name(trace, stream), pool_name(trace, pool), expandable, tuple(own)
        )
        for (address, size, stream, pool, expandable), own in zip(found.segments.rows(), inside, strict=True)
    )


def _live(trace: MemoryTrace, device: int, event: int, found: Layout) -> list[tuple[int, BlockState]]:
    rows = found.rows
    pending = pending_since(trace, device)[rows] <= event
    columns = zip(
        found.segment.tolist(),
        trace.allocations.address[rows].tolist(),
        trace.allocations.bytes[rows].tolist(),
        found.extent.tolist(),
        found.by_rule.tolist(),
        pending.tolist(),
        rows.tolist(),
        strict=True,
    )
    return [
        (at, BlockState(address, size, extent, None if rule else extent, _kind(waits), row))
        for at, address, size, extent, rule, waits, row in columns
    ]


def _kind(waits: bool) -> BlockKind:
    return "pending" if waits else "allocated"


def _free(found: Layout) -> list[tuple[int, BlockState]]:
    columns = zip(
        found.free_segment.tolist(), found.free_address.tolist(), found.free_bytes.tolist(), strict=True
    )
    return [(at, BlockState(address, 0, size, size, "free", -1)) for at, address, size in columns]


def stream_name(trace: MemoryTrace, row: int) -> str:
    """A row of `trace.streams` for people: "default stream", "stream 0x7f…", "(not known)"."""
    return stream_key(trace.streams[row]) if 0 <= row < len(trace.streams) else NOT_KNOWN


def pool_name(trace: MemoryTrace, row: int) -> str:
    """A row of `trace.pools` for people: "default", "private (a, b)", "(not known)"."""
    return pool_key(trace.pools[row]) if 0 <= row < len(trace.pools) else NOT_KNOWN


def free_histogram(found: Layout) -> tuple[tuple[int, int, int], ...]:
    """Free stretches by size: (lower edge in bytes, a power of two; how many; their bytes), ascending."""
    if not len(found.free_bytes):
        return ()
    exponent = np.frexp(found.free_bytes.astype(np.float64))[1] - 1
    exponent -= (np.int64(1) << exponent) > found.free_bytes  # a float may round up to the next power
    edges, group = np.unique(exponent, return_inverse=True)
    total = np.zeros(len(edges), np.int64)
    np.add.at(total, group, found.free_bytes)
    rows = zip(edges.tolist(), np.bincount(group).tolist(), total.tolist(), strict=True)
    return tuple((1 << edge, count, size) for edge, count, size in rows)
