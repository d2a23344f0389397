"""`moment`: the state of a device at a time or after an event."""

from __future__ import annotations

from tb_memplugin.analysis.curves import OTHERS
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, shortened
from tb_memplugin.analysis.moments import LiveAllocation, Moment, largest_rows, live_allocation, moment
from tb_memplugin.server.frames import labels_of, lines_at
from tb_memplugin.server.grouping import divided
from tb_memplugin.server.moments import neighbors_shape, requested_event, requested_since, since_shape
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json, allocation_shape, parts_shape
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Rows

LARGEST = 30
MOST_PARTS = 300


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    trace, epoch = opened.trace, opened.epoch_ns
    event = requested_event(request, opened)
    state = moment(trace, opened.device, event, largest=LARGEST)
    since = requested_since(request, opened, event)
    largest = state.largest if since is None else _blocks(trace, since.kept)
    lines = lines_at(trace, [block.row for block in largest])
    return {
        "time_ns": state.time_ns - epoch,
        "event": state.event,
        "bytes": state.bytes,
        "reserved": state.reserved,
        "phase": state.phase.key,
        "module": state.module,
        "operator": state.operator,
        **neighbors_shape(opened, event),
        "by_category": parts_shape(state.parts("category")),
        **({} if request.has("by") else {"by_module": parts_shape(state.parts("module"))}),
        "by_phase": parts_shape(state.parts("phase")),
        **_requested_parts(request, opened, state),
        "largest": [
            {"row": block.row, "line": line, **allocation_shape(block, epoch)}
            for block, line in zip(largest, lines, strict=True)
        ],
        **({} if since is None else {"since": since_shape(since, opened)}),
    }


def _blocks(trace: MemoryTrace, rows: Rows) -> tuple[LiveAllocation, ...]:
    return tuple(live_allocation(trace, row) for row in largest_rows(trace, rows, LARGEST).tolist())


def _requested_parts(request: Request, opened: Opened, state: Moment) -> Json:
    """Return the parts of the division that a request names: the largest, and all others as one."""
    if not request.has("by"):
        return {}
    by = request.choice("by", ALL_DIVISIONS)
    shown = shortened(state.parts(divided(request, opened, by)), MOST_PARTS, OTHERS)
    labels = labels_of([part.key for part in shown], by)
    return {
        "parts": [
            {"key": part.key, "label": label, "bytes": part.bytes, "count": part.count}
            for part, label in zip(shown, labels, strict=True)
        ]
    }
