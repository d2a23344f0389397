"""The allocations that a request selects: alive at a moment, or allocated in the step; and their stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict, TypeVar, get_args

import numpy as np

from tb_memplugin.analysis.stacks import StackRow, stacks_of
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.moments import requested_event
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened
from tb_memplugin.server.shapes import Sum
from tb_memplugin.trace.tables import Rows

Result = TypeVar("Result")


Of = Literal["moment", "step"]
OF: tuple[Of, ...] = get_args(Of)


class Whole(TypedDict):
    """What the answers about stacks begin with."""

    of: Of
    """As asked."""
    event: int | None
    time_ns: int | None
    """The moment, or null."""
    bytes: int
    count: int
    """The whole."""
    found: Sum | None
    """What `find` finds, each allocation once. Null without `find`."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """Allocations of a device: alive after `event`; if it is None, all allocated in the step or window."""

    opened: Opened
    of: Of
    event: int | None

    def cached(self, name: str, compute: Callable[[], Result]) -> Result:
        """Return something computed from these allocations, cached under a name."""
        opened = self.opened
        key = ("allocated", opened.device, opened.step, opened.is_window, self.event, name)
        return RESULTS.of_window(opened.trace, key, compute)

    def rows(self) -> Rows:
        """Return the rows of `trace.allocations`."""
        trace, device = self.opened.trace, self.opened.device
        if self.event is not None:
            return trace.allocations.alive_at(self.event, device)
        first, end = self.opened.events()
        blocks = trace.allocations
        return np.flatnonzero((blocks.device == device) & (blocks.born >= first) & (blocks.born < end))

    def stacks(self) -> tuple[StackRow, ...]:
        """Return what each stack allocated, largest first."""
        return self.cached("stacks", lambda: stacks_of(self.opened.trace, self.rows()))

    def shape(self, rows: Sequence[StackRow], found: Sum | None) -> Whole:
        """Return the fields with which the answers of all these routes begin."""
        return {
            "of": self.of,
            "event": self.event,
            "time_ns": None if self.event is None else self.opened.time_ns(self.event),
            "bytes": sum(row.bytes for row in rows),
            "count": sum(row.calls for row in rows),
            "found": found,
        }


def allocated(request: Request, opened: Opened) -> Allocated:
    """Return the allocations that `of`, `event` and `t` select; by default those alive at the step's peak.

    Raises:
        MemPluginError: a parameter is wrong.
    """
    of = request.choice("of", OF, "moment")
    if of == "step":
        return Allocated(opened, of, None)
    has_moment = request.has("event") or request.has("t")
    return Allocated(opened, of, requested_event(request, opened) if has_moment else _peak_event(opened))


def _peak_event(opened: Opened) -> int:
    trace, device = opened.trace, opened.device
    if opened.is_window:
        first, end = opened.events()
        return first - 1 + int(np.argmax(trace.live(device)[first : end + 1]))
    stats = RESULTS.of_window(trace, ("steps", device), partial(step_stats, trace, device))
    return stats[opened.step].peak_event
