"""`tb-memplugin lines`: a source file with the bytes that its lines hold at the peak."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tb_memplugin.analysis.moments import Moment, peak
from tb_memplugin.analysis.source_lines import FileUse, LineUse, recorded_file, source_files, source_lines_of
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import PATH, SOURCE, json_option
from tb_memplugin.commands.ranges import Range, range_options
from tb_memplugin.commands.tables import LONGEST, Unit, console, printable, table
from tb_memplugin.errors import MemPluginError

MOST_SOURCE_BYTES = 16 << 20


@click.command("lines")
@click.argument("path", type=SOURCE)
@click.argument("source", type=PATH, required=False)
@click.option("--device", help="Name of a device. Default: the one with the highest peak.")
@click.option(
    "--context",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="How many lines of source to show around those that hold bytes.",
)
@range_options
@json_option("Print JSON, with sizes in bytes.")
@reading_options
def command(
    path: str,
    source: str | None,
    device: str | None,
    context: int,
    within: Range,
    as_json: bool,
    reading: Reading,
) -> None:
    """The lines of a source file with the bytes that they hold at the peak.

    SOURCE is a Python file on this machine, or the end of a recorded path. Without it, the recorded files are
    listed. PATH is a memory snapshot, a Kineto trace, a recorded window, or a recorded run's folder.
    """
    trace = open_trace(path, reading, device=device).trace
    moment = peak(trace, device, within=within.events(trace, device), largest=0)
    rows = trace.allocations.alive_at(moment.event, trace.device_row(moment.device))
    files = source_files(trace, rows)
    if source is None:
        _show_files(files, moment, as_json)
        return
    name = recorded_file([use.file for use in files], source)
    lines = source_lines_of(trace, rows, name)
    if as_json:
        document = _document(moment) | {"file": name, "lines": [asdict(line) for line in lines]}
        click.echo(json.dumps(document, indent=2))
    else:
        _show(moment, name, lines, _text(source), context)


def _document(moment: Moment) -> dict[str, Any]:
    return {"device": moment.device, "peak_bytes": moment.bytes}


def _show_files(files: Sequence[FileUse], moment: Moment, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_document(moment) | {"files": [asdict(use) for use in files]}, indent=2))
        return
    unit = Unit.for_bytes([moment.bytes])
    out = console()
    out.print(printable(f"{moment.device}: peak {unit.text(moment.bytes)}"))
    rows = [(use.file, unit.show(use.bytes), f"{use.count:,}") for use in files]
    out.print(table(("stacks through", unit.name, "blocks"), rows))


def _text(source: str) -> list[str]:
    """Return the lines of the file that the user named; none if it is not on this machine.

    Raises:
        MemPluginError: it cannot be read, or is too large for source code.
    """
    try:
        if not Path(source).is_file():
            return []
        with Path(source).open("rb") as stream:
            content = stream.read(MOST_SOURCE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise MemPluginError(
            "The source file cannot be read.", where=source, fix="Give a file that you can read."
        ) from error
    if len(content) > MOST_SOURCE_BYTES:
        raise MemPluginError("This is no source file: it is too large.", where=source, fix="Give a .py file.")
    return content.decode("utf-8", "replace").splitlines()


def _show(moment: Moment, file: str, lines: Sequence[LineUse], text: Sequence[str], context: int) -> None:
    out = console()
    unit = Unit.for_bytes([moment.bytes])
    inside = sum(line.bytes for line in lines)
    out.print(printable(f"{file}, at the peak of {moment.device}", LONGEST), soft_wrap=True)
    out.print(
        f"{unit.text(inside)} of {unit.text(moment.bytes)} pass through this file; "
        f"{unit.text(moment.bytes - inside)} do not",
        soft_wrap=True,
    )
    uses = {line.line: line for line in lines}
    width = max(len("line"), len(str(max(uses) + context)))
    out.print(f"{'line':>{width}} {unit.name:>10} {'through':>10}")
    for number in _numbers(uses, len(text), context):
        if number is None:
            out.print(f"{'…':>{width}}")
            continue
        use = uses.get(number)
        sizes = (
            [unit.show(size) if size else "" for size in (use.bytes, use.through_bytes)] if use else ["", ""]
        )
        code = text[number - 1] if 0 < number <= len(text) else ", ".join(use.functions) if use else ""
        row = f"{number:>{width}} {sizes[0]:>10} {sizes[1]:>10}  {code.expandtabs(4)}"
        out.print(printable(row.rstrip(), LONGEST), soft_wrap=True)
    missing = sum(line.line > len(text) for line in lines) if text else 0
    if missing:
        out.print(
            f"{missing:,} recorded lines are not in the file on this machine: it has another version.",
            soft_wrap=True,
        )
    elif not text:
        out.print("The file is not on this machine, so functions stand for its lines.", soft_wrap=True)


def _numbers(uses: dict[int, LineUse], count: int, context: int) -> Iterator[int | None]:
    """Yield the numbers of the lines to show, in order; None where lines are left out."""
    shown = {
        near
        for number in uses
        for near in range(number - context, number + context + 1)
        if near in uses or 0 < near <= count
    }
    before = None
    for number in sorted(shown):
        if before is not None and number > before + 1:
            yield None
        yield number
        before = number
