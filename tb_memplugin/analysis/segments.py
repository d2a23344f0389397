"""Segments and their blocks at any event, as one object each. `layout` has the same as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.analysis.breakdown import sums
from tb_memplugin.analysis.layout import Layout, layout
from tb_memplugin.analysis.pending import pending_since
from tb_memplugin.analysis.pool_names import NOT_KNOWN, pool_key, stream_key
from tb_memplugin.trace import MemoryTrace

BlockKind = Literal["allocated", "pending", "free"]


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block of a segment, live or free.

    Attributes:
        address: its first address.
        bytes: the requested bytes; 0 if it is free.
        extent_bytes: the bytes that it takes of the segment; they sum to the segment's bytes.
        rounded_bytes: `extent_bytes` if the file records them or the block is free; None if they were
            computed by the rounding rule.
        state: "pending" means that its free was requested but is not completed.
        allocation: row of `trace.allocations`, -1 if it is free.
    """

    address: int
    bytes: int
    extent_bytes: int
    rounded_bytes: int | None
    state: BlockKind
    allocation: int


@dataclass(frozen=True, slots=True)
class SegmentState:
    """One segment and its blocks in address order, including the free ones."""

    address: int
    bytes: int
    stream: str
    pool: str
    expandable: bool
    blocks: tuple[BlockState, ...]


def segments_at(trace: MemoryTrace, device: int, event: int) -> tuple[SegmentState, ...]:
    """Return a device's segments after an event (-1: before the first), in address order.

    Blocks that lie in no segment are left out; see `layout(…).misfits`. A sound file has none.

    Args:
        trace: any trace; without segments the result is empty.
        device: row in `trace.devices`.
        event: index of an event, of any device.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    placed = layout(trace, device, event)
    blocks = sorted(
        (*_live(trace, device, event, placed), *_free(placed)), key=lambda item: (item[0], item[1].address)
    )
    inside: list[list[BlockState]] = [[] for _ in range(len(placed.segments))]
    for segment, block in blocks:
        inside[segment].append(block)
    return tuple(
        SegmentState(
            address, size, stream_name(trace, stream), pool_name(trace, pool), expandable, tuple(own)
        )
        for (address, size, stream, pool, expandable), own in zip(placed.segments.rows(), inside, strict=True)
    )


def _live(trace: MemoryTrace, device: int, event: int, placed: Layout) -> list[tuple[int, BlockState]]:
    rows = placed.rows
    pending = pending_since(trace, device)[rows] <= event
    columns = zip(
        placed.segment.tolist(),
        trace.allocations.address[rows].tolist(),
        trace.allocations.bytes[rows].tolist(),
        placed.extent.tolist(),
        placed.by_rule.tolist(),
        pending.tolist(),
        rows.tolist(),
        strict=True,
    )
    return [
        (segment, BlockState(address, size, extent, None if rule else extent, _kind(is_pending), row))
        for segment, address, size, extent, rule, is_pending, row in columns
    ]


def _kind(is_pending: bool) -> BlockKind:
    return "pending" if is_pending else "allocated"


def _free(placed: Layout) -> list[tuple[int, BlockState]]:
    columns = zip(
        placed.free_segment.tolist(), placed.free_address.tolist(), placed.free_bytes.tolist(), strict=True
    )
    return [(segment, BlockState(address, 0, size, size, "free", -1)) for segment, address, size in columns]


def stream_name(trace: MemoryTrace, row: int) -> str:
    """Return the display name of a row of `trace.streams`: "default stream", "stream 0x7f…", ..."""
    return stream_key(trace.streams[row]) if 0 <= row < len(trace.streams) else NOT_KNOWN


def pool_name(trace: MemoryTrace, row: int) -> str:
    """Return the display name of a row of `trace.pools`: "default", "private (a, b)", "(not known)"."""
    return pool_key(trace.pools[row]) if 0 <= row < len(trace.pools) else NOT_KNOWN


def free_histogram(placed: Layout) -> tuple[tuple[int, int, int], ...]:
    """Count free stretches by size: (least bytes, a power of two; how many; total bytes), ascending."""
    if not len(placed.free_bytes):
        return ()
    exponent = np.frexp(placed.free_bytes.astype(np.float64))[1] - 1
    exponent -= (np.int64(1) << exponent) > placed.free_bytes  # float64 may round up to the next power of two
    edges, group = np.unique(exponent, return_inverse=True)
    total = sums(group.astype(np.int64), placed.free_bytes, len(edges))
    rows = zip(edges.tolist(), np.bincount(group).tolist(), total.tolist(), strict=True)
    return tuple((1 << edge, count, size) for edge, count, size in rows)
