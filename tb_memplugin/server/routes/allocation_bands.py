"""`allocation_bands`: the largest allocations as bands over time, and all others as one band."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.allocations import Bands, bands, divided_rest
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, By, Divided
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.grouping import divided
from tb_memplugin.server.keys import keys_of
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.server.stretch import step_events, stretch

DEFAULT_COLUMNS, DEFAULT_BANDS, MOST_BANDS = 1_000, 1_000, 4_000
SHOWN_KEYS = 10
"""How many keys get a color of their own, besides categories and groups."""


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    by = request.choice("colour", ALL_DIVISIONS, "category")
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    most = request.number("most", DEFAULT_BANDS, 1, MOST_BANDS)
    trace, device = opened.trace, opened.device
    drawn = RESULTS.of_window(
        trace,
        ("bands", device, part, columns, most),
        lambda: bands(trace, device, part.cuts(opened, columns), most),
    )
    first_event, last_event = step_events(opened)
    return {
        "over": part.over,
        "t0": part.t0,
        "t1": part.t1,
        "px": columns,
        "min": drawn.low.tolist(),
        "max": drawn.high.tolist(),
        **_bands_shape(opened, drawn, by, divided(request, opened, by)),
        "rest": drawn.rest.tolist(),
        "others": len(drawn.small),
        "peak": _peak_shape(opened, drawn),
        "first_event": first_event,
        "last_event": last_event,
    }


def _bands_shape(opened: Opened, drawn: Bands, by: By, division: Divided) -> Json:
    size = opened.trace.allocations.bytes
    key, keys = keys_of(opened, np.concatenate((drawn.rows, drawn.small)), by, division, SHOWN_KEYS)
    count = len(drawn.rows)
    columns = {
        "row": drawn.rows,
        "bytes": size[drawn.rows],
        "first": drawn.first,
        "last": drawn.last,
        "key": key[:count],
    }
    parts = divided_rest(drawn, size[drawn.small], key[count:], len(keys)) if len(drawn.small) else None
    return {
        "bands": {name: column.tolist() for name, column in columns.items()},
        "keys": keys,
        "parts": None if parts is None else parts.tolist(),
    }


def _peak_shape(opened: Opened, drawn: Bands) -> Json:
    return {
        "event": drawn.peak_event,
        "time_ns": opened.time_ns(drawn.peak_event),
        "bytes": int(drawn.high[drawn.peak_column]),
        "column": drawn.peak_column,
    }
