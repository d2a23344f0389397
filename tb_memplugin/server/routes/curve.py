"""`curve`: live bytes over time, the lowest and highest in every pixel column."""

from __future__ import annotations

from itertools import accumulate

from tb_memplugin.analysis.breakdown import ALL_DIVISIONS
from tb_memplugin.analysis.curve import Curve, curve
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.proto import summary_pb2
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.grouping import divided, groups_shape
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import CATEGORIES, Json

DEFAULT_COLUMNS = 1_000


def answer(session: Session, request: Request) -> Json:
    """From the side file; without it, the coarse curve that the summary keeps."""
    by = request.text("by", "category")
    if by not in ALL_DIVISIONS:
        raise MemPluginError(
            f"Cannot divide a curve by {by[:40]!r}.", where="by", fix=f"Choose one of: {ALL_DIVISIONS}."
        )
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    every = request.text("step") == "all"
    chosen = session.chosen(request, step=_any_step(session, request) if every else None)
    whole = every or chosen.whole
    try:
        opened = session.opened(chosen)
    except UnreadableFileError:
        if whole or by != "category" or request.given("t0") or request.given("t1"):
            raise
        return _coarse(session.device_summary(request, chosen)[1].curve)
    t0, t1 = _span(request, opened, whole)
    division = divided(request, opened, by)
    drawn = curve(opened.trace, opened.device, t0, t1, columns, division)
    labels = labels_of(drawn.keys, by)
    return _shape(drawn, opened.epoch_ns) | {"labels": labels, **groups_shape(division)}


def _any_step(session: Session, request: Request) -> int:
    """A step of the window that `step=all` means: the one named, else the worker's last."""
    if request.given("window_step"):
        return request.number("window_step")
    listing = session.catalogue.listing(request.ctx, request.experiment)
    entries = listing.workers.get((request.text("run"), request.text("worker")), [])
    return entries[-1].metadata.step if entries else 0


def _span(request: Request, opened: Opened, whole: bool) -> tuple[int, int]:
    start, end = opened.window_span() if whole else opened.span()
    t0 = request.number("t0", start - opened.epoch_ns)
    t1 = request.number("t1", end - opened.epoch_ns)
    if t0 >= t1:
        raise MemPluginError(
            f"The span from {t0} to {t1} is empty.", where="t0, t1", fix="Give t0 before t1."
        )
    return t0 + opened.epoch_ns, t1 + opened.epoch_ns


def _shape(drawn: Curve, epoch_ns: int) -> Json:
    return {
        "t0": drawn.t0_ns - epoch_ns,
        "t1": drawn.t1_ns - epoch_ns,
        "px": len(drawn.low),
        "min": drawn.low.tolist(),
        "max": drawn.high.tolist(),
        "reserved": None if drawn.reserved is None else drawn.reserved.tolist(),
        "keys": drawn.keys,
        "stacks": drawn.stacks.tolist(),
        "peak": {
            "time_ns": drawn.peak_time_ns - epoch_ns,
            "bytes": drawn.peak_bytes,
            "column": drawn.peak_column,
            "event": drawn.peak_event,
        },
        "exact": True,
    }


def _coarse(stored: summary_pb2.Curve) -> Json:
    width = stored.columns
    high = list(accumulate(stored.high))
    stacks = [list(accumulate(stored.stacks[at : at + width])) for at in range(0, len(stored.stacks), width)]
    return {
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
