"""Segments and their blocks at an event: as objects, and as columns as fine as a screen can show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tb_memplugin.analysis.layout import Layout, layout, pending_since
from tb_memplugin.analysis.pool_names import pool_name, stream_name
from tb_memplugin.analysis.sums import sums
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import Bool, Int64, Rows, UInt8, UInt64

BlockKind = Literal["allocated", "pending", "free"]


@dataclass(frozen=True, slots=True)
class BlockState(AnalysisResult):
    """One block of a segment, live or free.

    Attributes:
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
class SegmentState(AnalysisResult):
    """One segment and its blocks in address order, including the free ones."""

    address: int
    bytes: int
    stream: str
    pool: str
    expandable: bool
    blocks: tuple[BlockState, ...]


def segments_at(trace: MemoryTrace, device: int, event: int) -> ResultTable[SegmentState]:
    """Return a device's segments after an event (-1: before the first), in address order.

    Blocks that lie in no segment are left out; see `layout(…).misfits`. A sound file has none.

    Args:
        trace: any trace; without segments the result is empty.
        event: index of an event, of any device.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    return segments_of(trace, layout(trace, device, event), pending_since(trace, device) <= event)


def segments_of(trace: MemoryTrace, placed: Layout, pending: Bool) -> ResultTable[SegmentState]:
    """Return the segments of a layout, in address order; `pending` is a mask of `trace.allocations`."""
    blocks = sorted((*_live(trace, placed, pending), *_free(placed)), key=lambda item: item[1].address)
    inside: list[list[BlockState]] = [[] for _ in range(len(placed.segments))]
    for segment, block in blocks:
        inside[segment].append(block)
    return ResultTable(
        SegmentState(
            address, size, stream_name(trace, stream), pool_name(trace, pool), expandable, tuple(own)
        )
        for (address, size, stream, pool, expandable), own in zip(placed.segments.rows(), inside, strict=True)
    )


def _live(trace: MemoryTrace, placed: Layout, pending: Bool) -> list[tuple[int, BlockState]]:
    rows = placed.rows
    states: list[BlockKind] = ["pending" if waits else "allocated" for waits in pending[rows].tolist()]
    columns = zip(
        placed.segment.tolist(),
        trace.allocations.address[rows].tolist(),
        trace.allocations.bytes[rows].tolist(),
        placed.extent.tolist(),
        placed.by_rule.tolist(),
        states,
        rows.tolist(),
        strict=True,
    )
    return [
        (segment, BlockState(address, size, extent, None if rule else extent, state, row))
        for segment, address, size, extent, rule, state, row in columns
    ]


def _free(placed: Layout) -> list[tuple[int, BlockState]]:
    columns = zip(
        placed.free_segment.tolist(), placed.free_address.tolist(), placed.free_bytes.tolist(), strict=True
    )
    return [(segment, BlockState(address, 0, size, size, "free", -1)) for segment, address, size in columns]


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


Order = Literal["pool", "size", "free", "address"]
ORDERS: tuple[Order, ...] = get_args(Order)

ALLOCATED, PENDING, FREE = 0, 1, 2

MOST_PIECES = 60_000
"""No screen shows more pieces than this; if there are more, `pieces` merges them further, but not beyond
one piece a segment."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Blocks and free stretches that fill the segments, as columns of equal length, in order of address."""

    segment: Int64
    """Place in the order of segments."""
    offset: Int64
    bytes: Int64
    """Where it is in the segment, and how large."""
    requested: Int64
    """0 if free."""
    state: UInt8
    """0 allocated, 1 pending, 2 free."""
    key: Int64
    """The part to which the block belongs, a place in the keys; -1 if free."""
    row: Int64
    """Of the allocation; -1 if free, or several as one."""
    count: Int64
    """1, or how many adjacent pieces narrower than `finest` are one, with the state and key of the
    largest."""
    finest: int
    """The least bytes of a piece of its own."""

    def __len__(self) -> int:
        return len(self.bytes)


@dataclass(frozen=True, slots=True)
class LiveBlocks:
    """The columns of live blocks that `pieces` needs, in the order of a layout's `rows`.

    `key` is the part to which each block belongs, in any division; `pending` whether its free was requested.
    """

    address: UInt64
    requested: Int64
    key: Int64
    pending: Bool


def segment_order(layout: Layout, order: str) -> Rows:
    """Sort the rows of `found.segments` by pool and stream (largest first), size, free bytes, or address.

    Raises:
        MemPluginError: `order` is none of `ORDERS`.
    """
    segments = layout.segments
    if order == "address":
        return np.arange(len(segments))
    if order == "size":
        return np.argsort(-segments.bytes, kind="stable")
    if order == "free":
        return np.argsort(-free_of_segments(layout), kind="stable")
    if order == "pool":
        homes, home_of = homes_of(layout)
        total = sums(home_of, segments.bytes, len(homes))
        return np.lexsort((-segments.bytes, home_of, -total[home_of]))
    raise MemPluginError(
        f"Cannot order segments by {order!r}.", where="order", fix=f"Choose one of: {', '.join(ORDERS)}."
    )


def homes_of(layout: Layout) -> tuple[list[tuple[int, int]], Int64]:
    """Return the distinct (pool, stream) pairs of the segments (table rows), and each segment's pair."""
    pairs = np.stack((layout.segments.pool, layout.segments.stream), axis=1)
    homes, home_of = np.unique(pairs, axis=0, return_inverse=True)
    return [(pool, stream) for pool, stream in homes.tolist()], home_of.reshape(-1).astype(np.int64)


def free_of_segments(layout: Layout) -> Int64:
    """Return the free bytes of each segment."""
    return sums(layout.free_segment, layout.free_bytes, len(layout.segments))


def pieces(
    layout: Layout, order: Rows, live: LiveBlocks, *, first: int = 0, last: int | None = None, finest: int = 1
) -> Pieces:
    """Return the stretches that fill some segments.

    Args:
        order: the result of `segment_order`.
        first, last: the first and last index into the order, inclusive.
        finest: adjacent stretches of fewer bytes are merged if they begin in the same `finest` bytes of a
            segment.
    """
    stretches = _stretches(layout, order, live, first, len(order) if last is None else last)
    merged = _merged(stretches, finest)
    largest = int(layout.segments.bytes.max(initial=0))
    while len(merged) > MOST_PIECES and finest <= largest:
        finest *= 2
        merged = _merged(stretches, finest)
    return merged


def _stretches(layout: Layout, order: Rows, live: LiveBlocks, first: int, last: int) -> Pieces:
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    home = np.concatenate((layout.segment, layout.free_segment))
    size = np.concatenate((layout.extent, layout.free_bytes))
    address = np.concatenate((live.address, layout.free_address))
    offset = (address - layout.segments.address[home]).astype(np.int64)
    free = len(layout.free_bytes)
    none, zero = np.full(free, -1, np.int64), np.zeros(free, np.int64)
    state = np.where(live.pending, PENDING, ALLOCATED).astype(np.uint8)
    segment, key = position[home], np.concatenate((live.key, none))
    shown = np.flatnonzero((segment >= first) & (segment <= last) & (size > 0))
    shown = shown[np.lexsort((offset[shown], segment[shown]))]
    return Pieces(
        segment=segment[shown],
        offset=offset[shown],
        bytes=size[shown],
        requested=np.concatenate((live.requested, zero))[shown],
        state=np.concatenate((state, np.full(free, FREE, np.uint8)))[shown],
        key=key[shown],
        row=np.concatenate((layout.rows, none))[shown],
        count=np.ones(len(shown), np.int64),
        finest=1,
    )


def _merged(pieces: Pieces, finest: int) -> Pieces:
    """Merge small adjacent stretches of one segment that begin in the same `finest` bytes."""
    if not len(pieces):
        return pieces
    small = pieces.bytes < finest
    cell = pieces.offset // finest
    joined = small[1:] & small[:-1] & (pieces.segment[1:] == pieces.segment[:-1]) & (cell[1:] == cell[:-1])
    group = np.cumsum(np.concatenate(([0], ~joined)))
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    count = np.diff(np.append(first, len(pieces)))
    largest = np.lexsort((-pieces.bytes, group))[first]  # sorts the largest of each group, a run, first
    return Pieces(
        segment=pieces.segment[first],
        offset=pieces.offset[first],
        bytes=np.add.reduceat(pieces.bytes, first),
        requested=np.add.reduceat(pieces.requested, first),
        state=pieces.state[largest],
        key=pieces.key[largest],
        row=np.where(count == 1, pieces.row[first], -1),
        count=count.astype(np.int64),
        finest=finest,
    )
