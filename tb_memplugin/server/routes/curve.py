"""`curve`: live bytes over time or over events, with the lowest and highest of every pixel column.

`divisions`: by what a window's allocations can be divided.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TypedDict

from tb_memplugin.analysis.curves import Curve, curve, event_curve
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, By, informative
from tb_memplugin.analysis.module_groups import ModuleGroups
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto import recording_pb2
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.grouping import Group, divided, groups_shape
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import CATEGORIES, Highest
from tb_memplugin.server.stretch import OfStretch, Stretch, step_events, stretch

DEFAULT_COLUMNS = 1_000


class CoarseCurve(OfStretch):
    """Live bytes over time, as exact as the summary has them."""

    px: int
    """How many columns."""
    min: list[int]
    max: list[int]
    """Lowest and highest live bytes of each column."""
    reserved: list[int] | None
    """Highest reserved bytes of each column, or null."""
    keys: list[str]
    labels: list[str]
    """The parts, from the bottom to the top, and what to show for them. Categories and phases have an order
    of their own (`before` is the lowest phase); of others the largest come first, and the last is `(others)`
    or `(other modules)`."""
    stacks: list[list[int]]
    """For each key, its bytes in every column at the moment of the column's `max`: they sum to it."""
    peak: Highest
    """The highest moment of the stretch."""
    exact: bool
    """False without the side file: then the curve is coarse, and has none of the fields below."""


class CurveAnswer(CoarseCurve, total=False):
    """Live bytes over time or over events."""

    times: tuple[int, int]
    """The stretch in nanoseconds: its start and end."""
    events: tuple[int, int]
    """The stretch in events: the first, and the one after the last."""
    first_event: int
    last_event: int
    """The device's first and last event in the step; -1 and -1 if it has none."""
    groups: list[Group]
    """With `fold=1`: of each key."""


def answer(session: Session, request: Request) -> CurveAnswer:
    """Answer from the side file; without it, with the coarse curve that the summary contains."""
    by = request.choice("by", ALL_DIVISIONS, "category")
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    all_steps = request.text("step") == "all"
    chosen = session.chosen(request, step=_any_step(session, request) if all_steps else None)
    chosen = replace(chosen, is_window=all_steps or chosen.is_window)
    try:
        opened = session.opened(chosen)
    except UnreadableFileError:
        if chosen.is_window or by != "category" or request.has("t0") or request.has("t1"):
            raise
        return _coarse(session.device_summary(request, chosen)[1].curve)
    part = stretch(request, opened)
    division = divided(request, opened, by)
    epoch = opened.epoch_ns
    if part.over == "event":
        drawn = event_curve(opened.trace, opened.device, part.t0, part.t1, columns, division)
    else:
        drawn = curve(opened.trace, opened.device, part.t0 + epoch, part.t1 + epoch, columns, division)
    shape = _shape(drawn, labels_of(drawn.keys, by), part, epoch)
    shape["first_event"], shape["last_event"] = step_events(opened)
    if isinstance(division, ModuleGroups):
        shape["groups"] = groups_shape(division)
    return shape


def _any_step(session: Session, request: Request) -> int:
    """Return a step of the window that `step=all` selects: `window_step`, else the worker's last step."""
    if request.has("window_step"):
        return request.number("window_step")
    listing = session.catalog.listing(request.ctx, request.experiment)
    entries = listing.workers.get((request.text("run"), request.text("worker")), [])
    return entries[-1].metadata.step if entries else 0


def _shape(drawn: Curve, labels: list[str], part: Stretch, epoch_ns: int) -> CurveAnswer:
    return {
        "over": part.over,
        "t0": part.t0,
        "t1": part.t1,
        "times": (drawn.t0_ns - epoch_ns, drawn.t1_ns - epoch_ns),
        "events": (drawn.first_event, drawn.end_event),
        "px": len(drawn.low),
        "min": drawn.low.tolist(),
        "max": drawn.high.tolist(),
        "reserved": None if drawn.reserved is None else drawn.reserved.tolist(),
        "keys": list(drawn.keys),
        "labels": labels,
        "stacks": drawn.stacks.tolist(),
        "peak": {
            "time_ns": drawn.peak_time_ns - epoch_ns,
            "bytes": drawn.peak_bytes,
            "column": drawn.peak_column,
            "event": drawn.peak_event,
        },
        "exact": True,
    }


def _coarse(stored: recording_pb2.Curve) -> CurveAnswer:
    width = stored.columns
    high = list(accumulate(stored.high))
    stacks = [list(accumulate(stored.stacks[at : at + width])) for at in range(0, len(stored.stacks), width)]
    return {
        "over": "time",
        "t0": stored.t0_ns,
        "t1": stored.t1_ns,
        "px": width,
        "min": list(accumulate(stored.low)),
        "max": high,
        "reserved": list(accumulate(stored.reserved)) or None,
        "keys": [CATEGORIES[category] for category in stored.categories],
        "labels": [CATEGORIES[category] for category in stored.categories],
        "stacks": stacks,
        "peak": {
            "time_ns": stored.peak_time_ns,
            "bytes": high[stored.peak_column],
            "column": stored.peak_column,
            "event": stored.peak_event,
        },
        "exact": False,
    }


class DivisionsAnswer(TypedDict):
    """By what it is worth dividing the memory of a window."""

    divisions: list[By]
    """In the order in which to offer them. Only `category` without the side file."""


def answer_divisions(session: Session, request: Request) -> DivisionsAnswer:
    """Answer from the side file; without it, the division of the coarse curve."""
    try:
        opened = session.opened(session.chosen(request))
    except UnreadableFileError:
        return {"divisions": ["category"]}
    trace, device = opened.trace, opened.device
    divisions = RESULTS.of_window(trace, ("divisions", device), lambda: informative(trace, device))
    return {"divisions": list(divisions)}
