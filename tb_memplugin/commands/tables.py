"""Tables for people: one unit per table, and no text that could steer a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tb_memplugin.analysis.units import Unit
from tb_memplugin.exports.terminal import printable

__all__ = ("Unit", "console", "printable", "table")

LONGEST = 160
LEAST_WIDTH = 80
"""Columns for which tables are laid out on narrower terminals: there lines wrap, and no number is cut."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table: its first column is text, the others are numbers. Nothing in a row is markup."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=bool(number))
    for row in rows:
        drawn.add_row(*(Text(printable(cell, LONGEST)) for cell in row))
    return drawn


def console() -> Console:
    """Where tables go: stdout, without markup, highlighting or emoji codes."""
    found = Console(markup=False, highlight=False, emoji=False)
    found.width = max(found.width, LEAST_WIDTH)
    return found
