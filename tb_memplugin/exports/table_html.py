"""A table of results as HTML, for notebooks: sizes in one unit, with a bar for their share of the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import Any

from tb_memplugin.analysis.units import Unit
from tb_memplugin.exports.terminal import printable
from tb_memplugin.trace.result import AnalysisResult, plain

MOST_ROWS, MOST_CHARACTERS = 100, 120
"""How many rows of a table, and how many characters of a cell, are shown."""

# A notebook that is shown elsewhere drops style sheets, so each cell has its own style.
TEXT = "text-align:left;padding:1px 12px 1px 0"
NUMBER = "text-align:right;padding:1px 12px 1px 6px;font-variant-numeric:tabular-nums"
BAR = "background:linear-gradient(to right,rgba(70,130,180,.3) {share:.1f}%,transparent {share:.1f}%)"


def table_html(rows: Sequence[Any]) -> str:
    """Return results of one kind as a table, without what is empty in all, or a table itself.

    All text in it is escaped.
    """
    if not rows:
        return "<p>(nothing)</p>"
    names = [each.name for each in fields(rows[0]) if each.repr]
    values = {name: [getattr(row, name) for row in rows] for name in names}
    columns = [_column(name, column) for name, column in values.items() if any(map(_is_shown, column))]
    head = "".join(each[0] for each in columns)
    lines = ("".join(line) for line in zip(*(each[1:] for each in columns), strict=True))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = len(rows) - MOST_ROWS
    rest = f"<p>{more:,} more</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _column(name: str, values: Sequence[Any]) -> list[str]:
    """Return the cells of a column, its heading first."""
    heading, shown = name.replace("_", " "), values[:MOST_ROWS]
    if not name.endswith("bytes") or not all(isinstance(value, int | float | None) for value in values):
        cells = [
            f'<td style="{NUMBER if _is_number(value) else TEXT}">{_text(value, name)}</td>'
            for value in shown
        ]
        is_number = any(map(_is_number, shown))
        return [f'<th style="{NUMBER if is_number else TEXT}">{escape(heading)}</th>', *cells]
    sizes = [value for value in values if value is not None]
    unit, most = Unit.for_bytes(sizes), max(map(abs, sizes), default=0) or 1
    cells = ["<td></td>" if value is None else _size(value, unit, most) for value in shown]
    heading = f"{heading.removesuffix('bytes').strip()} {unit.name}".strip()
    return [f'<th style="{NUMBER}">{escape(heading)}</th>', *cells]


def _size(size: float, unit: Unit, most: float) -> str:
    style = f"{NUMBER};{BAR.format(share=100 * abs(size) / most)}"
    return f'<td style="{style}" title="{size:,} B">{unit.show(size)}</td>'


def _is_shown(value: Any) -> bool:
    """Return whether a value is one, or the frames of a stack."""
    if isinstance(value, tuple):
        return any(isinstance(each, str) for each in value)
    return value not in (None, "") and not isinstance(value, dict | AnalysisResult)


def _text(value: Any, name: str) -> str:
    if value is None:
        return ""
    if _is_number(value):
        return f"{value:#x}" if name == "address" else f"{value:,}"
    told = plain(value)
    text = " ← ".join(told) if isinstance(told, list) else str(told)
    return escape(printable(text, MOST_CHARACTERS))


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
