"""`allocator_block`: everything that is known about one allocation."""

from __future__ import annotations

from typing import Literal, TypedDict

import numpy as np

from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.moments import live_allocation
from tb_memplugin.analysis.pool_names import pool_name, stream_name
from tb_memplugin.server.moments import requested_event
from tb_memplugin.server.replays import replay_of
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Allocation, allocation_shape


class InSegment(TypedDict):
    """The segment of a block."""

    address: str
    bytes: int
    """Of the segment."""
    offset: int
    """Where the block begins in it."""


class _Extent(TypedDict):
    rounded_bytes: int | None
    by_rule: bool | None
    segment: InSegment | None


class BlockAnswer(Allocation):
    """One allocation in its segment."""

    rounded_bytes: int | None
    by_rule: bool | None
    """What it takes of its segment, and whether that follows from the rule of rounding. Null outside of
    one."""
    segment: InSegment | None
    """Or null."""
    state: Literal["allocated", "pending", "gone"]
    """At the moment."""
    born_event: int | None
    freed_event: int | None
    pending_event: int | None
    pending_ns: int | None
    """Or null."""
    pool: str
    stream: str
    context: str | None
    """Where it was allocated."""
    stack: list[str]
    """Frames, innermost first."""


def answer(session: Session, request: Request) -> BlockAnswer:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    trace, blocks = opened.trace, opened.trace.allocations
    event = requested_event(request, opened)
    row = request.number("row", None, 0, len(blocks) - 1)
    replay = replay_of(opened)
    born, freed = int(blocks.born[row]), int(blocks.freed[row])
    since = int(replay.pending_since[row])
    context = int(blocks.context[row])
    alive = born <= event < freed
    return {
        **allocation_shape(live_allocation(trace, row), opened.epoch_ns),
        **_segment_shape(opened, replay.placement.at(event), row),
        "state": ("pending" if since <= event else "allocated") if alive else "gone",
        "born_event": born if born >= 0 else None,
        "freed_event": freed if freed < len(trace.events) else None,
        "pending_event": since if 0 <= since < freed else None,
        "pending_ns": opened.time_ns(since) if 0 <= since < freed else None,
        "pool": pool_name(trace, int(blocks.pool[row])),
        "stream": stream_name(trace, int(blocks.stream[row])),
        "context": trace.contexts[context] if context >= 0 else None,
        "stack": list(trace.stack(int(blocks.stack[row]))),
    }


def _segment_shape(opened: Opened, layout: Layout, row: int) -> _Extent:
    indices = np.flatnonzero(layout.rows == row)
    if not len(indices):
        return {"rounded_bytes": None, "by_rule": None, "segment": None}
    index = int(indices[0])
    segment = int(layout.segment[index])
    start = int(layout.segments.address[segment])
    return {
        "rounded_bytes": int(layout.extent[index]),
        "by_rule": bool(layout.by_rule[index]),
        "segment": {
            "address": hex(start),
            "bytes": int(layout.segments.bytes[segment]),
            "offset": int(opened.trace.allocations.address[row]) - start,
        },
    }
