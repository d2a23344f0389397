"""The moment that a request asks for: an event, and the device's events before and after it."""

from __future__ import annotations

import numpy as np

from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened
from tb_memplugin.server.shapes import Json


def requested_event(request: Request, opened: Opened) -> int:
    """Return the event that a request names by its index, or the last one at or before its time."""
    if request.given("event"):
        return request.number("event", None, -1, len(opened.trace.events) - 1)
    return opened.trace.event_at(request.number("t") + opened.epoch_ns)


def neighbors_shape(opened: Opened, event: int) -> Json:
    """Return the indices and times of the device's events before and after an event."""
    before, after = _neighbors(opened, event)
    return {
        "previous_event": before,
        "next_event": after,
        "previous_event_ns": None if before is None else opened.time_ns(before),
        "next_event_ns": None if after is None else opened.time_ns(after),
    }


def _neighbors(opened: Opened, event: int) -> tuple[int | None, int | None]:
    """Return the indices of the device's events before and after an event."""
    device = opened.trace.events.device
    before = np.flatnonzero(device[: max(event, 0)] == opened.device)[-1:]
    after = np.flatnonzero(device[event + 1 :] == opened.device)[:1]
    return (int(before[0]) if len(before) else None), (event + 1 + int(after[0]) if len(after) else None)
