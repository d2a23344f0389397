"""`allocator_curve`: allocated, pending and reserved over time or over events, and how much is of no use."""

from __future__ import annotations

import math

import numpy as np

from tb_memplugin.analysis.allocator import Levels
from tb_memplugin.analysis.reserve_curve import (
    Cuts,
    ReserveCurve,
    event_cuts,
    reserve_curve,
    split_moments,
    time_cuts,
    unused_levels,
)
from tb_memplugin.errors import MemPluginError
from tb_memplugin.server.replays import REPLAYS, Replay
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace.tables import Int64

DEFAULT_COLUMNS = 1_000
OVER = ("time", "event")


def answer(session: Session, request: Request) -> Json:
    """From the side file."""
    over = request.text("over", "time")
    if over not in OVER:
        raise MemPluginError(f"Cannot draw over {over!r}.", where="over", fix=f"Choose one of: {OVER}.")
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    opened = session.opened(session.chosen(request))
    replay = REPLAYS.of(opened)
    t0, t1 = _span(request, opened, over)
    cuts = _cuts(opened, over, t0, t1, columns)
    return {
        "over": over,
        "t0": t0,
        "t1": t1,
        "px": columns,
        **_columns_shape(reserve_curve(replay.levels, cuts)),
        "split": _split_shape(opened, replay, cuts),
        **_marks_shape(opened, replay.levels),
        "ooms": ooms_shape(opened),
        "knows_segments": replay.knows_segments,
    }


def _span(request: Request, opened: Opened, over: str) -> tuple[int, int]:
    if over == "time":
        start, end = (edge - opened.epoch_ns for edge in opened.span())
    else:
        start, end = opened.events()
        mine = _mine(opened)
        start, end = (int(mine[0]), int(mine[-1]) + 1) if len(mine) else (start, max(end, start + 1))
    t0, t1 = request.number("t0", start), request.number("t1", end)
    if t0 >= t1:
        raise MemPluginError(
            f"The span from {t0} to {t1} is empty.", where="t0, t1", fix="Give t0 before t1."
        )
    return t0, t1


def _mine(opened: Opened) -> Int64:
    """The events of the device in the step or window."""
    first, end = opened.events()
    mine: Int64 = first + np.flatnonzero(opened.trace.events.device[first:end] == opened.device)
    return mine


def _cuts(opened: Opened, over: str, t0: int, t1: int, columns: int) -> Cuts:
    if over == "event":
        return event_cuts(opened.trace, t0, t1, columns)
    return time_cuts(opened.trace, t0 + opened.epoch_ns, t1 + opened.epoch_ns, columns)


def _columns_shape(drawn: ReserveCurve) -> Json:
    unused = drawn.unused
    return {
        "low": drawn.low.tolist(),
        "allocated": drawn.allocated.tolist(),
        "pending": drawn.pending.tolist(),
        "reserved": None if drawn.reserved is None else drawn.reserved.tolist(),
        "unused": None if unused is None else [None if math.isnan(x) else x for x in unused.tolist()],
    }


def _split_shape(opened: Opened, replay: Replay, cuts: Cuts) -> list[list[float]]:
    if not replay.knows_segments:
        return []
    return [[event, _time(opened, event), ratio] for event, ratio in split_moments(replay.placement, cuts)]


def _marks_shape(opened: Opened, now: Levels) -> Json:
    """The highest moments of the step or window: entry 0 of what is looked at is the state on its entry."""
    first, end = opened.events()
    ratio = unused_levels(now)
    mine = _mine(opened)

    def mark(level: Int64) -> Json:
        event = first - 1 + int(np.argmax(level[first : end + 1]))
        told = None if ratio is None or np.isneginf(ratio[event + 1]) else float(ratio[event + 1])
        return {
            "event": event,
            "time_ns": _time(opened, event),
            "bytes": int(level[event + 1]),
            "unused": told,
        }

    return {
        "peak": mark(now.active),
        "reserved_peak": None if now.reserved is None else mark(now.reserved),
        "first_event": int(mine[0]) if len(mine) else -1,
        "last_event": int(mine[-1]) if len(mine) else -1,
    }


def ooms_shape(opened: Opened) -> list[Json]:
    """The device's failed requests in the whole window."""
    trace = opened.trace
    return [
        {
            "number": number,
            "event": failed.event,
            "time_ns": _time(opened, failed.event),
            "step": trace.step_at(failed.event).number,
            "requested_bytes": failed.requested_bytes,
        }
        for number, failed in enumerate(trace.ooms)
        if trace.events.device[failed.event] == opened.device
    ]


def _time(opened: Opened, event: int) -> int:
    trace = opened.trace
    at = int(trace.events.time_ns[event]) if event >= 0 else trace.steps[0].start_ns
    return at - opened.epoch_ns
