"""Tables and errors for a terminal. Text in them cannot contain control sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from tb_memplugin.analysis.units import Unit
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.segment import Segments

__all__ = ("NOT_KNOWN", "Unit", "console", "doing", "percent", "printable", "show_table", "shown", "table")

NOT_KNOWN = "?"
"""What stands for a number that a file does not record."""

LONGEST = 160
LEAST_WIDTH = 80
"""Tables are at least this many columns wide; on a narrower terminal lines wrap, so no number is cut."""

GAP = "   "
"""What is between two columns of a table."""

MOST_LAID_OUT = 1_000
"""How many rows are fitted to the terminal's width at most; that takes almost a millisecond per row."""


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print what `table` returns. A small one of plain text looks the same without rich, which takes long."""
    cells = [list(columns), *([printable(cell, LONGEST) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    inner = sum(widths) + len(GAP) * (len(widths) - 1)
    is_plain = inner + 2 <= LEAST_WIDTH and all(cell.isascii() for row in cells for cell in row)
    if not is_plain or not (sys.stdout.encoding or "").lower().startswith("utf"):
        console().print(table(columns, cells[1:]))
        return
    head, *lines = (
        f" {GAP.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])} " for row in cells
    )
    for line in (" " * len(head), click.style(head, bold=True), f" {'─' * inner} ", *lines, " " * len(head)):
        click.echo(line)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Return a table whose first column is text and whose other columns are numbers; no cell has markup."""
    from rich import box  # rich is imported when something is drawn: errors and JSON need none of it
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(cell, LONGEST) for cell in row] for row in rows]
    every = [list(columns), *cells]
    if len(cells) > MOST_LAID_OUT or _least_width(every) > console().width:  # it would cut the numbers
        return _lines(every)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=bool(number))
    for row in cells:
        drawn.add_row(*map(Text, row))
    return drawn


def _least_width(rows: Sequence[Sequence[str]]) -> int:
    """Return how wide a table is whose first column is folded to eight characters."""
    return 8 + sum(3 + max(map(len, column)) for column in [*zip(*rows, strict=True)][1:])


def _lines(rows: Sequence[Sequence[str]]) -> Segments:
    """Return a long table with one line per row, whatever the terminal's width."""
    from rich.segment import Segment, Segments

    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))]
        for row in rows
    )
    return Segments(Segment("  ".join(line).rstrip() + "\n") for line in lines)


def shown(unit: Unit, size: int | None) -> str:
    """Return a size without its unit, or `NOT_KNOWN`."""
    return NOT_KNOWN if size is None else unit.show(size)


def percent(size: int, total: int) -> str:
    """Return a part of a whole in percent, without the sign: `12.3`."""
    return f"{100 * size / total:.1f}" if total else "0.0"


def console() -> Console:
    """Return a console that prints tables to stdout, without markup, highlighting or emoji codes."""
    from rich.console import Console

    screen = Console(markup=False, highlight=False, emoji=False)
    screen.width = max(screen.width, LEAST_WIDTH)
    screen.print = partial(screen.print, crop=False)  # type: ignore[method-assign]
    return screen


@contextmanager
def doing() -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done, and erase it at the end.

    The context manager returns a function that sets the text. If stderr is not a terminal, it does nothing.
    """
    from rich.console import Console
    from rich.text import Text

    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not screen.is_terminal:
        yield lambda _: None
        return
    with screen.status("") as status:
        yield lambda text: status.update(Text(printable(text, screen.width - 4)))


def the_command() -> str:
    """Return the command line, shortened: the place of an error that no file or option is known for."""
    return " ".join(sys.argv[1:])[:200]


def refusal(error: MemPluginError, level: str = "error") -> str:
    """Format an error, or a warning, in up to three lines: what, where, fix."""
    lines = [
        f"{level}: {error.what}",
        error.where and f"  where: {error.where}",
        error.fix and f"  fix: {error.fix}",
    ]
    return "\n".join(printable(line) for line in lines if line)


@contextmanager
def progress_bar(text: str, *, of_files: bool) -> Iterator[Callable[..., None] | None]:
    """Show a progress bar on stderr, of bytes or of files, and erase it at the end.

    The context manager returns `rich.progress.Progress.update` of its task; None if stderr is not a terminal.
    A bar of files starts no thread, so that processes can fork.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    of_what = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *(of_what if of_files else (progress.DownloadColumn(),)),
        progress.TimeRemainingColumn(),
    )
    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    with progress.Progress(*columns, console=screen, transient=True, auto_refresh=not of_files) as bar:
        yield partial(bar.update, bar.add_task(text), refresh=of_files)


def files_text(count: int) -> str:
    """Return a number of files in words: `1 file`, `1,024 files`."""
    return f"{count:,} file{'' if count == 1 else 's'}"
