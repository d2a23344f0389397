"""`stack_table`, `line_table`, `rule_table`: what stacks, source lines and custom rules allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.lines import LineRow, lines_of_rows
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.analysis.stacks import StackRow
from tb_memplugin.server.allocated import Allocated, allocated
from tb_memplugin.server.frames import LONGEST, Finder, FrameTable, kind_of_line
from tb_memplugin.server.routes.stacks import matches_shape
from tb_memplugin.server.rule_search import rule_parts
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json

SORTS = ("bytes", "count", "per_call", "line", "-bytes", "-count", "-per_call", "-line")
MOST_ROWS = 500
DEFAULT_ROWS = 200

Row = TypeVar("Row")
Named = tuple[str, str, StackRow]
"""The leading line of a stack, the kind of its code, and the row."""


def answer(session: Session, request: Request) -> Json:
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
    page, window = _page(request, rows, keys)
    table = FrameTable()
    shown = [_stack_shape(row, table) for row in page]
    matches = matches_shape(stacks, finder)
    return {**chosen.shape(stacks), "found": matches, **window, "frames": table.shape(), "rows": shown}


def answer_lines(session: Session, request: Request) -> Json:
    """Answer `line_table` from the side file."""
    chosen, finder = _requested(session, request)
    lines = chosen.cached("lines", lambda: _kinds(lines_of_rows(chosen.opened.trace, chosen.rows())))
    rows = [row for row in lines if not finder or finder.has((row[0].key,))]
    keys: dict[str, Callable[[tuple[LineRow, str]], Any]] = {
        "bytes": lambda row: row[0].bytes,
        "count": lambda row: row[0].calls,
        "per_call": lambda row: row[0].median_bytes,
        "line": lambda row: row[0].key,
    }
    page, window = _page(request, rows, keys)
    total = {"bytes": sum(row.bytes for row, _ in rows), "count": sum(row.calls for row, _ in rows)}
    return {
        **chosen.shape(chosen.stacks()),
        "found": total if finder else None,
        **window,
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


def answer_rules(session: Session, request: Request) -> Json:
    """Answer `rule_table` from the side file."""
    chosen = allocated(request, session.opened(session.chosen(request)))
    stacks = chosen.stacks()
    parts: Sequence[Part] = rule_parts(request.text("rules", ""), stacks)
    shape = [{"key": part.key, "bytes": part.bytes, "count": part.count} for part in parts]
    return {**chosen.shape(stacks), "found": None, "rows": shape}


def _requested(session: Session, request: Request) -> tuple[Allocated, Finder]:
    opened = session.opened(session.chosen(request))
    return allocated(request, opened), Finder(request.text("find", ""))


def _named(rows: Sequence[StackRow]) -> list[Named]:
    line, keys = lines_of([row.frames for row in rows])
    lines = [(key, kind_of_line(key)) for key in keys]
    return [(*lines[number], row) for number, row in zip(line.tolist(), rows, strict=True)]


def _kinds(rows: Sequence[LineRow]) -> list[tuple[LineRow, str]]:
    return [(row, kind_of_line(row.key)) for row in rows]


def _page(request: Request, rows: list[Row], keys: dict[str, Callable[[Row], Any]]) -> tuple[list[Row], Json]:
    """Return the page of sorted rows that a request asks for; equal rows keep their order."""
    sort = request.choice("sort", SORTS, "bytes")
    by = sort.removeprefix("-")
    descending = sort.startswith("-") if by == "line" else not sort.startswith("-")
    ordered = sorted(rows, key=keys[by], reverse=descending)
    first = request.number("first", 0, 0)
    count = request.number("count", DEFAULT_ROWS, 1, MOST_ROWS)
    return ordered[first : first + count], {"rows_found": len(rows), "first": first}


def _stack_shape(named: Named, table: FrameTable) -> Json:
    line, kind, row = named
    return {
        "line": line[:LONGEST],
        "kind": kind,
        "bytes": row.bytes,
        "count": row.calls,
        "per_call": row.bytes_per_call,
        "stack": table.rows(row.frames),
        "forward": table.rows(row.forward),
    }
