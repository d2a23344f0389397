"""`allocator`: the allocator's figures at a moment, its pools, free blocks and settings."""

from __future__ import annotations

from typing import TypedDict

from tb_memplugin.analysis.allocator import PoolState, fragmentation_of, pools_of
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.segments import free_histogram
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.server.moments import Neighbors, neighbors_shape, requested_event
from tb_memplugin.server.replays import Replay, replay_of
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Sum
from tb_memplugin.trace import Kind


class Pool(TypedDict):
    """What a pool holds for a stream. Each column of the pools sums to the device's."""

    pool: str
    stream: str
    """Their names."""
    allocated_bytes: int
    pending_bytes: int
    """Requested bytes."""
    rounded_bytes: int
    """What the allocator uses for the allocated and pending bytes."""
    by_rule_bytes: int
    """The part of it that the file does not contain and that follows from the rule of rounding."""
    reserved_bytes: int | None
    segments: int | None
    free_bytes: int | None
    largest_free_bytes: int | None
    """Of the segments, or null."""


class FreeBlocks(TypedDict):
    """Free blocks of about the same size."""

    from_bytes: int
    """The least size, a power of two."""
    count: int
    bytes: int
    """All of them."""


class AllocatorEvent(TypedDict):
    """An event of the allocator."""

    kind: str
    """`alloc`, `oom`, ..."""
    bytes: int
    address: str
    """Of the block or segment."""
    line: str | None
    """The leading line of its stack, or null."""


class _Waste(TypedDict):
    reserved_bytes: int | None
    allocated_bytes: int
    unused: float | None
    free_bytes: int | None
    largest_free_bytes: int | None
    split: float | None
    free: list[FreeBlocks]


class AllocatorState(Neighbors):
    """The allocator at a moment."""

    event: int
    time_ns: int
    """The moment."""
    what: AllocatorEvent | None
    """The event itself. Null before the first event and for events of other devices."""
    active_bytes: int
    allocated_bytes: int
    pending_bytes: int
    """Requested bytes. Active is allocated plus pending."""
    reserved_bytes: int | None
    """Or null."""
    unused: float | None
    """(reserved - allocated) / reserved."""
    free_bytes: int | None
    largest_free_bytes: int | None
    """Of the free blocks, or null."""
    split: float | None
    """1 - largest free block / all free bytes, or null."""
    pools: list[Pool]
    """One row per pool and stream."""
    free: list[FreeBlocks]
    """By size, ascending."""
    outside: Sum
    """Live blocks outside all segments."""
    knows_segments: bool
    """Whether the recording has segments."""
    settings: dict[str, str]
    """The allocator's, and other properties of the recording."""


def answer(session: Session, request: Request) -> AllocatorState:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    event = requested_event(request, opened)
    replay = replay_of(opened)
    layout = replay.placement.at(event)
    blocks = opened.trace.allocations
    since, has_segments = replay.pending_since, replay.knows_segments
    pools = pools_of(opened.trace, opened.device, event, layout, since, has_segments)
    return {
        "event": event,
        "time_ns": opened.time_ns(event),
        **neighbors_shape(opened, event),
        "what": _what_shape(opened, event),
        "active_bytes": int(replay.levels.active[event + 1]),
        "pending_bytes": int(replay.levels.pending[event + 1]),
        **_fragmentation_shape(replay, layout, event),
        "pools": [_pool_shape(pool) for pool in pools],
        "outside": {"bytes": int(blocks.bytes[layout.misfits].sum()), "count": len(layout.misfits)},
        "knows_segments": replay.knows_segments,
        "settings": dict(opened.trace.properties),
    }


def _pool_shape(pool: PoolState) -> Pool:
    return {
        "pool": pool.pool,
        "stream": pool.stream,
        "allocated_bytes": pool.allocated_bytes,
        "pending_bytes": pool.pending_bytes,
        "rounded_bytes": pool.rounded_bytes,
        "by_rule_bytes": pool.by_rule_bytes,
        "reserved_bytes": pool.reserved_bytes,
        "segments": pool.segments,
        "free_bytes": pool.free_bytes,
        "largest_free_bytes": pool.largest_free_bytes,
    }


def _what_shape(opened: Opened, event: int) -> AllocatorEvent | None:
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


def _fragmentation_shape(replay: Replay, layout: Layout, event: int) -> _Waste:
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
