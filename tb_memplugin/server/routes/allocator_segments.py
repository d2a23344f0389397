"""`allocator_segments`: segments at a moment and the blocks in them, as fine as a screen can show."""

from __future__ import annotations

from typing import cast

import numpy as np

from tb_memplugin.analysis.breakdown import By, codes, sums
from tb_memplugin.analysis.curve import OTHERS
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.pieces import (
    LiveBlocks,
    Pieces,
    free_of_segments,
    homes_of,
    pieces,
    segment_order,
)
from tb_memplugin.analysis.segments import pool_name, stream_name
from tb_memplugin.analysis.source_lines import NO_STACK, lines_of
from tb_memplugin.errors import MemPluginError
from tb_memplugin.server.replays import REPLAYS
from tb_memplugin.server.routes.moment import event_asked
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace.tables import Int64

DIVISIONS = ("category", "module", "line", "stack", "pool", "stream")
SHOWN_KEYS = 9
"""How many keys get a colour of their own; the others share one. Every category has its own."""

_COLUMNS = ("segment", "offset", "bytes", "requested", "state", "key", "row", "count")


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    by, order = request.text("by", "category"), request.text("order", "pool")
    if by not in DIVISIONS:
        raise MemPluginError(f"Cannot colour by {by!r}.", where="by", fix=f"Choose one of: {DIVISIONS}.")
    opened = session.opened(session.chosen(request))
    event = event_asked(request, opened)
    replay, blocks = REPLAYS.of(opened), opened.trace.allocations
    found = replay.placement.at(event)
    rows = segment_order(found, order)
    key, keys = _keys(opened, found, cast(By, by))
    live = LiveBlocks(
        address=blocks.address[found.rows],
        requested=blocks.bytes[found.rows],
        key=key,
        pending=replay.pending_since[found.rows] <= event,
    )
    last = max(len(rows) - 1, 0)
    first, last = request.number("first", 0, 0), min(request.number("last", last, 0), last)
    finest = request.number("finest", 1, 1)
    drawn = pieces(found, rows, live, first=first, last=last, finest=finest)
    return {
        "event": event,
        "by": by,
        "order": order,
        **_segments_shape(opened, found, rows),
        "keys": keys,
        "first": first,
        "last": last,
        "finest": drawn.finest,
        "pieces": _pieces_shape(drawn),
    }


def _pieces_shape(drawn: Pieces) -> Json:
    return {name: getattr(drawn, name).tolist() for name in _COLUMNS}


def _segments_shape(opened: Opened, found: Layout, rows: np.ndarray) -> Json:
    trace, segments = opened.trace, found.segments
    homes, place = homes_of(found)
    count = np.bincount(place, minlength=len(homes)).tolist()
    total = sums(place, segments.bytes, len(homes)).tolist()
    return {
        "segments": {
            "address": [hex(address) for address in segments.address[rows].tolist()],
            "bytes": segments.bytes[rows].tolist(),
            "free": free_of_segments(found)[rows].tolist(),
            "home": place[rows].tolist(),
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


def _keys(opened: Opened, found: Layout, by: By) -> tuple[Int64, list[Json]]:
    """Return the key of each live block, and the keys: categories in stacking order, others by size."""
    part, names = codes(opened.trace, by, found.rows)
    size = opened.trace.allocations.bytes[found.rows]
    total, count = sums(part, size, len(names)), np.bincount(part, minlength=len(names))
    used = np.flatnonzero(count)
    if by != "category":
        used = used[np.argsort(-total[used], kind="stable")]
    shown = used if by == "category" else used[:SHOWN_KEYS]
    place = np.full(len(names), len(shown), np.int64)
    place[shown] = np.arange(len(shown))
    labels = _labels([names[row] for row in shown.tolist()], by)
    keys = [
        {"key": names[row], "label": label, "bytes": int(total[row]), "count": int(count[row])}
        for row, label in zip(shown.tolist(), labels, strict=True)
    ]
    rest = used[len(shown) :]
    if len(rest):
        shape = {"bytes": int(total[rest].sum()), "count": int(count[rest].sum())}
        keys.append({"key": OTHERS, "label": OTHERS, **shape})
    return place[part], keys


def _labels(keys: list[str], by: str) -> list[str]:
    return stack_labels(keys) if by == "stack" else keys


def stack_labels(keys: list[str]) -> list[str]:
    """Return the leading line of each stack, as its label."""
    line, names = lines_of([key.split("\n") for key in keys])
    rows = zip(keys, line.tolist(), strict=True)
    return [NO_STACK if key == NO_STACK else names[row] for key, row in rows]
