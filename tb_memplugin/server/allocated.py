"""The allocations that a request selects: alive at a moment, or allocated in the step; and their stacks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.stacks import StackRow, stacks_of
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.errors import MemPluginError
from tb_memplugin.server.kept import Kept
from tb_memplugin.server.routes.moment import event_asked
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace import MemoryTrace

CHOICES = ("moment", "step")
KEPT = Kept(24)
"""Results are cached while a user moves through moments; each moment has two tables and three trees."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Allocated:
    """Allocations of a device: alive after `event`; if it is None, all allocated in the step or window."""

    opened: Opened
    of: str
    event: int | None

    def kept(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return something computed from these allocations by `make`, cached under the key `what`."""
        opened = self.opened
        return KEPT.of(opened.trace, (opened.device, opened.step, opened.whole, self.event, what), make)

    def rows(self) -> npt.NDArray[np.intp]:
        """Return the rows of `trace.allocations`."""
        trace, device = self.opened.trace, self.opened.device
        if self.event is not None:
            return trace.allocations.alive_at(self.event, device)
        first, end = self.opened.events()
        blocks = trace.allocations
        return np.flatnonzero((blocks.device == device) & (blocks.born >= first) & (blocks.born < end))

    def stacks(self) -> tuple[StackRow, ...]:
        """Return what each stack allocated, largest first."""
        return self.kept("stacks", lambda: stacks_of(self.opened.trace, self.rows()))

    def shape(self, rows: Sequence[StackRow]) -> Json:
        """Return the fields with which the answers of all these routes begin."""
        trace, event = self.opened.trace, self.event
        time = None if event is None else _time(trace, event) - self.opened.epoch_ns
        return {
            "of": self.of,
            "event": event,
            "time_ns": time,
            "bytes": sum(row.bytes for row in rows),
            "count": sum(row.calls for row in rows),
        }


def allocated(request: Request, opened: Opened) -> Allocated:
    """Return the allocations that `of`, `event` and `t` select; by default those alive at the step's peak.

    Raises:
        MemPluginError: a parameter is wrong.
    """
    of = request.text("of", "moment")
    if of not in CHOICES:
        raise MemPluginError(f"There is no {of[:40]!r}.", where="of", fix=f"Choose one of: {CHOICES}.")
    if of == "step":
        return Allocated(opened, of, None)
    asked = request.given("event") or request.given("t")
    return Allocated(opened, of, event_asked(request, opened) if asked else _peak_event(opened))


def _peak_event(opened: Opened) -> int:
    trace, device = opened.trace, opened.device
    if opened.whole:
        first, end = opened.events()
        return first - 1 + int(np.argmax(trace.live(device)[first : end + 1]))
    stats = KEPT.of(trace, ("steps", device), partial(step_stats, trace, device))
    return stats[opened.step].peak_event


def _time(trace: MemoryTrace, event: int) -> int:
    return int(trace.events.time_ns[event]) if event >= 0 else trace.steps[0].start_ns
