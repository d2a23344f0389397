"""Tables for people: one unit per table, and no text that could steer a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from tb_memplugin.analysis.units import Unit
from tb_memplugin.exports.terminal import printable

__all__ = ("Unit", "console", "doing", "printable", "table")

LONGEST = 160
LEAST_WIDTH = 80
"""Columns for which tables are laid out on narrower terminals: there lines wrap, and no number is cut."""

MOST_LAID_OUT = 1_000
"""Rows that are laid out for the terminal's width: that takes almost a millisecond each."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """A table: its first column is text, the others are numbers. Nothing in a row is markup."""
    cells = [[printable(cell, LONGEST) for cell in row] for row in rows]
    if len(cells) > MOST_LAID_OUT:
        return _lines([list(columns), *cells])
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=bool(number))
    for row in cells:
        drawn.add_row(*map(Text, row))
    return drawn


def _lines(rows: Sequence[Sequence[str]]) -> Segments:
    """A long table: a line a row, however wide the terminal is."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))]
        for row in rows
    )
    return Segments(Segment("  ".join(line).rstrip() + "\n") for line in lines)


def console() -> Console:
    """Where tables go: stdout, without markup, highlighting or emoji codes."""
    found = Console(markup=False, highlight=False, emoji=False)
    found.width = max(found.width, LEAST_WIDTH)
    return found


@contextmanager
def doing() -> Iterator[Callable[[str], None]]:
    """Say on stderr what is being done now, by the function that is given, and wipe it when all is done.

    Where stderr is no terminal, nothing is said.
    """
    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not screen.is_terminal:
        yield lambda _: None
        return
    with screen.status("") as status:
        yield lambda what: status.update(Text(printable(what, screen.width - 4)))
