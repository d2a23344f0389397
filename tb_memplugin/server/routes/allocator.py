"""The Allocator's routes: figures at a moment, curves, segments, and a block.

What needs a replay of the window is computed once per window and device, and used for every moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np

from tb_memplugin.analysis.allocator import (
    LevelRuns,
    Levels,
    PoolState,
    Ratio,
    fragmentation_of,
    knows_segments,
    levels,
    pools_of,
    reserve_curve,
    split_moments,
    unused_levels,
)
from tb_memplugin.analysis.columns import Cuts, extremes
from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.layout import Layout, Placement, pending_since
from tb_memplugin.analysis.moments import live_allocation
from tb_memplugin.analysis.pool_names import pool_name, stream_name
from tb_memplugin.analysis.segments import (
    ORDERS,
    LiveBlocks,
    Order,
    Pieces,
    free_histogram,
    free_of_segments,
    homes_of,
    pieces,
    segment_order,
)
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.analysis.sums import sums
from tb_memplugin.server.cache import MIB, Cache
from tb_memplugin.server.frames import Frame, frame_shape
from tb_memplugin.server.grouping import keys_of
from tb_memplugin.server.routes.oom import FailedRequest, ooms_shape
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Allocation, LabeledPart, Sum, allocation_shape, shape_of
from tb_memplugin.server.stretch import (
    Neighbors,
    Over,
    neighbors_shape,
    requested_event,
    step_events,
    stretch,
)
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.indexes import Runs, runs_of
from tb_memplugin.trace.tables import Int64, Rows

_REPLAYS = Cache(256 * MIB)
"""One result for each device and window; of long windows almost all of it is in scratch files."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One device of a window. `pending_since` is that of `analysis.layout`."""

    levels: Levels
    unused: Ratio | None
    runs: LevelRuns
    placement: Placement
    pending_since: Int64
    knows_segments: bool


def replay_of(opened: Opened) -> Replay:
    """Return the replay of an opened window's device.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    return _REPLAYS.of_window(
        opened.trace, ("replay", opened.device), lambda: _replay(opened.trace, opened.device)
    )


def _replay(trace: MemoryTrace, device: int) -> Replay:
    memory = levels(trace, device)
    unused = unused_levels(trace, memory)
    runs = LevelRuns(
        trace.live_runs(device), trace.reserved_runs(device), None if unused is None else runs_of(unused)
    )
    return Replay(
        memory,
        unused,
        runs,
        Placement(trace, device),
        pending_since(trace, device),
        knows_segments(trace, device),
    )


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
    pools: list[PoolState]
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
    waste = fragmentation_of(replay.levels, layout if has_segments else None, event)
    histogram = free_histogram(layout) if has_segments else ()
    return shape_of(
        AllocatorState,
        waste,
        event=event,
        time_ns=opened.time_ns(event),
        **neighbors_shape(opened, event),
        what=_what_shape(opened, event),
        active_bytes=int(replay.levels.active[event + 1]),
        pending_bytes=int(replay.levels.pending[event + 1]),
        free=[{"from_bytes": least, "count": count, "bytes": size} for least, count, size in histogram],
        pools=pools,
        outside={"bytes": int(blocks.bytes[layout.misfits].sum()), "count": len(layout.misfits)},
        knows_segments=has_segments,
        settings=dict(opened.trace.properties),
    )


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


DEFAULT_COLUMNS = 1_000


class Mark(TypedDict):
    """The highest moment of a step."""

    event: int
    time_ns: int
    """When it is."""
    bytes: int
    """The bytes at this moment."""
    unused: float | None
    """(reserved - allocated) / reserved, or null."""


class ReserveCurve(TypedDict):
    """Allocated, pending, reserved and unused memory of a stretch."""

    over: Over
    t0: int
    t1: int
    px: int
    """The stretch."""
    low: list[int]
    """Lowest active bytes of each column."""
    allocated: list[int]
    pending: list[int]
    """At the highest active bytes of each column; they sum to it. Pending: the free is requested and not
    completed."""
    reserved: list[int] | None
    """Highest of each column, or null."""
    unused: list[float | None] | None
    """Highest (reserved - allocated) / reserved of each column, 0 to 1, or null."""
    split: list[tuple[int, int, float]]
    """Event, `time_ns` and 1 - largest free block / all free bytes, at no more than 200 moments."""
    peak: Mark
    reserved_peak: Mark | None
    """The highest active and reserved bytes of the step."""
    ooms: list[FailedRequest]
    """Failed requests of the device in the whole window."""
    first_event: int
    last_event: int
    """The device's first and last event in the step; -1 and -1 if it has none."""
    knows_segments: bool
    """Whether the recording has segments."""


def answer_curve(session: Session, request: Request) -> ReserveCurve:
    """Answer from the side file."""
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    replay = replay_of(opened)
    cuts = part.cuts(opened, columns)
    memory, runs = replay.levels, replay.runs
    drawn = reserve_curve(memory, replay.unused, cuts, runs)
    unused = None if drawn.unused is None else drawn.unused.tolist()
    reserved = memory.reserved
    first_event, last_event = step_events(opened)
    return shape_of(
        ReserveCurve,
        drawn,
        over=part.over,
        t0=part.t0,
        t1=part.t1,
        px=columns,
        unused=unused and [None if math.isnan(ratio) else ratio for ratio in unused],
        split=_split_shape(opened, replay, cuts),
        peak=_mark(opened, replay, memory.active, runs.active),
        reserved_peak=None if reserved is None else _mark(opened, replay, reserved, runs.reserved),
        first_event=first_event,
        last_event=last_event,
        ooms=ooms_shape(opened),
        knows_segments=replay.knows_segments,
    )


def _split_shape(opened: Opened, replay: Replay, cuts: Cuts) -> list[tuple[int, int, float]]:
    if not replay.knows_segments:
        return []
    moments = split_moments(replay.placement, cuts)
    return [(event, opened.time_ns(event), ratio) for event, ratio in moments]


def _mark(opened: Opened, replay: Replay, level: Int64, runs: Runs[np.int64] | None) -> Mark:
    """Return the highest moment of the step or window, including the state at its beginning."""
    event = int(extremes(level, np.array(opened.events()), runs)[2][0]) - 1
    ratio = replay.unused
    unused = None if ratio is None or np.isneginf(ratio[event + 1]) else float(ratio[event + 1])
    return {
        "event": event,
        "time_ns": opened.time_ns(event),
        "bytes": int(level[event + 1]),
        "unused": unused,
    }


DIVISIONS: tuple[By, ...] = ("category", "module", "line", "stack", "pool", "stream")
SHOWN_KEYS = 9
"""How many keys get a color of their own, besides categories."""


class Segments(TypedDict):
    """Segments, as columns of equal length."""

    address: list[str]
    bytes: list[int]
    free: list[int]
    """Where each is, how large, and how much of it is free."""
    home: list[int]
    """Place in `homes`."""
    expandable: list[int]
    """0 or 1."""


class Home(TypedDict):
    """A pool and stream that has segments."""

    pool: str
    stream: str
    """Their names."""
    segments: int
    bytes: int
    """How many segments, and their bytes."""


class SegmentsAnswer(TypedDict):
    """The segments, and the blocks in them."""

    event: int
    by: By
    order: Order
    """As asked."""
    segments: Segments
    """All segments, in that order."""
    homes: list[Home]
    """Their pools and streams."""
    keys: list[LabeledPart]
    """Of the live blocks in all segments: categories in stacking order, others largest first; after nine,
    `(others)`."""
    first: int
    last: int
    """The places whose pieces are here."""
    finest: int
    """As used: coarser than asked if the answer would be very long."""
    pieces: Pieces
    """The pieces of a segment come in order of address and fill it."""


def answer_segments(session: Session, request: Request) -> SegmentsAnswer:
    """Answer from the side file."""
    by, order = request.choice("by", DIVISIONS, "category"), request.choice("order", ORDERS, "pool")
    opened = session.opened(session.chosen(request))
    event = requested_event(request, opened)
    replay, blocks = replay_of(opened), opened.trace.allocations
    layout = replay.placement.at(event)
    rows = segment_order(layout, order)
    size = blocks.bytes[layout.rows]
    key, keys = keys_of(opened, layout.rows, size, by, by, SHOWN_KEYS)
    live = LiveBlocks(
        address=blocks.address[layout.rows],
        requested=size,
        key=key,
        pending=replay.pending_since[layout.rows] <= event,
    )
    last = max(len(rows) - 1, 0)
    first, last = request.number("first", 0, 0), min(request.number("last", last, 0), last)
    finest = request.number("finest", 1, 1)
    drawn = pieces(layout, rows, live, first=first, last=last, finest=finest)
    homes, home_of = homes_of(layout)
    count = np.bincount(home_of, minlength=len(homes)).tolist()
    total = sums(home_of, layout.segments.bytes, len(homes)).tolist()
    return {
        "event": event,
        "by": by,
        "order": order,
        "segments": _segments_shape(layout, rows, home_of),
        "homes": [
            {
                "pool": pool_name(opened.trace, pool),
                "stream": stream_name(opened.trace, stream),
                "segments": count[row],
                "bytes": total[row],
            }
            for row, (pool, stream) in enumerate(homes)
        ],
        "keys": keys,
        "first": first,
        "last": last,
        "finest": drawn.finest,
        "pieces": drawn,
    }


def _segments_shape(layout: Layout, rows: Rows, home_of: Int64) -> Segments:
    segments = layout.segments
    return {
        "address": [hex(address) for address in segments.address[rows].tolist()],
        "bytes": segments.bytes[rows].tolist(),
        "free": free_of_segments(layout)[rows].tolist(),
        "home": home_of[rows].tolist(),
        "expandable": segments.expandable[rows].astype(int).tolist(),
    }


class InSegment(TypedDict):
    """The segment of a block."""

    address: str
    bytes: int
    """Of the segment."""
    offset: int
    """Where the block begins in it."""


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
    stack: list[Frame]
    """Its call stack, innermost first."""


def answer_block(session: Session, request: Request) -> BlockAnswer:
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
    layout = replay.placement.at(event)
    index = next(iter(np.flatnonzero(layout.rows == row).tolist()), None)
    return {
        **allocation_shape(live_allocation(trace, row), opened.epoch_ns),
        "rounded_bytes": None if index is None else int(layout.extent[index]),
        "by_rule": None if index is None else bool(layout.by_rule[index]),
        "segment": None if index is None else _segment_shape(opened, layout, index),
        "state": ("pending" if since <= event else "allocated") if alive else "gone",
        "born_event": born if born >= 0 else None,
        "freed_event": freed if freed < len(trace.events) else None,
        "pending_event": since if 0 <= since < freed else None,
        "pending_ns": opened.time_ns(since) if 0 <= since < freed else None,
        "pool": pool_name(trace, int(blocks.pool[row])),
        "stream": stream_name(trace, int(blocks.stream[row])),
        "context": trace.contexts[context] if context >= 0 else None,
        "stack": [frame_shape(text) for text in trace.stack(int(blocks.stack[row]))],
    }


def _segment_shape(opened: Opened, layout: Layout, index: int) -> InSegment:
    segment, address = int(layout.segment[index]), opened.trace.allocations.address
    start = int(layout.segments.address[segment])
    return {
        "address": hex(start),
        "bytes": int(layout.segments.bytes[segment]),
        "offset": int(address[layout.rows[index]]) - start,
    }
