"""`allocator_curve`: allocated, pending, reserved and unused memory over time or over events."""

from __future__ import annotations

import math

import numpy as np

from tb_memplugin.analysis.allocator import Levels
from tb_memplugin.analysis.columns import Cuts
from tb_memplugin.analysis.reserve_curve import ReserveCurve, reserve_curve, split_moments, unused_levels
from tb_memplugin.server.replays import REPLAYS, Replay
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.server.stretch import step_events, stretch
from tb_memplugin.trace.tables import Int64

DEFAULT_COLUMNS = 1_000


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    replay = REPLAYS.of(opened)
    cuts = part.cuts(opened, columns)
    return {
        "over": part.over,
        "t0": part.t0,
        "t1": part.t1,
        "px": columns,
        **_columns_shape(reserve_curve(replay.levels, cuts)),
        "split": _split_shape(opened, replay, cuts),
        **_marks_shape(opened, replay.levels),
        "ooms": ooms_shape(opened),
        "knows_segments": replay.knows_segments,
    }


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
    """Return the highest moments of the step or window, including the state at its beginning."""
    first, end = opened.events()
    ratio = unused_levels(now)
    first_event, last_event = step_events(opened)

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
        "first_event": first_event,
        "last_event": last_event,
    }


def ooms_shape(opened: Opened) -> list[Json]:
    """Return the device's failed requests in the whole window."""
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
