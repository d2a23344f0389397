"""`moment`: the state at a time or after an event."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.moment import moment
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json, allocation_shape, parts_shape

LARGEST = 30


def answer(session: Session, request: Request) -> Json:
    """From the side file."""
    opened = session.opened(session.chosen(request))
    trace, epoch = opened.trace, opened.epoch_ns
    if request.given("event"):
        event = request.number("event", None, -1, len(trace.events) - 1)
    else:
        event = trace.event_at(request.number("t") + epoch)
    state = moment(trace, opened.device, event, largest=LARGEST)
    before, after = _neighbours(opened, event)
    return {
        "time_ns": state.time_ns - epoch,
        "event": state.event,
        "bytes": state.bytes,
        "reserved": state.reserved,
        "phase": state.phase.key,
        "module": state.module,
        "operator": state.operator,
        "previous_event": before,
        "next_event": after,
        "previous_event_ns": _time(opened, before),
        "next_event_ns": _time(opened, after),
        "by_category": parts_shape(state.parts("category")),
        "by_module": parts_shape(state.parts("module")),
        "by_phase": parts_shape(state.parts("phase")),
        "largest": [allocation_shape(block, epoch) for block in state.largest],
    }


def _neighbours(opened: Opened, event: int) -> tuple[int | None, int | None]:
    """The device's events before and after one, as indices."""
    device = opened.trace.events.device
    before = np.flatnonzero(device[: max(event, 0)] == opened.device)[-1:]
    after = np.flatnonzero(device[event + 1 :] == opened.device)[:1]
    return (int(before[0]) if len(before) else None), (event + 1 + int(after[0]) if len(after) else None)


def _time(opened: Opened, event: int | None) -> int | None:
    return None if event is None else int(opened.trace.events.time_ns[event]) - opened.epoch_ns
