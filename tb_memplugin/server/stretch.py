"""The part of a step that a request asks for, over time or over events, and its pixel columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tb_memplugin.analysis.columns import Cuts, event_cuts, time_cuts
from tb_memplugin.errors import MemPluginError
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened

Over = Literal["time", "event"]
OVER: tuple[Over, ...] = get_args(Over)


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `t0` to `t1`: nanoseconds since the window's start, or events; event e spans e to e + 1."""

    over: Over
    t0: int
    t1: int

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
