"""`allocator_curve`: allocated, pending, reserved and unused memory over time or over events."""

from __future__ import annotations

import math

import numpy as np

from tb_memplugin.analysis.allocator import ReserveCurve, reserve_curve, split_moments
from tb_memplugin.analysis.columns import Cuts
from tb_memplugin.analysis.oom import failed_requests
from tb_memplugin.server.replays import Replay, replay_of
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
    replay = replay_of(opened)
    cuts = part.cuts(opened, columns)
    return {
        "over": part.over,
        "t0": part.t0,
        "t1": part.t1,
        "px": columns,
        **_columns_shape(reserve_curve(replay.levels, replay.unused, cuts)),
        "split": _split_shape(opened, replay, cuts),
        **_marks_shape(opened, replay),
        "ooms": ooms_shape(opened),
        "knows_segments": replay.knows_segments,
    }


def _columns_shape(drawn: ReserveCurve) -> Json:
    unused = None if drawn.unused is None else drawn.unused.tolist()
    return {
        "low": drawn.low.tolist(),
        "allocated": drawn.allocated.tolist(),
        "pending": drawn.pending.tolist(),
        "reserved": None if drawn.reserved is None else drawn.reserved.tolist(),
        "unused": unused and [None if math.isnan(ratio) else ratio for ratio in unused],
    }


def _split_shape(opened: Opened, replay: Replay, cuts: Cuts) -> list[list[float]]:
    if not replay.knows_segments:
        return []
    moments = split_moments(replay.placement, cuts)
    return [[event, opened.time_ns(event), ratio] for event, ratio in moments]


def _marks_shape(opened: Opened, replay: Replay) -> Json:
    """Return the highest moments of the step or window, including the state at its beginning."""
    first, end = opened.events()
    memory, ratio = replay.levels, replay.unused
    first_event, last_event = step_events(opened)

    def mark(level: Int64) -> Json:
        event = first - 1 + int(np.argmax(level[first : end + 1]))
        unused = None if ratio is None or np.isneginf(ratio[event + 1]) else float(ratio[event + 1])
        return {
            "event": event,
            "time_ns": opened.time_ns(event),
            "bytes": int(level[event + 1]),
            "unused": unused,
        }

    return {
        "peak": mark(memory.active),
        "reserved_peak": None if memory.reserved is None else mark(memory.reserved),
        "first_event": first_event,
        "last_event": last_event,
    }


def ooms_shape(opened: Opened) -> list[Json]:
    """Return the device's failed requests in the whole window."""
    trace = opened.trace
    rows = [(row, trace.ooms[row]) for row in failed_requests(trace, opened.device)]
    return [
        {
            "number": row,
            "event": failed.event,
            "time_ns": opened.time_ns(failed.event),
            "step": trace.step_at(failed.event).number,
            "requested_bytes": failed.requested_bytes,
        }
        for row, failed in rows
    ]
