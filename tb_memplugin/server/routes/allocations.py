"""`allocations`: a page of single allocations. `allocation`: everything that is known about one.

`allocation_bands`: the largest allocations as bands over time, and all others as one band.
"""

from __future__ import annotations

from functools import partial
from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.allocations import bands, divided_rest, in_order, rows_with_text, versions
from tb_memplugin.analysis.annotations import innermost_at_birth
from tb_memplugin.analysis.divisions import ALL_DIVISIONS
from tb_memplugin.analysis.moments import live_allocation
from tb_memplugin.analysis.pool_names import pool_name, stream_name
from tb_memplugin.analysis.source_lines import NO_STACK
from tb_memplugin.server.cache import RESULTS, ZOOMS
from tb_memplugin.server.frames import LONGEST, Frame, FrameTable, KindOfLine, kind_of_line, lines_at
from tb_memplugin.server.grouping import divided, keys_of
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Allocation, Highest, LabeledPart, allocation_shape
from tb_memplugin.server.stretch import Drawn, stretch
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64, Rows

MOST_ROWS, DEFAULT_ROWS = 500, 200


class Listed(Allocation):
    """An allocation of a list."""

    row: int
    """Its number within the window."""
    version: int
    """How many blocks lived at this address before."""
    line: str | None
    """Its source line, or null."""
    kind: KindOfLine
    """Of that line: as in `Frame`, or `none`."""
    lifetime_ns: int | None
    """Null if it began before or ended after the window."""


class AllocationsAnswer(TypedDict):
    """A page of allocations that were alive at some time of a stretch."""

    rows_found: int
    bytes_found: int
    """All that `find` finds."""
    rows_all: int
    """All in the stretch."""
    first: int
    """As asked."""
    rows: list[Listed]
    """Those of this page."""


class Detailed(Allocation):
    """An allocation, and where it was allocated."""

    pool: str
    stream: str
    context: str | None
    """Where it was allocated; the last or null."""
    born_event: int | None
    freed_event: int | None
    """Events, or null."""


class AllocationAnswer(Listed, Detailed):
    """Everything that is known about one allocation."""

    rounded_bytes: int | None
    """What the allocator used for it, or null."""
    annotation: str | None
    """The range in which it was allocated, or null."""
    first_ns: int
    last_ns: int
    """Its life within the window."""
    frames: list[Frame]
    """All frames of its stacks."""
    stack: list[int]
    forward: list[int]
    """Places in `frames`, innermost first: its stack, and that of the forward call whose backward this is."""


def answer(session: Session, request: Request) -> AllocationsAnswer:
    """Answer `allocations` from the side file."""
    opened = session.opened(session.chosen(request))
    trace, device = opened.trace, opened.device
    edges = stretch(request, opened).cuts(opened, 1)
    inside = (int(edges[0]), int(edges[-1]))
    text, sort = request.text("find", "").strip()[:LONGEST], request.text("sort", "bytes")
    key = ("allocations", device, inside)
    alive = ZOOMS.of_window(trace, key, lambda: trace.allocations.alive_between(*inside, device))
    matching = ZOOMS.of_window(
        trace, (*key, text), lambda: rows_with_text(trace, alive, text, _versions(trace))
    )
    rows = ZOOMS.of_window(trace, (*key, text, sort), lambda: in_order(trace, matching, sort))
    first = request.number("first", 0, 0)
    page = rows[first : first + request.number("count", DEFAULT_ROWS, 1, MOST_ROWS)]
    return {
        "rows_found": len(rows),
        "bytes_found": int(trace.allocations.bytes[matching].sum()),
        "rows_all": len(alive),
        "first": first,
        "rows": _listed(opened, page),
    }


def answer_one(session: Session, request: Request) -> AllocationAnswer:
    """Answer `allocation` from the side file."""
    opened = session.opened(session.chosen(request))
    trace, blocks = opened.trace, opened.trace.allocations
    row = request.number("row", None, 0, len(blocks) - 1)
    rounded = int(blocks.rounded[row])
    start, end = opened.window_span()
    table = FrameTable()
    listed = _listed(opened, np.array([row], np.intp))[0]
    return {
        **detailed_shape(opened, row),
        **listed,
        "rounded_bytes": rounded if rounded >= 0 else None,
        "annotation": _annotation(trace, row),
        "first_ns": start - opened.epoch_ns if listed["born_ns"] is None else listed["born_ns"],
        "last_ns": end - opened.epoch_ns if listed["freed_ns"] is None else listed["freed_ns"],
        "stack": table.rows(trace.stack(int(blocks.stack[row]))),
        "forward": table.rows(trace.stack(int(blocks.forward[row]))),
        "frames": table.shape(),
    }


def detailed_shape(opened: Opened, row: int) -> Detailed:
    """Return an allocation (its row) and where it was allocated."""
    trace, blocks = opened.trace, opened.trace.allocations
    born, freed, context = int(blocks.born[row]), int(blocks.freed[row]), int(blocks.context[row])
    return {
        **allocation_shape(live_allocation(trace, row), opened.epoch_ns),
        "pool": pool_name(trace, int(blocks.pool[row])),
        "stream": stream_name(trace, int(blocks.stream[row])),
        "context": trace.contexts[context] if context >= 0 else None,
        "born_event": born if born >= 0 else None,
        "freed_event": freed if freed < len(trace.events) else None,
    }


def _versions(trace: MemoryTrace) -> Int64:
    return RESULTS.of_window(trace, "versions", partial(versions, trace))


def _listed(opened: Opened, rows: Rows) -> list[Listed]:
    trace = opened.trace
    version = _versions(trace)[rows].tolist()
    lines = lines_at(trace, rows.tolist())
    shapes: list[Listed] = []
    for row, row_version, line in zip(rows.tolist(), version, lines, strict=True):
        shape = allocation_shape(live_allocation(trace, row), opened.epoch_ns)
        born, freed = shape["born_ns"], shape["freed_ns"]
        shapes.append(
            {
                **shape,
                "row": row,
                "version": row_version,
                "line": line,
                "kind": kind_of_line(line or NO_STACK),
                "lifetime_ns": None if born is None or freed is None else freed - born,
            }
        )
    return shapes


def _annotation(trace: MemoryTrace, row: int) -> str | None:
    name = int(innermost_at_birth(trace, np.array([row], np.intp))[0])
    return trace.annotation_names[name] if name >= 0 else None


DEFAULT_COLUMNS, DEFAULT_BANDS, MOST_BANDS = 1_000, 1_000, 4_000
SHOWN_KEYS = 10
"""How many keys get a color of their own, besides categories and groups."""


class BandColumns(TypedDict):
    """Bands, in order of allocation, as columns of equal length."""

    row: list[int]
    """The allocation's number within the window."""
    bytes: list[int]
    """Its bytes."""
    first: list[int]
    last: list[int]
    """The columns of the chart in which it is alive."""
    key: list[int]
    """Place in `keys`."""
    tensor: list[str | None]
    """What lies in it; null where it is not known."""


class BandsAnswer(Drawn):
    """The largest allocations, each as a band over time, and all others as one band."""

    min: list[int]
    max: list[int]
    """Lowest and highest live bytes of each column."""
    bands: BandColumns
    """The largest allocations."""
    rest: list[int]
    """For each column: with the bands that are alive there, it sums to `max`."""
    others: int
    """How many allocations are in `rest`. An allocation that is not alive at the highest moment of any column
    is neither in it nor in `bands`."""
    keys: list[LabeledPart]
    """For bands and `rest`. Categories and groups in stacking order, others largest first; after ten,
    `(others)`."""
    parts: list[list[int]] | None
    """For each key, its part of `rest` in every column. Null if nothing is in `rest`."""
    peak: Highest
    """The highest moment of the stretch."""


def answer_bands(session: Session, request: Request) -> BandsAnswer:
    """Answer from the side file."""
    by = request.choice("colour", ALL_DIVISIONS, "category")
    opened = session.opened(session.chosen(request))
    part = stretch(request, opened)
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    most = request.number("most", DEFAULT_BANDS, 1, MOST_BANDS)
    trace, device = opened.trace, opened.device
    drawn = ZOOMS.of_window(
        trace,
        ("bands", device, part, columns, most),
        lambda: bands(trace, device, part.cuts(opened, columns), most),
    )
    division, others = divided(request, opened, by), len(drawn.alive.rows) - len(drawn.rows)
    key, keys = keys_of(opened, drawn.alive.rows, drawn.alive_bytes, by, division, SHOWN_KEYS)
    parts = divided_rest(drawn, key, len(keys)) if others else None
    return {
        **part.drawn_shape(opened, columns),
        "min": drawn.low.tolist(),
        "max": drawn.high.tolist(),
        "bands": {
            "row": drawn.rows.tolist(),
            "bytes": drawn.bytes.tolist(),
            "first": drawn.first.tolist(),
            "last": drawn.last.tolist(),
            "key": key[drawn.chosen].tolist(),
            "tensor": [
                str(trace.tensors[tensor]) if tensor >= 0 else None
                for tensor in trace.allocations.tensor[drawn.rows].tolist()
            ],
        },
        "keys": keys,
        "parts": None if parts is None else parts.tolist(),
        "rest": drawn.rest.tolist(),
        "others": others,
        "peak": {
            "event": drawn.peak_event,
            "time_ns": opened.time_ns(drawn.peak_event),
            "bytes": int(drawn.high[drawn.peak_column]),
            "column": drawn.peak_column,
        },
    }
