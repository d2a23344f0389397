"""The part of a step or the moment that a request asks for, over time or over events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from tb_memplugin.analysis.columns import Cuts, event_cuts, time_cuts
from tb_memplugin.errors import MemPluginError
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


Over = Literal["time", "event"]
OVER: tuple[Over, ...] = get_args(Over)


class OfStretch(TypedDict):
    """A part of a step or window."""

    over: Over
    t0: int
    t1: int
    """The stretch: nanoseconds, or events; event e spans e to e + 1."""


class Drawn(OfStretch):
    """A part of a step or window in columns."""

    px: int
    """How many columns."""
    first_event: int
    last_event: int
    """The device's first and last event in the step; -1 and -1 if it has none."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `t0` to `t1`: nanoseconds since the window's start, or events; event e spans e to e + 1."""

    over: Over
    t0: int
    t1: int

    def shape(self) -> OfStretch:
        """Return the fields with which answers about the stretch begin."""
        return {"over": self.over, "t0": self.t0, "t1": self.t1}

    def drawn_shape(self, opened: Opened, columns: int) -> Drawn:
        """Return the fields with which charts of the stretch begin."""
        first, last = step_events(opened)
        return {**self.shape(), "px": columns, "first_event": first, "last_event": last}

    def cuts(self, opened: Opened, columns: int) -> Cuts:
        """Return how many events come before each edge of equally wide columns."""
        if self.over == "event":
            return event_cuts(opened.trace, self.t0, self.t1, columns)
        return time_cuts(opened.trace, self.t0 + opened.epoch_ns, self.t1 + opened.epoch_ns, columns)


def step_events(opened: Opened) -> tuple[int, int]:
    """Return the device's first and last event in the step or window, (-1, -1) if it has none."""
    first, end = opened.events()
    own = opened.trace.next_event(opened.device, first)
    last = opened.trace.previous_event(opened.device, end)
    return (own, last) if own is not None and last is not None and own < end else (-1, -1)


def stretch(request: Request, opened: Opened) -> Stretch:
    """Return the stretch that `over`, `t0` and `t1` select; by default the whole step or window over time.

    Raises:
        MemPluginError: a parameter is wrong, or the stretch is empty.
    """
    if requested_axis(request) == "time":
        start, end = (edge - opened.epoch_ns for edge in opened.span())
        return stretch_within(request, "time", start, end)
    first, last = step_events(opened)
    if first < 0:  # the device has no events: draw a constant level over the events of other devices
        start, end = opened.events()
        return stretch_within(request, "event", start, max(end, start + 1))
    return stretch_within(request, "event", first, last + 1)


def requested_axis(request: Request) -> Over:
    """Return the parameter `over`: "time" or "event".

    Raises:
        MemPluginError: it is neither.
    """
    return request.choice("over", OVER, "time")


def stretch_within(request: Request, over: Over, start: int, end: int) -> Stretch:
    """Return the stretch from `t0` to `t1`, whose defaults are `start` and `end`.

    Raises:
        MemPluginError: a parameter is wrong, or the stretch is empty.
    """
    t0, t1 = request.number("t0", start), request.number("t1", end)
    if t0 >= t1:
        raise MemPluginError(
            f"The span from {t0} to {t1} is empty.", where="t0, t1", fix="Give t0 before t1."
        )
    return Stretch(over, t0, t1)
