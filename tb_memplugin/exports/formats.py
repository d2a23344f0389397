"""The export formats by name, for the command's `--to` and the tab's Export."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.exports import csv, html, json, perfetto, snapshot, speedscope
from tb_memplugin.trace import MemoryTrace


@dataclass(frozen=True, slots=True)
class Export:
    """What to write, and how. See `write_as`."""

    trace: MemoryTrace
    path: str | os.PathLike[str]
    title: str
    by: Sequence[By] = ()
    rules: Rules | None = None
    stacks: bool = True


@dataclass(frozen=True, slots=True)
class Format:
    """A format's name and use, the ending and content type of its files, and the function that writes one.

    The function returns sentences about what had to be made up or left out.
    """

    name: str
    description: str
    ending: str
    """The ending of file names, with its dot."""

    content_type: str
    write: Callable[[Export], Iterable[str] | None]


def _write_html(export: Export) -> None:
    named = [html.Division(export.rules, "Rules")] if export.rules else []
    html.write(export.trace, export.path, named + html.divisions_of(export.trace, export.by), export.title)


FORMATS = {
    "html": Format(
        "HTML report", "one page for any browser, offline", ".html", "text/html; charset=utf-8", _write_html
    ),
    "perfetto": Format(
        "Perfetto trace",
        "levels and ranges over time, for ui.perfetto.dev",
        ".perfetto.json",
        "application/json",
        lambda export: perfetto.write(export.trace, export.path),
    ),
    "speedscope": Format(
        "speedscope",
        "the peak as a flame graph, for speedscope.app",
        ".speedscope.json",
        "application/json",
        lambda export: speedscope.write(export.trace, export.path, export.title),
    ),
    "csv": Format(
        "CSV",
        "one row per allocation",
        ".csv",
        "text/csv; charset=utf-8",
        lambda export: csv.write(export.trace, export.path, export.stacks),
    ),
    "parquet": Format(
        "Parquet",
        "one row per allocation, for DuckDB and data frames",
        ".parquet",
        "application/vnd.apache.parquet",
        lambda export: csv.write_parquet(export.trace, export.path),
    ),
    "json": Format(
        "JSON",
        "the whole trace, for programs",
        ".json",
        "application/json",
        lambda export: json.write(export.trace, export.path),
    ),
    "snapshot": Format(
        "Snapshot pickle",
        "for pytorch.org/memory_viz and Mosaic",
        ".pickle",
        "application/octet-stream",
        lambda export: snapshot.write(export.trace, export.path),
    ),
}
"""Every format by its name."""


def write_as(
    format_: str,
    trace: MemoryTrace,
    path: str | os.PathLike[str],
    title: str,
    *,
    by: Sequence[By] = (),
    rules: Rules | None = None,
    stacks: bool = True,
) -> tuple[str, ...]:
    """Write a trace in a format.

    Args:
        format_: a name in `FORMATS`.
        by: for `html`: what to color by; default: every division that applies.
        rules: for `html`: rules to color by as well, before all others.

    Returns:
        Sentences about what had to be made up or left out.

    Raises:
        MemPluginError: the file cannot be written.
    """
    export = Export(trace, path, title, by, rules, stacks)
    return tuple(FORMATS[format_].write(export) or ())
