"""`allocator_segments`: segments at a moment and the blocks in them, as fine as a screen can show."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.pool_names import pool_name, stream_name
from tb_memplugin.analysis.segments import (
    ORDERS,
    LiveBlocks,
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
from tb_memplugin.server.shapes import Json

DIVISIONS: tuple[By, ...] = ("category", "module", "line", "stack", "pool", "stream")
SHOWN_KEYS = 9
"""How many keys get a color of their own, besides categories."""

_COLUMNS = ("segment", "offset", "bytes", "requested", "state", "key", "row", "count")


def answer(session: Session, request: Request) -> Json:
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


def _pieces_shape(drawn: Pieces) -> Json:
    return {name: getattr(drawn, name).tolist() for name in _COLUMNS}


def _segments_shape(opened: Opened, layout: Layout, rows: np.ndarray) -> Json:
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
