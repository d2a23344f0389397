"""`allocator`: the allocator's figures at a moment, its pools, free blocks and settings."""

from __future__ import annotations

from dataclasses import asdict

from tb_memplugin.analysis.allocator import fragmentation_of, pools_of
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.segments import free_histogram
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.server.moments import neighbors_shape, requested_event
from tb_memplugin.server.replays import Replay, replay_of
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace import Kind


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    event = requested_event(request, opened)
    replay = replay_of(opened)
    layout = replay.placement.at(event)
    blocks = opened.trace.allocations
    pools = pools_of(opened.trace, opened.device, event, layout, replay.pending_since)
    return {
        "event": event,
        "time_ns": opened.time_ns(event),
        **neighbors_shape(opened, event),
        "what": _what_shape(opened, event),
        "active_bytes": int(replay.levels.active[event + 1]),
        "pending_bytes": int(replay.levels.pending[event + 1]),
        **_fragmentation_shape(replay, layout, event),
        "pools": [asdict(pool) for pool in pools],
        "outside": {"bytes": int(blocks.bytes[layout.misfits].sum()), "count": len(layout.misfits)},
        "knows_segments": replay.knows_segments,
        "settings": dict(opened.trace.properties),
    }


def _what_shape(opened: Opened, event: int) -> Json | None:
    events = opened.trace.events
    if event < 0 or events.device[event] != opened.device:
        return None
    stack = int(events.stack[event])
    kind = Kind(int(events.kind[event]))
    return {
        "kind": kind.name.lower(),
        "bytes": int(events.bytes[event]),
        "address": hex(int(events.address[event])),
        "line": lines_of([opened.trace.stacks[stack]])[1][0] if stack >= 0 else None,
    }


def _fragmentation_shape(replay: Replay, layout: Layout, event: int) -> Json:
    has_segments = replay.knows_segments
    waste = fragmentation_of(replay.levels, layout if has_segments else None, event)
    histogram = free_histogram(layout) if has_segments else ()
    return {
        "reserved_bytes": waste.reserved_bytes,
        "allocated_bytes": waste.allocated_bytes,
        "unused": waste.unused,
        "free_bytes": waste.free_bytes,
        "largest_free_bytes": waste.largest_free_bytes,
        "split": waste.split,
        "free": [{"from_bytes": least, "count": count, "bytes": size} for least, count, size in histogram],
    }
