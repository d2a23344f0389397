"""The moment that a request asks for: an event, and the device's events before and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened
from tb_memplugin.trace.tables import Rows


class Neighbors(TypedDict):
    """The device's events before and after a moment, to step through: several events may share a time."""

    previous_event: int | None
    next_event: int | None
    previous_event_ns: int | None
    next_event_ns: int | None
    """Null: there is none."""


class Since(TypedDict):
    """What came and went between an earlier event and a moment."""

    event: int
    time_ns: int
    """The earlier event."""
    kept_bytes: int
    kept: int
    """Bytes and number of allocations since that event that are alive."""
    freed_bytes: int
    freed: int
    """Those that were alive after that event and are no longer."""


def requested_event(request: Request, opened: Opened) -> int:
    """Return the event that a request names by its index, or the last one at or before its time."""
    if request.has("event"):
        return request.number("event", None, -1, len(opened.trace.events) - 1)
    return opened.trace.event_at(request.number("t") + opened.epoch_ns)


def neighbors_shape(opened: Opened, event: int) -> Neighbors:
    """Return the indices and times of the device's events before and after an event."""
    trace, device = opened.trace, opened.device
    before, after = trace.previous_event(device, event), trace.next_event(device, event + 1)
    return {
        "previous_event": before,
        "next_event": after,
        "previous_event_ns": None if before is None else opened.time_ns(before),
        "next_event_ns": None if after is None else opened.time_ns(after),
    }


@dataclass(frozen=True, slots=True)
class KeptAndFreed:
    """What came and went between an earlier event and a moment: rows of `trace.allocations`."""

    event: int
    kept: Rows
    freed: Rows


def requested_since(request: Request, opened: Opened, event: int) -> KeptAndFreed | None:
    """Return what came and went since the event that a request names, or None if that is not before `event`.

    `kept` was allocated since and is alive; `freed` was alive and is not. So the bytes of `kept` minus those
    of `freed` are the difference between the two moments.
    """
    if not request.has("since"):
        return None
    trace = opened.trace
    earlier = request.number("since", None, -1, len(trace.events) - 1)
    if earlier >= event:
        return None
    blocks = trace.allocations
    now, then = blocks.alive_at(event, opened.device), blocks.alive_at(earlier, opened.device)
    return KeptAndFreed(earlier, now[blocks.born[now] > earlier], then[blocks.freed[then] <= event])


def since_shape(since: KeptAndFreed, opened: Opened) -> Since:
    """Return the earlier moment, and the sums of what came and went."""
    size = opened.trace.allocations.bytes
    return {
        "event": since.event,
        "time_ns": opened.time_ns(since.event),
        "kept_bytes": int(size[since.kept].sum()),
        "kept": len(since.kept),
        "freed_bytes": int(size[since.freed].sum()),
        "freed": len(since.freed),
    }
