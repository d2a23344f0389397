"""`stacks`: the call tree of allocations, as far as a screen can show it.

`stack_table`, `line_table`, `rule_table`: what stacks, source lines and custom rules allocated. Each is about
the allocations that are alive at a moment, or that were allocated in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, get_args

import numpy as np

from tb_memplugin.analysis.lines import LineRow, lines_of_rows
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.analysis.stacks import Flame, Frames, StackRow, flame, label_of, stacks_of
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.frames import LONGEST, Finder, Frame, FrameTable, KindOfLine, kind_of_line
from tb_memplugin.server.rule_search import rule_parts
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import NamedSum, Sum
from tb_memplugin.server.stretch import requested_event
from tb_memplugin.trace.tables import Int64, Rows

Result = TypeVar("Result")


Of = Literal["moment", "step"]
OF: tuple[Of, ...] = get_args(Of)


class Whole(TypedDict):
    """What the answers about stacks begin with."""

    of: Of
    """As asked."""
    event: int | None
    time_ns: int | None
    """The moment, or null."""
    bytes: int
    count: int
    """The whole."""
    found: Sum | None
    """What `find` finds, each allocation once. Null without `find`."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """Allocations of a device: alive after `event`; if it is None, all allocated in the step or window."""

    opened: Opened
    of: Of
    event: int | None

    def cached(self, name: str, compute: Callable[[], Result]) -> Result:
        """Return something computed from these allocations, cached under a name."""
        opened = self.opened
        key = ("allocated", opened.device, opened.step, opened.is_window, self.event, name)
        return RESULTS.of_window(opened.trace, key, compute)

    def rows(self) -> Rows:
        """Return the rows of `trace.allocations`."""
        trace, device = self.opened.trace, self.opened.device
        if self.event is not None:
            return trace.allocations.alive_at(self.event, device)
        first, end = self.opened.events()
        blocks = trace.allocations
        return np.flatnonzero((blocks.device == device) & (blocks.born >= first) & (blocks.born < end))

    def stacks(self) -> tuple[StackRow, ...]:
        """Return what each stack allocated, largest first."""
        return self.cached("stacks", lambda: stacks_of(self.opened.trace, self.rows()))

    def shape(self, rows: Sequence[StackRow], found: Sum | None) -> Whole:
        """Return the fields with which the answers of all these routes begin."""
        return {
            "of": self.of,
            "event": self.event,
            "time_ns": None if self.event is None else self.opened.time_ns(self.event),
            **_total(rows),
            "found": found,
        }


def allocated(request: Request, opened: Opened) -> Allocated:
    """Return the allocations that `of`, `event` and `t` select; by default those alive at the step's peak.

    Raises:
        MemPluginError: a parameter is wrong.
    """
    of = request.choice("of", OF, "moment")
    if of == "step":
        return Allocated(opened, of, None)
    has_moment = request.has("event") or request.has("t")
    return Allocated(opened, of, requested_event(request, opened) if has_moment else _peak_event(opened))


def _peak_event(opened: Opened) -> int:
    trace, device = opened.trace, opened.device
    if opened.is_window:
        first, end = opened.events()
        return first - 1 + int(np.argmax(trace.live(device)[first : end + 1]))
    stats = RESULTS.of_window(trace, ("steps", device), partial(step_stats, trace, device))
    return stats[opened.step].peak_event


FRAMES: tuple[Frames, ...] = get_args(Frames)
DEFAULT_COLUMNS = 1_000
NARROWEST = 0.5
"""Nodes narrower than this part of a pixel column are left out."""

ROOT, WITHOUT = -1, -2


class Nodes(TypedDict):
    """Nodes of the tree, as columns of equal length: parents first, siblings largest first, `(no stack)`
    last. The root and what is above `node` are always among them.
    """

    id: list[int]
    """Number of the node."""
    parent: list[int]
    """A place in these columns, -1 for the root."""
    label: list[int]
    """The frame that it goes by (a place in `frames`), -1 for the root, -2 for `(no stack)`."""
    run: list[list[int]]
    """All its frames, outermost first."""
    bytes: list[int]
    count: list[int]
    """With its children."""
    own: list[int]
    """Bytes of the stacks that end here."""
    tensor: list[str | None]
    """What lies in each of its allocations; null where they differ or it is not known of all."""
    found: list[int]
    """1 if `find` finds one of its frames."""


class StacksAnswer(Whole):
    """The tree of calls."""

    knows_stacks: bool
    """Whether any allocation of the device has a stack."""
    frames: list[Frame]
    """All frames of the nodes."""
    node: int
    """The node that is looked at."""
    nodes: Nodes
    """Those that a screen can show."""
    omitted: int
    """How many nodes are left out."""


def answer(session: Session, request: Request) -> StacksAnswer:
    """Answer from the side file."""
    frames = request.choice("frames", FRAMES, "folded")
    opened = session.opened(session.chosen(request))
    chosen = allocated(request, opened)
    rows = chosen.stacks()
    tree = chosen.cached(frames, lambda: flame(rows, frames))
    node = request.number("node", 0, 0)
    node = node if node < len(tree.runs) else 0  # a link may name a node of another moment's tree
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    finder = Finder(request.text("find", ""))
    nodes, omitted = tree.in_sight(node, float(tree.bytes[node]) / columns * NARROWEST)
    table = FrameTable()
    return {
        **chosen.shape(rows, matches_shape(rows, finder)),
        "knows_stacks": knows_stacks(opened),
        "node": node,
        "nodes": _nodes_shape(tree, nodes, table, finder),
        "frames": table.shape(),
        "omitted": omitted,
    }


def matches_shape(rows: Sequence[StackRow], finder: Finder) -> Sum | None:
    """Return the sum of the stacks that contain the text; None if the text is empty."""
    if not finder:
        return None
    return _total([row for row in rows if finder.has(row.frames)])


def _total(rows: Sequence[StackRow | LineRow]) -> Sum:
    return {"bytes": sum(row.bytes for row in rows), "count": sum(row.calls for row in rows)}


def knows_stacks(opened: Opened) -> bool:
    """Return whether any allocation of the device has a stack."""
    blocks, device = opened.trace.allocations, opened.device
    return RESULTS.of_window(
        opened.trace,
        ("knows stacks", device),
        lambda: bool((blocks.stack[blocks.device == device] >= 0).any()),
    )


def _nodes_shape(tree: Flame, nodes: Int64, table: FrameTable, finder: Finder) -> Nodes:
    shown = nodes.tolist()
    column = {node: row for row, node in enumerate(shown)}
    return {
        "id": shown,
        "parent": [column.get(above, -1) for above in tree.parent[nodes].tolist()],
        "label": [_label(tree, node, table) for node in shown],
        "run": [[] if node in (0, tree.without) else table.rows(tree.runs[node]) for node in shown],
        "bytes": tree.bytes[nodes].tolist(),
        "count": tree.count[nodes].tolist(),
        "own": tree.own[nodes].tolist(),
        "tensor": [tree.tensors[node] for node in shown],
        "found": [int(bool(finder) and finder.has(tree.runs[node])) for node in shown],
    }


def _label(tree: Flame, node: int, table: FrameTable) -> int:
    if node in (0, tree.without):
        return ROOT if node == 0 else WITHOUT
    return table.row(label_of(tree.runs[node]))


SORTS = ("bytes", "count", "per_call", "line", "-bytes", "-count", "-per_call", "-line")
MOST_ROWS = 500
DEFAULT_ROWS = 200

Row = TypeVar("Row", StackRow, LineRow)
Named = tuple[str, KindOfLine, Row]
"""A source line, the kind of its code, and what it, or a stack that it leads, allocated."""


class StackLine(TypedDict):
    """A stack."""

    line: str
    kind: KindOfLine
    """Its leading line, and the kind of that: as in `Frame`, or `none`."""
    bytes: int
    count: int
    """What it allocated."""
    per_call: float
    """Bytes of an allocation."""
    tensor: str | None
    """What lies in each; null where they differ or it is not known of all."""
    stack: list[int]
    forward: list[int]
    """Places in `frames`, innermost first: the stack, and that of the forward call whose backward this is."""


class StackTableAnswer(Whole):
    """What each stack allocated."""

    rows_found: int
    first: int
    """How many rows there are, and `first` as asked."""
    frames: list[Frame]
    """All frames of the rows."""
    rows: list[StackLine]
    """Those of this page."""


class SourceLine(TypedDict):
    """A source line."""

    line: str
    kind: KindOfLine
    """The line, and its kind: as in `Frame`, or `none`."""
    bytes: int
    count: int
    """What it allocated."""
    median: float
    """Of the sizes of its allocations."""


class LineTableAnswer(Whole):
    """What each source line allocated."""

    rows_found: int
    first: int
    """How many rows there are, and `first` as asked."""
    rows: list[SourceLine]
    """Those of this page."""


class RuleTableAnswer(Whole):
    """What the stacks allocated to which each rule applies."""

    rows: list[NamedSum]
    """In the order of the rules; what none matches is `unknown`, the last."""


def answer_table(session: Session, request: Request) -> StackTableAnswer:
    """Answer `stack_table` from the side file."""
    chosen, finder = _requested(session, request)
    stacks = chosen.stacks()
    rows = chosen.cached("named", lambda: _named(stacks))
    rows = [row for row in rows if not finder or finder.has(row[2].frames)]
    first, page = _page(request, rows, lambda row: row.bytes_per_call)
    table = FrameTable()
    shown = [_stack_shape(row, table) for row in page]
    return {
        **chosen.shape(stacks, matches_shape(stacks, finder)),
        "rows_found": len(rows),
        "first": first,
        "frames": table.shape(),
        "rows": shown,
    }


def answer_lines(session: Session, request: Request) -> LineTableAnswer:
    """Answer `line_table` from the side file."""
    chosen, finder = _requested(session, request)
    lines = chosen.cached("lines", lambda: _kinds(lines_of_rows(chosen.opened.trace, chosen.rows())))
    rows = [row for row in lines if not finder or finder.has((row[0],))]
    first, page = _page(request, rows, lambda row: row.median_bytes)
    return {
        **chosen.shape(chosen.stacks(), _total([row for _, _, row in rows]) if finder else None),
        "rows_found": len(rows),
        "first": first,
        "rows": [
            {
                "line": line[:LONGEST],
                "kind": kind,
                "bytes": row.bytes,
                "count": row.calls,
                "median": row.median_bytes,
            }
            for line, kind, row in page
        ],
    }


def answer_rules(session: Session, request: Request) -> RuleTableAnswer:
    """Answer `rule_table` from the side file."""
    chosen = allocated(request, session.opened(session.chosen(request)))
    stacks = chosen.stacks()
    parts = rule_parts(request.text("rules", ""), stacks)
    rows: list[NamedSum] = [{"key": part.key, "bytes": part.bytes, "count": part.count} for part in parts]
    return {**chosen.shape(stacks, None), "rows": rows}


def _requested(session: Session, request: Request) -> tuple[Allocated, Finder]:
    opened = session.opened(session.chosen(request))
    return allocated(request, opened), Finder(request.text("find", ""))


def _named(rows: Sequence[StackRow]) -> list[Named[StackRow]]:
    line, keys = lines_of([row.frames for row in rows])
    lines = [(key, kind_of_line(key)) for key in keys]
    return [(*lines[number], row) for number, row in zip(line.tolist(), rows, strict=True)]


def _kinds(rows: Sequence[LineRow]) -> list[Named[LineRow]]:
    return [(row.key, kind_of_line(row.key), row) for row in rows]


def _page(
    request: Request, rows: list[Named[Row]], per_call: Callable[[Row], float]
) -> tuple[int, list[Named[Row]]]:
    """Return where the page begins that a request asks for, and its sorted rows; equal rows keep their
    order.
    """
    sort = request.choice("sort", SORTS, "bytes")
    by = sort.removeprefix("-")
    keys: dict[str, Callable[[Named[Row]], Any]] = {
        "bytes": lambda row: row[2].bytes,
        "count": lambda row: row[2].calls,
        "per_call": lambda row: per_call(row[2]),
        "line": lambda row: row[0],
    }
    descending = sort.startswith("-") if by == "line" else not sort.startswith("-")
    ordered = sorted(rows, key=keys[by], reverse=descending)
    first = request.number("first", 0, 0)
    count = request.number("count", DEFAULT_ROWS, 1, MOST_ROWS)
    return first, ordered[first : first + count]


def _stack_shape(named: Named[StackRow], table: FrameTable) -> StackLine:
    line, kind, row = named
    return {
        "line": line[:LONGEST],
        "kind": kind,
        "bytes": row.bytes,
        "count": row.calls,
        "per_call": row.bytes_per_call,
        "tensor": row.tensor,
        "stack": table.rows(row.frames),
        "forward": table.rows(row.forward),
    }
