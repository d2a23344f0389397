"""A stretch of a step that a request names, over time or over events, and its pixel columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.reserve_curve import Cuts, event_cuts, time_cuts
from tb_memplugin.errors import MemPluginError
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened

OVER = ("time", "event")


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `t0` to `t1`: nanoseconds since the window's start, or events (e is drawn from e to e + 1)."""

    over: str
    t0: int
    t1: int

    def cuts(self, opened: Opened, columns: int) -> Cuts:
        """How many events come before each edge of equal columns."""
        if self.over == "event":
            return event_cuts(opened.trace, self.t0, self.t1, columns)
        return time_cuts(opened.trace, self.t0 + opened.epoch_ns, self.t1 + opened.epoch_ns, columns)


def step_events(opened: Opened) -> tuple[int, int]:
    """The first and last event on the device of the step or window, -1 and -1 where it has none."""
    first, end = opened.events()
    mine = np.flatnonzero(opened.trace.events.device[first:end] == opened.device)
    return (first + int(mine[0]), first + int(mine[-1])) if len(mine) else (-1, -1)


def stretch(request: Request, opened: Opened) -> Stretch:
    """What `over`, `t0` and `t1` mean; without them the whole step or window, over time.

    Raises:
        MemPluginError: a parameter is wrong, or the stretch is empty.
    """
    over = request.text("over", "time")
    if over not in OVER:
        raise MemPluginError(f"Cannot draw over {over[:40]!r}.", where="over", fix=f"Choose one of: {OVER}.")
    if over == "time":
        start, end = (edge - opened.epoch_ns for edge in opened.span())
    else:
        first, last = step_events(opened)
        start, end = (first, last + 1) if first >= 0 else (0, 1)
    t0, t1 = request.number("t0", start), request.number("t1", end)
    if t0 >= t1:
        raise MemPluginError(
            f"The span from {t0} to {t1} is empty.", where="t0, t1", fix="Give t0 before t1."
        )
    return Stretch(over, t0, t1)
