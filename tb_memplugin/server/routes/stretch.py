"""`stretch`: what was allocated and freed in a part of a step, its highest moment, and what stayed."""

from __future__ import annotations

from typing import TypedDict

from tb_memplugin.analysis.allocations import turnover
from tb_memplugin.analysis.moments import largest_rows, live_allocation
from tb_memplugin.server.frames import lines_at
from tb_memplugin.server.routes.moment import LargeAllocation
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Sum, allocation_shape
from tb_memplugin.server.stretch import Over, stretch
from tb_memplugin.trace.tables import Rows

LARGEST = 10


class StretchAnswer(TypedDict):
    """What happened in a stretch. Its end has `start_bytes` plus `allocated` minus `freed`."""

    over: Over
    t0: int
    t1: int
    """The stretch."""
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


def answer(session: Session, request: Request) -> StretchAnswer:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    first, end = part.cuts(opened, 1).tolist()
    moved = turnover(opened.trace, opened.device, first, end)
    live = opened.trace.live(opened.device)
    return {
        "over": part.over,
        "t0": part.t0,
        "t1": part.t1,
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
        "largest": _largest(opened, moved.stayed),
    }


def _largest(opened: Opened, rows: Rows) -> list[LargeAllocation]:
    trace = opened.trace
    blocks = [live_allocation(trace, row) for row in largest_rows(trace, rows, LARGEST).tolist()]
    lines = lines_at(trace, [block.row for block in blocks])
    return [
        {"row": block.row, "line": line, **allocation_shape(block, opened.epoch_ns)}
        for block, line in zip(blocks, lines, strict=True)
    ]
