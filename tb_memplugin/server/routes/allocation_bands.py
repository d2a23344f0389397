"""`allocation_bands`: the largest allocations as bands over time, and all others as one band."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.allocations import Bands, bands, divided_rest
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, By, Divided
from tb_memplugin.analysis.moments import tensor_name
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.grouping import divided
from tb_memplugin.server.keys import keys_of
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Highest, LabeledPart
from tb_memplugin.server.stretch import Over, step_events, stretch

DEFAULT_COLUMNS, DEFAULT_BANDS, MOST_BANDS = 1_000, 1_000, 4_000
SHOWN_KEYS = 10
"""How many keys get a color of their own, besides categories and groups."""


class BandColumns(TypedDict):
    """Bands, in order of allocation, as columns of equal length."""

    row: list[int]
    """The allocation's number within the window."""
    bytes: list[int]
    """Its bytes."""
    first: list[int]
    last: list[int]
    """The columns of the chart in which it is alive."""
    key: list[int]
    """Place in `keys`."""
    tensor: list[str | None]
    """What lies in it; null where it is not known."""


class BandsAnswer(TypedDict):
    """The largest allocations, each as a band over time, and all others as one band."""

    over: Over
    t0: int
    t1: int
    px: int
    """The stretch."""
    min: list[int]
    max: list[int]
    """Lowest and highest live bytes of each column."""
    bands: BandColumns
    """The largest allocations."""
    rest: list[int]
    """For each column: with the bands that are alive there, it sums to `max`."""
    others: int
    """How many allocations are in `rest`. An allocation that is not alive at the highest moment of any column
    is neither in it nor in `bands`."""
    keys: list[LabeledPart]
    """For bands and `rest`. Categories and groups in stacking order, others largest first; after ten,
    `(others)`."""
    parts: list[list[int]] | None
    """For each key, its part of `rest` in every column. Null if nothing is in `rest`."""
    peak: Highest
    """The highest moment of the stretch."""
    first_event: int
    last_event: int
    """The device's first and last event in the step; -1 and -1 if it has none."""


class _Divided(TypedDict):
    bands: BandColumns
    keys: list[LabeledPart]
    parts: list[list[int]] | None


def answer(session: Session, request: Request) -> BandsAnswer:
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


def _bands_shape(opened: Opened, drawn: Bands, by: By, division: Divided) -> _Divided:
    size = opened.trace.allocations.bytes
    key, keys = keys_of(opened, np.concatenate((drawn.rows, drawn.small)), by, division, SHOWN_KEYS)
    count = len(drawn.rows)
    parts = divided_rest(drawn, size[drawn.small], key[count:], len(keys)) if len(drawn.small) else None
    return {
        "bands": {
            "row": drawn.rows.tolist(),
            "bytes": size[drawn.rows].tolist(),
            "first": drawn.first.tolist(),
            "last": drawn.last.tolist(),
            "key": key[:count].tolist(),
            "tensor": [tensor_name(opened.trace, row) for row in drawn.rows.tolist()],
        },
        "keys": keys,
        "parts": None if parts is None else parts.tolist(),
    }


def _peak_shape(opened: Opened, drawn: Bands) -> Highest:
    return {
        "event": drawn.peak_event,
        "time_ns": opened.time_ns(drawn.peak_event),
        "bytes": int(drawn.high[drawn.peak_column]),
        "column": drawn.peak_column,
    }
