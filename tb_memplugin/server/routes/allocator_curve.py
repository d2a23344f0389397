"""`allocator_curve`: allocated, pending, reserved and unused memory over time or over events."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.allocator import ReserveCurve as Drawn
from tb_memplugin.analysis.allocator import reserve_curve, split_moments
from tb_memplugin.analysis.columns import Cuts, extremes
from tb_memplugin.analysis.oom import failed_requests
from tb_memplugin.server.replays import Replay, replay_of
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.stretch import Over, step_events, stretch
from tb_memplugin.trace.runs import Runs
from tb_memplugin.trace.tables import Int64

DEFAULT_COLUMNS = 1_000


class Mark(TypedDict):
    """The highest moment of a step."""

    event: int
    time_ns: int
    """When it is."""
    bytes: int
    """The bytes at this moment."""
    unused: float | None
    """(reserved - allocated) / reserved, or null."""


class FailedRequest(TypedDict):
    """A request that failed."""

    number: int
    """Its number within the window."""
    event: int
    time_ns: int
    step: int
    """When it was."""
    requested_bytes: int
    """Its size."""


class _Columns(TypedDict):
    low: list[int]
    allocated: list[int]
    pending: list[int]
    reserved: list[int] | None
    unused: list[float | None] | None


class _Marks(TypedDict):
    peak: Mark
    reserved_peak: Mark | None
    first_event: int
    last_event: int


class ReserveCurve(TypedDict):
    """Allocated, pending, reserved and unused memory of a stretch."""

    over: Over
    t0: int
    t1: int
    px: int
    """The stretch."""
    low: list[int]
    """Lowest active bytes of each column."""
    allocated: list[int]
    pending: list[int]
    """At the highest active bytes of each column; they sum to it. Pending: the free is requested and not
    completed."""
    reserved: list[int] | None
    """Highest of each column, or null."""
    unused: list[float | None] | None
    """Highest (reserved - allocated) / reserved of each column, 0 to 1, or null."""
    split: list[tuple[int, int, float]]
    """Event, `time_ns` and 1 - largest free block / all free bytes, at no more than 200 moments."""
    peak: Mark
    reserved_peak: Mark | None
    """The highest active and reserved bytes of the step."""
    ooms: list[FailedRequest]
    """Failed requests of the device in the whole window."""
    first_event: int
    last_event: int
    """The device's first and last event in the step; -1 and -1 if it has none."""
    knows_segments: bool
    """Whether the recording has segments."""


def answer(session: Session, request: Request) -> ReserveCurve:
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
        **_columns_shape(reserve_curve(replay.levels, replay.unused, cuts, replay.runs)),
        "split": _split_shape(opened, replay, cuts),
        **_marks_shape(opened, replay),
        "ooms": ooms_shape(opened),
        "knows_segments": replay.knows_segments,
    }


def _columns_shape(drawn: Drawn) -> _Columns:
    unused = None if drawn.unused is None else drawn.unused.tolist()
    return {
        "low": drawn.low.tolist(),
        "allocated": drawn.allocated.tolist(),
        "pending": drawn.pending.tolist(),
        "reserved": None if drawn.reserved is None else drawn.reserved.tolist(),
        "unused": unused and [None if math.isnan(ratio) else ratio for ratio in unused],
    }


def _split_shape(opened: Opened, replay: Replay, cuts: Cuts) -> list[tuple[int, int, float]]:
    if not replay.knows_segments:
        return []
    moments = split_moments(replay.placement, cuts)
    return [(event, opened.time_ns(event), ratio) for event, ratio in moments]


def _marks_shape(opened: Opened, replay: Replay) -> _Marks:
    """Return the highest moments of the step or window, including the state at its beginning."""
    whole = np.array(opened.events())
    memory, ratio, runs = replay.levels, replay.unused, replay.runs
    first_event, last_event = step_events(opened)

    def mark(level: Int64, runs: Runs[np.int64] | None) -> Mark:
        event = int(extremes(level, whole, runs)[2][0]) - 1
        unused = None if ratio is None or np.isneginf(ratio[event + 1]) else float(ratio[event + 1])
        return {
            "event": event,
            "time_ns": opened.time_ns(event),
            "bytes": int(level[event + 1]),
            "unused": unused,
        }

    return {
        "peak": mark(memory.active, runs.active),
        "reserved_peak": None if memory.reserved is None else mark(memory.reserved, runs.reserved),
        "first_event": first_event,
        "last_event": last_event,
    }


def ooms_shape(opened: Opened) -> list[FailedRequest]:
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
