"""`allocator_block`: everything that is known about one allocation."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.moment import live_allocation
from tb_memplugin.analysis.segments import pool_name, stream_name
from tb_memplugin.server.replays import REPLAYS
from tb_memplugin.server.routes.moment import event_asked
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json, allocation_shape


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    trace, blocks = opened.trace, opened.trace.allocations
    event = event_asked(request, opened)
    row = request.number("row", None, 0, len(blocks) - 1)
    replay = REPLAYS.of(opened)
    born, freed = int(blocks.born[row]), int(blocks.freed[row])
    since = int(replay.pending_since[row])
    stack, context = int(blocks.stack[row]), int(blocks.context[row])
    alive = born <= event < freed
    return {
        **allocation_shape(live_allocation(trace, row), opened.epoch_ns),
        **_place_shape(opened, replay.placement.at(event), row),
        "state": ("pending" if since <= event else "allocated") if alive else "gone",
        "born_event": born if born >= 0 else None,
        "freed_event": freed if freed < len(trace.events) else None,
        "pending_event": since if 0 <= since < freed else None,
        "pending_ns": int(trace.events.time_ns[since]) - opened.epoch_ns if 0 <= since < freed else None,
        "pool": pool_name(trace, int(blocks.pool[row])),
        "stream": stream_name(trace, int(blocks.stream[row])),
        "context": trace.contexts[context] if context >= 0 else None,
        "stack": list(trace.stacks[stack]) if stack >= 0 else [],
    }


def _place_shape(opened: Opened, found: Layout, row: int) -> Json:
    at = np.flatnonzero(found.rows == row)
    if not len(at):
        return {"rounded_bytes": None, "by_rule": None, "segment": None}
    place = int(at[0])
    segment = int(found.segment[place])
    start = int(found.segments.address[segment])
    return {
        "rounded_bytes": int(found.extent[place]),
        "by_rule": bool(found.by_rule[place]),
        "segment": {
            "address": hex(start),
            "bytes": int(found.segments.bytes[segment]),
            "offset": int(opened.trace.allocations.address[row]) - start,
        },
    }
