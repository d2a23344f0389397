"""The Allocator's routes: figures at a moment, curves, segments, and a block.

What needs a replay of the window is computed once per window and device, and used for every moment.
"""

from __future__ import annotations

import math
from typing import Literal, TypedDict

import numpy as np

from tb_memplugin.analysis.allocator import AllocatorHistory, PoolState, Ratio, split_moments
from tb_memplugin.analysis.columns import Cuts, extremes
from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.layout import Layout
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
from tb_memplugin.server.routes.allocations import Detailed, detailed_shape
from tb_memplugin.server.routes.oom import FailedRequest, ooms_shape
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import LabeledPart, Sum, shape_of
from tb_memplugin.server.stretch import (
    Drawn,
    Neighbors,
    neighbors_shape,
    requested_event,
    stretch,
)
from tb_memplugin.trace import Kind
from tb_memplugin.trace.indexes import Runs
from tb_memplugin.trace.tables import Int64, Rows

_REPLAYS = Cache(256 * MIB)
"""One result for each device and window; of long windows almost all of it is in scratch files."""


def history_of(opened: Opened) -> AllocatorHistory:
    """Return the replay of an opened window's device.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """

    def compute() -> AllocatorHistory:
        history = AllocatorHistory(opened.trace, opened.device)
        _ = history.unused_runs  # before it is weighed
        return history

    return _REPLAYS.of_window(opened.trace, ("replay", opened.device), compute)


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
    """The leading line of its stack, or null: of frees in snapshots without `context="all"`, too."""


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
    history = history_of(opened)
    layout = history.placement.at(event)
    blocks = opened.trace.allocations
    histogram = free_histogram(layout) if history.knows_segments else ()
    return shape_of(
        AllocatorState,
        history.fragmentation(event, layout),
        event=event,
        time_ns=opened.time_ns(event),
        **neighbors_shape(opened, event),
        what=_what_shape(opened, event),
        active_bytes=int(history.levels.active[event + 1]),
        pending_bytes=int(history.levels.pending[event + 1]),
        free=[{"from_bytes": least, "count": count, "bytes": size} for least, count, size in histogram],
        pools=history.pools(opened.trace, event, layout),
        outside={"bytes": int(blocks.bytes[layout.misfits].sum()), "count": len(layout.misfits)},
        knows_segments=history.knows_segments,
        settings=dict(opened.trace.properties),
    )


def _what_shape(opened: Opened, event: int) -> AllocatorEvent | None:
    events = opened.trace.events
    if event < 0 or events.device[event] != opened.device:
        return None
    stack = int(opened.trace.own_stacks[event])
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


class ReserveCurve(Drawn):
    """Allocated, pending, reserved and unused memory of a stretch."""

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
    knows_segments: bool
    """Whether the recording has segments."""


def answer_curve(session: Session, request: Request) -> ReserveCurve:
    """Answer from the side file."""
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    history = history_of(opened)
    cuts = part.cuts(opened, columns)
    memory = history.levels
    drawn = history.curve(cuts)
    unused = None if drawn.unused is None else drawn.unused.tolist()
    reserved = memory.reserved
    return shape_of(
        ReserveCurve,
        drawn,
        **part.drawn_shape(opened, columns),
        unused=unused and [None if math.isnan(ratio) else ratio for ratio in unused],
        split=_split_shape(opened, history, cuts),
        peak=_mark(opened, history.unused, memory.active, history.active_runs),
        reserved_peak=None
        if reserved is None
        else _mark(opened, history.unused, reserved, history.reserved_runs),
        ooms=ooms_shape(opened),
        knows_segments=history.knows_segments,
    )


def _split_shape(opened: Opened, history: AllocatorHistory, cuts: Cuts) -> list[tuple[int, int, float]]:
    if not history.knows_segments:
        return []
    moments = split_moments(history.placement, cuts)
    return [(event, opened.time_ns(event), ratio) for event, ratio in moments]


def _mark(opened: Opened, ratio: Ratio | None, level: Int64, runs: Runs[np.int64] | None) -> Mark:
    """Return the highest moment of the step or window, including the state at its beginning."""
    event = int(extremes(level, np.array(opened.events()), runs)[2][0]) - 1
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
    history, blocks = history_of(opened), opened.trace.allocations
    layout = history.placement.at(event)
    rows = segment_order(layout, order)
    size = blocks.bytes[layout.rows]
    key, keys = keys_of(opened, layout.rows, size, by, by, SHOWN_KEYS)
    live = LiveBlocks(
        address=blocks.address[layout.rows],
        requested=size,
        key=key,
        pending=history.pending_since[layout.rows] <= event,
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


class BlockAnswer(Detailed):
    """One allocation in its segment."""

    rounded_bytes: int | None
    by_rule: bool | None
    """What it takes of its segment, and whether that follows from the rule of rounding. Null outside of
    one."""
    segment: InSegment | None
    """Or null."""
    state: Literal["allocated", "pending", "gone"]
    """At the moment."""
    pending_event: int | None
    pending_ns: int | None
    """Or null."""
    stack: list[Frame]
    """Its call stack, innermost first."""


def answer_block(session: Session, request: Request) -> BlockAnswer:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    trace, blocks = opened.trace, opened.trace.allocations
    event = requested_event(request, opened)
    row = request.number("row", None, 0, len(blocks) - 1)
    history = history_of(opened)
    born, freed = int(blocks.born[row]), int(blocks.freed[row])
    since = int(history.pending_since[row])
    alive = born <= event < freed
    layout = history.placement.at(event)
    index = next(iter(np.flatnonzero(layout.rows == row).tolist()), None)
    return {
        **detailed_shape(opened, row),
        "rounded_bytes": None if index is None else int(layout.extent[index]),
        "by_rule": None if index is None else bool(layout.by_rule[index]),
        "segment": None if index is None else _segment_shape(opened, layout, index),
        "state": ("pending" if since <= event else "allocated") if alive else "gone",
        "pending_event": since if 0 <= since < freed else None,
        "pending_ns": opened.time_ns(since) if 0 <= since < freed else None,
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
