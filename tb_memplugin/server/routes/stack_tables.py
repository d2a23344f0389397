"""`stack_table`, `line_table`, `rule_table`: what stacks, source lines and custom rules allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

from tb_memplugin.analysis.lines import LineRow, lines_of_rows
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.analysis.stacks import StackRow
from tb_memplugin.server.allocated import Allocated, Whole, allocated
from tb_memplugin.server.frames import LONGEST, Finder, Frame, FrameTable, KindOfLine, kind_of_line
from tb_memplugin.server.routes.stacks import matches_shape
from tb_memplugin.server.rule_search import rule_parts
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import NamedSum, Sum

SORTS = ("bytes", "count", "per_call", "line", "-bytes", "-count", "-per_call", "-line")
MOST_ROWS = 500
DEFAULT_ROWS = 200

Row = TypeVar("Row")
Named = tuple[str, KindOfLine, StackRow]
"""The leading line of a stack, the kind of its code, and the row."""


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


def answer(session: Session, request: Request) -> StackTableAnswer:
    """Answer `stack_table` from the side file."""
    chosen, finder = _requested(session, request)
    stacks = chosen.stacks()
    rows = chosen.cached("named", lambda: _named(stacks))
    rows = [row for row in rows if not finder or finder.has(row[2].frames)]
    keys: dict[str, Callable[[Named], Any]] = {
        "bytes": lambda row: row[2].bytes,
        "count": lambda row: row[2].calls,
        "per_call": lambda row: row[2].bytes_per_call,
        "line": lambda row: row[0],
    }
    first, page = _page(request, rows, keys)
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
    rows = [row for row in lines if not finder or finder.has((row[0].key,))]
    keys: dict[str, Callable[[tuple[LineRow, KindOfLine]], Any]] = {
        "bytes": lambda row: row[0].bytes,
        "count": lambda row: row[0].calls,
        "per_call": lambda row: row[0].median_bytes,
        "line": lambda row: row[0].key,
    }
    first, page = _page(request, rows, keys)
    total: Sum = {"bytes": sum(row.bytes for row, _ in rows), "count": sum(row.calls for row, _ in rows)}
    return {
        **chosen.shape(chosen.stacks(), total if finder else None),
        "rows_found": len(rows),
        "first": first,
        "rows": [
            {
                "line": row.key[:LONGEST],
                "kind": kind,
                "bytes": row.bytes,
                "count": row.calls,
                "median": row.median_bytes,
            }
            for row, kind in page
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


def _named(rows: Sequence[StackRow]) -> list[Named]:
    line, keys = lines_of([row.frames for row in rows])
    lines = [(key, kind_of_line(key)) for key in keys]
    return [(*lines[number], row) for number, row in zip(line.tolist(), rows, strict=True)]


def _kinds(rows: Sequence[LineRow]) -> list[tuple[LineRow, KindOfLine]]:
    return [(row, kind_of_line(row.key)) for row in rows]


def _page(request: Request, rows: list[Row], keys: dict[str, Callable[[Row], Any]]) -> tuple[int, list[Row]]:
    """Return where the page begins that a request asks for, and its sorted rows; equal rows keep their
    order.
    """
    sort = request.choice("sort", SORTS, "bytes")
    by = sort.removeprefix("-")
    descending = sort.startswith("-") if by == "line" else not sort.startswith("-")
    ordered = sorted(rows, key=keys[by], reverse=descending)
    first = request.number("first", 0, 0)
    count = request.number("count", DEFAULT_ROWS, 1, MOST_ROWS)
    return first, ordered[first : first + count]


def _stack_shape(named: Named, table: FrameTable) -> StackLine:
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
