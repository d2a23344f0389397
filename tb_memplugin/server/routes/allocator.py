"""`allocator`: the allocator's figures at a moment, its pools, free blocks and settings."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from tb_memplugin.analysis.allocator import pools_of
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.segments import free_histogram
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.server.replays import REPLAYS, Replay
from tb_memplugin.server.routes.moment import event_asked, neighbours_shape
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace import Kind


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    event = event_asked(request, opened)
    replay = REPLAYS.of(opened)
    found = replay.placement.at(event)
    blocks = opened.trace.allocations
    return {
        "event": event,
        "time_ns": _time(opened, event),
        **neighbours_shape(opened, event),
        "what": _what_shape(opened, event),
        **_levels_shape(replay, event),
        **_free_shape(replay, found),
        "pools": [asdict(pool) for pool in pools_of(opened.trace, opened.device, event, found)],
        "outside": {"bytes": int(blocks.bytes[found.misfits].sum()), "count": len(found.misfits)},
        "knows_segments": replay.knows_segments,
        "settings": dict(opened.trace.properties),
    }


def _time(opened: Opened, event: int) -> int:
    at = int(opened.trace.events.time_ns[event]) if event >= 0 else opened.trace.steps[0].start_ns
    return at - opened.epoch_ns


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


def _levels_shape(replay: Replay, event: int) -> Json:
    now = replay.levels
    reserved = None if now.reserved is None else int(now.reserved[event + 1])
    allocated = int(now.allocated[event + 1])
    return {
        "active_bytes": int(now.active[event + 1]),
        "allocated_bytes": allocated,
        "pending_bytes": int(now.pending[event + 1]),
        "reserved_bytes": reserved,
        "unused": (reserved - allocated) / reserved if reserved else None,
    }


def _free_shape(replay: Replay, found: Layout) -> Json:
    if not replay.knows_segments:
        return {"free_bytes": None, "largest_free_bytes": None, "split": None, "free": []}
    free, largest = int(found.free_bytes.sum()), int(np.max(found.free_bytes, initial=0))
    return {
        "free_bytes": free,
        "largest_free_bytes": largest,
        "split": 1 - largest / free if free else None,
        "free": [
            {"from_bytes": edge, "count": count, "bytes": size} for edge, count, size in free_histogram(found)
        ],
    }
