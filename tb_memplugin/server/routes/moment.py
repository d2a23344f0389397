"""`moment`: the state of a device at a time or after an event.

`stretch`: what was allocated and freed in a part of a step, its highest moment, and what stayed.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from tb_memplugin.analysis.allocations import turnover
from tb_memplugin.analysis.curves import OTHERS
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, shortened
from tb_memplugin.analysis.moments import Moment, largest_rows, live_allocation, moment
from tb_memplugin.server.frames import lines_at
from tb_memplugin.server.grouping import divided, labeled
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import (
    Allocation,
    LabeledPart,
    Part,
    Sum,
    allocation_shape,
    parts_shape,
    shape_of,
)
from tb_memplugin.server.stretch import (
    Neighbors,
    OfStretch,
    Since,
    neighbors_shape,
    requested_event,
    requested_since,
    since_shape,
    stretch,
)
from tb_memplugin.trace.tables import Rows

LARGEST = 30
MOST_PARTS = 300


class LargeAllocation(Allocation):
    """An allocation, and what allocated it."""

    row: int
    """Its number within the window."""
    line: str | None
    """Its source line, or null."""


class State(Neighbors):
    """The state of a device at a moment."""

    time_ns: int
    event: int
    """The moment."""
    bytes: int
    """Live bytes."""
    reserved: int | None
    """Reserved bytes, or null."""
    phase: str
    module: str | None
    operator: str | None
    """What ran."""
    by_category: list[Part]
    by_phase: list[Part]
    """What is alive, largest first."""
    largest: list[LargeAllocation]
    """The 30 largest. With `since` only of those that were allocated since."""


class MomentAnswer(State, total=False):
    """The state of a device at a moment."""

    by_module: list[Part]
    """Only without `by`."""
    parts: list[LabeledPart]
    """With `by`: the 300 largest, then `(others)`."""
    since: Since
    """With `since`, if that event is before the moment."""


def answer(session: Session, request: Request) -> MomentAnswer:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    event = requested_event(request, opened)
    state = moment(opened.trace, opened.device, event, largest=LARGEST)
    since = requested_since(request, opened, event)
    rows = np.array([block.row for block in state.largest], np.intp) if since is None else since.kept
    of_moment = shape_of(
        State,
        state,
        **neighbors_shape(opened, event),
        time_ns=state.time_ns - opened.epoch_ns,
        phase=state.phase.key,
        by_category=parts_shape(state.parts("category")),
        by_phase=parts_shape(state.parts("phase")),
        largest=_largest(opened, rows, LARGEST),
    )
    shape = cast("MomentAnswer", of_moment)
    if request.has("by"):
        shape["parts"] = _requested_parts(request, opened, state)
    else:
        shape["by_module"] = parts_shape(state.parts("module"))
    if since is not None:
        shape["since"] = since_shape(since, opened)
    return shape


def _largest(opened: Opened, rows: Rows, most: int) -> list[LargeAllocation]:
    trace = opened.trace
    blocks = [live_allocation(trace, row) for row in largest_rows(trace, rows, most).tolist()]
    lines = lines_at(trace, [block.row for block in blocks])
    return [
        {"row": block.row, "line": line, **allocation_shape(block, opened.epoch_ns)}
        for block, line in zip(blocks, lines, strict=True)
    ]


def _requested_parts(request: Request, opened: Opened, state: Moment) -> list[LabeledPart]:
    """Return the parts of the division that a request names: the largest, and all others as one."""
    by = request.choice("by", ALL_DIVISIONS)
    return labeled(shortened(state.parts(divided(request, opened, by)), MOST_PARTS, OTHERS), by)


LARGEST_STAYED = 10


class StretchAnswer(OfStretch):
    """What happened in a stretch. Its end has `start_bytes` plus `allocated` minus `freed`."""

    start_bytes: int
    end_bytes: int
    """Live bytes on the device before its first event and after its last."""
    highest_bytes: int
    highest_event: int
    highest_ns: int
    """The highest live bytes, and after which event that was; the moment before the first event counts."""
    allocated: Sum
    freed: Sum
    """In the stretch; what was freed may be older than it."""
    stayed: Sum
    """Allocated in the stretch and alive at its end."""
    largest: list[LargeAllocation]
    """The 10 largest of those that stayed."""


def answer_stretch(session: Session, request: Request) -> StretchAnswer:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    first, end = part.cuts(opened, 1).tolist()
    moved = turnover(opened.trace, opened.device, first, end)
    live = opened.trace.live(opened.device)
    return {
        **part.shape(),
        "start_bytes": int(live[first]),
        "end_bytes": int(live[end]),
        "highest_bytes": moved.highest_bytes,
        "highest_event": moved.highest_event,
        "highest_ns": opened.time_ns(moved.highest_event),
        "allocated": {"bytes": moved.allocated_bytes, "count": moved.allocated},
        "freed": {"bytes": moved.freed_bytes, "count": moved.freed},
        "stayed": {
            "bytes": int(opened.trace.allocations.bytes[moved.stayed].sum()),
            "count": len(moved.stayed),
        },
        "largest": _largest(opened, moved.stayed, LARGEST_STAYED),
    }
