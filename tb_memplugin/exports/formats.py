"""The export formats by name, for the command's `--to` and the tab's Export."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.breakdown import By, codes
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.exports import csv, html, json, perfetto, snapshot, speedscope
from tb_memplugin.exports.report_data import Division
from tb_memplugin.trace import MemoryTrace

WORTH_SHOWING: tuple[By, ...] = ("category", "module", "phase", "annotation", "context", "line", "pool")
"""The default divisions of an HTML page; those that do not divide the trace are left out."""


@dataclass(frozen=True, slots=True)
class Format:
    """What a format is for, and the ending and content type of its files."""

    description: str
    ending: str
    """The ending of file names, with its dot."""

    content_type: str


FORMATS = {
    "html": Format("one page for any browser, offline", ".html", "text/html; charset=utf-8"),
    "speedscope": Format(
        "the peak as a flame graph, for speedscope.app", ".speedscope.json", "application/json"
    ),
    "perfetto": Format(
        "levels and ranges over time, for ui.perfetto.dev and chrome://tracing",
        ".perfetto.json",
        "application/json",
    ),
    "csv": Format("one row per allocation", ".csv", "text/csv; charset=utf-8"),
    "json": Format("the whole trace (docs/json_format.md)", ".json", "application/json"),
    "snapshot": Format(
        "PyTorch's own memory snapshot, for memory_viz and Mosaic", ".pickle", "application/octet-stream"
    ),
}


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
        trace: any trace.
        path: the file to write.
        title: the heading in `html` and `speedscope`.
        by: for `html`: what to color by; default: every division that applies.
        rules: for `html`: rules to color by as well, before all others.
        stacks: for `csv`: whether to write whole call stacks.

    Returns:
        Sentences about what had to be made up or left out.

    Raises:
        MemPluginError: the file cannot be written.
    """
    if format_ == "html":
        named = [Division(rules, "Rules")] if rules else []
        html.write(trace, path, named + _divisions_of(trace, by), title)
    elif format_ == "speedscope":
        speedscope.write(trace, path, title)
    elif format_ == "perfetto":
        perfetto.write(trace, path)
    elif format_ == "csv":
        csv.write(trace, path, stacks)
    elif format_ == "json":
        json.write(trace, path)
    else:
        return snapshot.write(trace, path)
    return ()


def _divisions_of(trace: MemoryTrace, by: Sequence[By]) -> list[Division]:
    """Return the requested divisions; if there are none, category and all others that divide this trace."""
    if not by:
        by = [name for name in WORTH_SHOWING if name == "category" or _divides(trace, name)]
    return [Division(name, name.capitalize()) for name in dict.fromkeys(by)]


def _divides(trace: MemoryTrace, by: By) -> bool:
    if (by == "annotation" and not trace.annotation_names) or (by == "context" and not trace.contexts):
        return False  # it would only separate blocks from before the window from those in it
    part, _ = codes(trace, by)
    return bool(len(part)) and bool(np.any(part != part[0]))
