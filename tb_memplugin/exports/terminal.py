"""Text for a terminal: names that cannot control it, and a report of source lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tb_memplugin.analysis.units import size_text

if TYPE_CHECKING:
    from tb_memplugin.analysis.lines import LineReport, LineUse


def printable(text: str, most: int | None = None) -> str:
    """Escape characters that are not printable, and cut text longer than `most` characters."""
    clean = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return clean if most is None or len(clean) <= most else f"{clean[: most - 1]}…"


_LONGEST = 100
_COLUMNS = ("Mem", "Cumulative Mem", "Median", "Count", "Location")


def as_json(report: LineReport) -> str:
    """Return the whole report as one JSON object; sizes in bytes."""
    return json.dumps(asdict(report), indent=1)


def as_text(report: LineReport, top: int, *, by_thread: bool = False) -> str:
    """Return the totals and the largest lines as text.

    Args:
        top: how many lines each table shows; the others are joined in one row.
        by_thread: also show a table for each thread.
    """
    text = [
        f"Device: {report.device}",
        f"Max mem: {size_text(report.max_bytes)} ({report.max_bytes:,} bytes)",
        f"Total mem allocated: {size_text(report.total_allocated_bytes)} "
        f"({report.total_allocated_bytes:,} bytes)",
        *_table(report.lines, top),
    ]
    for thread in report.threads if by_thread else ():
        text += ["", f"Thread {printable(thread.name)}: {size_text(thread.bytes)} ({thread.bytes:,} bytes)"]
        text += _table(thread.lines, top)
    text += [f"note: {printable(note)}" for note in report.notes]
    return "\n".join(text) + "\n"


def _table(lines: Sequence[LineUse], top: int) -> Iterator[str]:
    rows = [_COLUMNS, *(_row(use) for use in lines[:top])]
    rest = lines[top:]
    if rest:
        count, cumulative = sum(use.count for use in rest), rest[-1].cumulative_bytes
        more = f"... {len(rest):,} more line{'s' if len(rest) > 1 else ''}"
        size = sum(use.bytes for use in rest)
        rows.append((size_text(size), size_text(cumulative), "", f"{count:,}", more))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for *numbers, location in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=True)]
        yield "  ".join([*cells, location])


def _row(use: LineUse) -> tuple[str, str, str, str, str]:
    numbers = size_text(use.bytes), size_text(use.cumulative_bytes), size_text(use.median_bytes)
    return (*numbers, f"{use.count:,}", _cut(printable(use.location)))


def _cut(location: str) -> str:
    """Cut a long location to its end, where locations differ."""
    return location if len(location) <= _LONGEST else f"...{location[3 - _LONGEST :]}"
