"""`allocation_bands`: the largest allocations as bands over time, and all others as one band."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.bands import Bands, bands, divided_rest
from tb_memplugin.analysis.breakdown import ALL_DIVISIONS, By, Divided, codes, sums
from tb_memplugin.analysis.curve import OTHERS
from tb_memplugin.analysis.module_groups import ModuleGroups
from tb_memplugin.errors import MemPluginError
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.grouping import divided
from tb_memplugin.server.kept import Kept
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.server.stretch import step_events, stretch
from tb_memplugin.trace.tables import Int64

DEFAULT_COLUMNS, DEFAULT_BANDS, MOST_BANDS = 1_000, 1_000, 4_000
SHOWN_KEYS = 10
"""How many keys get a colour of their own; the others share one. Every category has its own."""

KEPT = Kept(8)


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    colour = request.text("colour", "category")
    if colour not in ALL_DIVISIONS:
        fix = f"Choose one of: {', '.join(ALL_DIVISIONS)}."
        raise MemPluginError(f"Cannot colour by {colour[:40]!r}.", where="colour", fix=fix)
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    most = request.number("most", DEFAULT_BANDS, 1, MOST_BANDS)
    trace, device = opened.trace, opened.device
    found = KEPT.of(
        trace, (device, part, columns, most), lambda: bands(trace, device, part.cuts(opened, columns), most)
    )
    first_event, last_event = step_events(opened)
    return {
        "over": part.over,
        "t0": part.t0,
        "t1": part.t1,
        "px": columns,
        "min": found.low.tolist(),
        "max": found.high.tolist(),
        **_bands_shape(opened, found, colour, divided(request, opened, colour)),
        "rest": found.rest.tolist(),
        "others": len(found.small),
        "peak": _peak_shape(opened, found),
        "first_event": first_event,
        "last_event": last_event,
    }


def _bands_shape(opened: Opened, found: Bands, colour: By, by: Divided) -> Json:
    size = opened.trace.allocations.bytes
    key, keys = _keys(opened, np.concatenate((found.rows, found.small)), colour, by)
    count = len(found.rows)
    columns = {
        "row": found.rows,
        "bytes": size[found.rows],
        "first": found.first,
        "last": found.last,
        "key": key[:count],
    }
    parts = divided_rest(found, size[found.small], key[count:], len(keys)) if len(found.small) else None
    return {
        "bands": {name: column.tolist() for name, column in columns.items()},
        "keys": keys,
        "parts": None if parts is None else parts.tolist(),
    }


def _keys(opened: Opened, rows: npt.NDArray[np.intp], colour: By, by: Divided) -> tuple[Int64, list[Json]]:
    """Return each allocation's key, and the keys: categories and groups in stacking order, others by size."""
    part, names = codes(opened.trace, by, rows)
    total = sums(part, opened.trace.allocations.bytes[rows], len(names))
    count = np.bincount(part, minlength=len(names))
    grouped = isinstance(by, ModuleGroups)
    used = np.arange(len(names)) if grouped else np.flatnonzero(count)
    steady = grouped or colour == "category"  # each key has a fixed place and colour, as in `curve`
    if not steady:
        used = used[np.argsort(-total[used], kind="stable")]
    shown = used if steady else used[:SHOWN_KEYS]
    place = np.full(len(names), len(shown), np.int64)
    place[shown] = np.arange(len(shown))
    named = [names[row] for row in shown.tolist()]
    keys = [
        {"key": name, "label": label, "bytes": int(total[row]), "count": int(count[row])}
        for name, label, row in zip(named, labels_of(named, colour), shown.tolist(), strict=True)
    ]
    rest = used[len(shown) :]
    if len(rest):
        together = {"bytes": int(total[rest].sum()), "count": int(count[rest].sum())}
        keys.append({"key": OTHERS, "label": OTHERS, **together})
    return place[part], keys


def _peak_shape(opened: Opened, found: Bands) -> Json:
    event = found.peak_event
    at = int(opened.trace.events.time_ns[event]) if event >= 0 else opened.trace.steps[0].start_ns
    return {
        "event": event,
        "time_ns": at - opened.epoch_ns,
        "bytes": int(found.high[found.peak_column]),
        "column": found.peak_column,
    }
