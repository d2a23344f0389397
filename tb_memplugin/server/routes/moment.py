"""`moment`: the state of a device at a time or after an event."""

from __future__ import annotations

from tb_memplugin.analysis.curves import OTHERS
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, shortened
from tb_memplugin.analysis.moments import LiveAllocation, Moment, largest_rows, live_allocation, moment
from tb_memplugin.server.frames import labels_of, lines_at
from tb_memplugin.server.grouping import divided
from tb_memplugin.server.moments import (
    Neighbors,
    Since,
    neighbors_shape,
    requested_event,
    requested_since,
    since_shape,
)
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Allocation, LabeledPart, Part, allocation_shape, parts_shape
from tb_memplugin.trace import MemoryTrace
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
    trace, epoch = opened.trace, opened.epoch_ns
    event = requested_event(request, opened)
    state = moment(trace, opened.device, event, largest=LARGEST)
    since = requested_since(request, opened, event)
    largest = state.largest if since is None else _blocks(trace, since.kept)
    lines = lines_at(trace, [block.row for block in largest])
    around = neighbors_shape(opened, event)
    shape: MomentAnswer = {
        "time_ns": state.time_ns - epoch,
        "event": state.event,
        "bytes": state.bytes,
        "reserved": state.reserved,
        "phase": state.phase.key,
        "module": state.module,
        "operator": state.operator,
        "previous_event": around["previous_event"],
        "next_event": around["next_event"],
        "previous_event_ns": around["previous_event_ns"],
        "next_event_ns": around["next_event_ns"],
        "by_category": parts_shape(state.parts("category")),
        "by_phase": parts_shape(state.parts("phase")),
        "largest": [
            {"row": block.row, "line": line, **allocation_shape(block, epoch)}
            for block, line in zip(largest, lines, strict=True)
        ],
    }
    if request.has("by"):
        shape["parts"] = _requested_parts(request, opened, state)
    else:
        shape["by_module"] = parts_shape(state.parts("module"))
    if since is not None:
        shape["since"] = since_shape(since, opened)
    return shape


def _blocks(trace: MemoryTrace, rows: Rows) -> tuple[LiveAllocation, ...]:
    return tuple(live_allocation(trace, row) for row in largest_rows(trace, rows, LARGEST).tolist())


def _requested_parts(request: Request, opened: Opened, state: Moment) -> list[LabeledPart]:
    """Return the parts of the division that a request names: the largest, and all others as one."""
    by = request.choice("by", ALL_DIVISIONS)
    shown = shortened(state.parts(divided(request, opened, by)), MOST_PARTS, OTHERS)
    labels = labels_of([part.key for part in shown], by)
    return [
        {"key": part.key, "label": label, "bytes": part.bytes, "count": part.count}
        for part, label in zip(shown, labels, strict=True)
    ]
