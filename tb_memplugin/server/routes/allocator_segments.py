"""`allocator_segments`: segments at a moment and the blocks in them, as fine as a screen can show."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.pool_names import pool_name, stream_name
from tb_memplugin.analysis.segments import (
    ORDERS,
    LiveBlocks,
    Order,
    Pieces,
    free_of_segments,
    homes_of,
    pieces,
    segment_order,
)
from tb_memplugin.analysis.sums import sums
from tb_memplugin.server.keys import keys_of
from tb_memplugin.server.moments import requested_event
from tb_memplugin.server.replays import replay_of
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import LabeledPart

DIVISIONS: tuple[By, ...] = ("category", "module", "line", "stack", "pool", "stream")
SHOWN_KEYS = 9
"""How many keys get a color of their own, besides categories."""


class Segments(TypedDict):
    """Segments, as columns of equal length."""

    address: list[str]
    bytes: list[int]
    free: list[int]
    """Where each is, how large, and how much of it is free."""
    home: list[int]
    """Place in `homes`."""
    expandable: list[int]
    """0 or 1."""


class Home(TypedDict):
    """A pool and stream that has segments."""

    pool: str
    stream: str
    """Their names."""
    segments: int
    bytes: int
    """How many segments, and their bytes."""


class PieceColumns(TypedDict):
    """Blocks and free stretches that fill the segments, as columns of equal length, in order of address."""

    segment: list[int]
    """Place in the order of segments."""
    offset: list[int]
    bytes: list[int]
    """Where it is in the segment, and how large."""
    requested: list[int]
    """0 if free."""
    state: list[int]
    """0 allocated, 1 pending, 2 free."""
    key: list[int]
    """Place in `keys`, -1 if free."""
    row: list[int]
    """Of the allocation, else -1."""
    count: list[int]
    """1, or how many pieces narrower than `finest` are drawn as one, with the state and key of the
    largest."""


class SegmentsAnswer(TypedDict):
    """The segments, and the blocks in them."""

    event: int
    by: By
    order: Order
    """As asked."""
    segments: Segments
    """All segments, in that order."""
    homes: list[Home]
    """Their pools and streams."""
    keys: list[LabeledPart]
    """Of the live blocks in all segments: categories in stacking order, others largest first; after nine,
    `(others)`."""
    first: int
    last: int
    """The places whose pieces are here."""
    finest: int
    """As used: coarser than asked if the answer would be very long."""
    pieces: PieceColumns
    """The pieces of a segment come in order of address and fill it."""


class _ByHome(TypedDict):
    segments: Segments
    homes: list[Home]


def answer(session: Session, request: Request) -> SegmentsAnswer:
    """Answer from the side file."""
    by, order = request.choice("by", DIVISIONS, "category"), request.choice("order", ORDERS, "pool")
    opened = session.opened(session.chosen(request))
    event = requested_event(request, opened)
    replay, blocks = replay_of(opened), opened.trace.allocations
    layout = replay.placement.at(event)
    rows = segment_order(layout, order)
    key, keys = keys_of(opened, layout.rows, by, by, SHOWN_KEYS)
    live = LiveBlocks(
        address=blocks.address[layout.rows],
        requested=blocks.bytes[layout.rows],
        key=key,
        pending=replay.pending_since[layout.rows] <= event,
    )
    last = max(len(rows) - 1, 0)
    first, last = request.number("first", 0, 0), min(request.number("last", last, 0), last)
    finest = request.number("finest", 1, 1)
    drawn = pieces(layout, rows, live, first=first, last=last, finest=finest)
    return {
        "event": event,
        "by": by,
        "order": order,
        **_segments_shape(opened, layout, rows),
        "keys": keys,
        "first": first,
        "last": last,
        "finest": drawn.finest,
        "pieces": _pieces_shape(drawn),
    }


def _pieces_shape(drawn: Pieces) -> PieceColumns:
    return {
        "segment": drawn.segment.tolist(),
        "offset": drawn.offset.tolist(),
        "bytes": drawn.bytes.tolist(),
        "requested": drawn.requested.tolist(),
        "state": drawn.state.tolist(),
        "key": drawn.key.tolist(),
        "row": drawn.row.tolist(),
        "count": drawn.count.tolist(),
    }


def _segments_shape(opened: Opened, layout: Layout, rows: np.ndarray) -> _ByHome:
    trace, segments = opened.trace, layout.segments
    homes, home_of = homes_of(layout)
    count = np.bincount(home_of, minlength=len(homes)).tolist()
    total = sums(home_of, segments.bytes, len(homes)).tolist()
    return {
        "segments": {
            "address": [hex(address) for address in segments.address[rows].tolist()],
            "bytes": segments.bytes[rows].tolist(),
            "free": free_of_segments(layout)[rows].tolist(),
            "home": home_of[rows].tolist(),
            "expandable": segments.expandable[rows].astype(int).tolist(),
        },
        "homes": [
            {
                "pool": pool_name(trace, pool),
                "stream": stream_name(trace, stream),
                "segments": count[row],
                "bytes": total[row],
            }
            for row, (pool, stream) in enumerate(homes)
        ],
    }
