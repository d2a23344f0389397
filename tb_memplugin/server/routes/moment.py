"""`moment`: the state of a device at a time or after an event."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.breakdown import Part
from tb_memplugin.analysis.curve import OTHERS
from tb_memplugin.analysis.moment import Moment, moment
from tb_memplugin.server.frames import labels_of, lines_at
from tb_memplugin.server.grouping import divided
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json, allocation_shape, parts_shape

LARGEST = 30
MOST_PARTS = 300


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    trace, epoch = opened.trace, opened.epoch_ns
    event = event_asked(request, opened)
    state = moment(trace, opened.device, event, largest=LARGEST)
    lines = lines_at(trace, [block.row for block in state.largest])
    return {
        "time_ns": state.time_ns - epoch,
        "event": state.event,
        "bytes": state.bytes,
        "reserved": state.reserved,
        "phase": state.phase.key,
        "module": state.module,
        "operator": state.operator,
        **neighbours_shape(opened, event),
        "by_category": parts_shape(state.parts("category")),
        **({} if request.given("by") else {"by_module": parts_shape(state.parts("module"))}),
        "by_phase": parts_shape(state.parts("phase")),
        **_asked_parts(request, opened, state),
        "largest": [
            {"row": block.row, "line": line, **allocation_shape(block, epoch)}
            for block, line in zip(state.largest, lines, strict=True)
        ],
    }


def _asked_parts(request: Request, opened: Opened, state: Moment) -> Json:
    """Return the parts of the division that a request names: the largest, and all others as one."""
    by = request.text("by", "")
    if not by:
        return {}
    parts = state.parts(divided(request, opened, by))
    shown, rest = parts[:MOST_PARTS], parts[MOST_PARTS:]
    if rest:
        shown += (Part(OTHERS, sum(part.bytes for part in rest), sum(part.count for part in rest)),)
    labels = labels_of([part.key for part in shown], by)
    return {
        "parts": [
            {"key": part.key, "label": label, "bytes": part.bytes, "count": part.count}
            for part, label in zip(shown, labels, strict=True)
        ]
    }


def event_asked(request: Request, opened: Opened) -> int:
    """Return the event that a request names by its index, or the last one at or before its time."""
    if request.given("event"):
        return request.number("event", None, -1, len(opened.trace.events) - 1)
    return opened.trace.event_at(request.number("t") + opened.epoch_ns)


def neighbours_shape(opened: Opened, event: int) -> Json:
    """Return the indices and times of the device's events before and after an event."""
    before, after = _neighbours(opened, event)
    return {
        "previous_event": before,
        "next_event": after,
        "previous_event_ns": _time(opened, before),
        "next_event_ns": _time(opened, after),
    }


def _neighbours(opened: Opened, event: int) -> tuple[int | None, int | None]:
    """Return the indices of the device's events before and after an event."""
    device = opened.trace.events.device
    before = np.flatnonzero(device[: max(event, 0)] == opened.device)[-1:]
    after = np.flatnonzero(device[event + 1 :] == opened.device)[:1]
    return (int(before[0]) if len(before) else None), (event + 1 + int(after[0]) if len(after) else None)


def _time(opened: Opened, event: int | None) -> int | None:
    return None if event is None else int(opened.trace.events.time_ns[event]) - opened.epoch_ns
