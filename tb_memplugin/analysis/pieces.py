"""Segments in a chosen order, and the stretches in them, as fine as a screen can show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tb_memplugin.analysis.breakdown import sums
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace.tables import Bool, Int64, Rows, UInt8, UInt64

Order = Literal["pool", "size", "free", "address"]
ORDERS: tuple[Order, ...] = get_args(Order)

ALLOCATED, PENDING, FREE = 0, 1, 2

MOST_PIECES = 60_000
"""No screen shows more pieces than this; if there are more, `pieces` merges them further, but not beyond
one piece a segment."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches that fill segments, sorted by segment and address, in columns of equal length.

    `segment` is an index into the order of segments. `offset` and `bytes` give the place in that segment.
    `requested` is 0 for free stretches. `state` is ALLOCATED, PENDING or FREE. `key` is the part to which a
    block belongs, -1 for free stretches. `row` is the row of the allocation, -1 for free or merged
    stretches. `count` adjacent stretches of fewer than `finest` bytes are merged into one, with the state
    and key of the largest.
    """

    segment: Int64
    offset: Int64
    bytes: Int64
    requested: Int64
    state: UInt8
    key: Int64
    row: Int64
    count: Int64
    finest: int

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
        layout: the layout.
        order: the result of `segment_order`.
        live: the live blocks.
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
