"""`tb-memplugin export`: a recording as a file that another program reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from tb_memplugin.analysis.breakdown import ALL_DIVISIONS, By, codes
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.tables import Unit, printable
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import csv, html, perfetto, snapshot, speedscope
from tb_memplugin.exports import json as json_
from tb_memplugin.exports.report_data import Division
from tb_memplugin.trace import MemoryTrace

FORMATS = {
    "html": "one page for any browser, offline",
    "speedscope": "the peak as a flame graph, for speedscope.app",
    "perfetto": "levels and ranges over time, for ui.perfetto.dev and chrome://tracing",
    "csv": "one row per allocation",
    "json": "the whole trace (docs/json_format.md)",
    "snapshot": "PyTorch's own memory snapshot, for memory_viz and Mosaic",
}

WORTH_SHOWING: tuple[By, ...] = ("category", "module", "phase", "annotation", "context", "line", "pool")
"""What a page can be coloured by, if not told: of these, those that divide anything."""


@click.command("export", epilog="Formats: " + "; ".join(f"{name}: {what}" for name, what in FORMATS.items()))
@click.argument("file")
@click.option("--to", "format_", type=click.Choice(list(FORMATS)), required=True, help="The format.")
@click.option("-o", "--output", required=True, help="The file to write; an older one is replaced.")
@click.option(
    "--by",
    type=click.Choice(ALL_DIVISIONS),
    multiple=True,
    help="html: what to colour by; may be given more than once. Default: all that divide anything.",
)
@click.option("--rules", multiple=True, help="html: also colour by name=regex, or by a JSON file of rules.")
@click.option(
    "--stacks/--no-stacks", default=True, help="csv: whole call stacks, which are most of the file."
)
@click.option("--json", "as_json", is_flag=True, help="Tell what was written in JSON, for programs.")
@reading_options
def command(
    file: str,
    format_: str,
    output: str,
    by: Sequence[By],
    rules: Sequence[str],
    stacks: bool,
    as_json: bool,
    reading: Reading,
) -> None:
    """Write a recording in another format.

    FILE is a memory snapshot, a Kineto trace, a raw memory timeline, a recorded window, or a recorded run's
    folder: then the window with the highest peak.
    """
    refuse_own_input(file, output)
    chosen = read_rules(rules) if rules else None
    trace = open_trace(file, reading).trace
    notes: tuple[str, ...] = ()
    if format_ == "html":
        divisions = [Division(chosen, "Rules")] if chosen else []
        html.write(trace, output, divisions + divisions_of(trace, by), Path(file).name)
    elif format_ == "csv":
        csv.write(trace, output, stacks)
    elif format_ == "json":
        json_.write(trace, output)
    elif format_ == "speedscope":
        speedscope.write(trace, output, Path(file).name)
    elif format_ == "perfetto":
        perfetto.write(trace, output)
    else:
        notes = snapshot.write(trace, output)
    tell(file, output, format_, as_json, notes)


def divisions_of(trace: MemoryTrace, by: Sequence[By]) -> list[Division]:
    """The divisions asked for; without any, those that divide this trace, and category in any case."""
    if not by:
        by = [name for name in WORTH_SHOWING if name == "category" or _divides(trace, name)]
    return [Division(name, name.capitalize()) for name in dict.fromkeys(by)]


def _divides(trace: MemoryTrace, by: By) -> bool:
    if (by == "annotation" and not trace.annotation_names) or (by == "context" and not trace.contexts):
        return False  # it would tell what was there before the window from what came, and no more
    part, _ = codes(trace, by)
    return bool(len(part)) and bool(np.any(part != part[0]))


def refuse_own_input(file: str, output: str) -> None:
    """A recording is not overwritten with what is made of it.

    Raises:
        MemPluginError: both are one file.
    """
    try:
        same = Path(output).samefile(file)
    except (OSError, ValueError):  # one of them is not there, or is no local file
        same = False
    if same:
        raise MemPluginError(
            "The output would replace the recording itself.", where=output, fix="Name another file with -o."
        )


def tell(file: str, output: str, format_: str, as_json: bool, notes: Sequence[str] = ()) -> None:
    """Say what was written, and what could not be written as it was."""
    written = Path(output)
    size = written.stat().st_size if written.is_file() else 0
    if as_json:
        document = {"source": file, "format": format_, "path": output, "bytes": size, "notes": list(notes)}
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(f"Wrote {printable(output)} ({Unit.for_bytes([size]).tell(size)}).", err=True)
    for note in notes:
        click.echo(f"note: {printable(note)}", err=True)
