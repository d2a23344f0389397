"""`tb-memplugin export`: write a recording in a format that another program reads."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import click
import numpy as np

from tb_memplugin.analysis.divisions import ALL_DIVISIONS, By
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.analysis.units import size_text
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import PATH, SOURCE, json_option, output_option
from tb_memplugin.commands.tables import printable
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.exports import monitored_steps
from tb_memplugin.exports.formats import FORMATS, write_as
from tb_memplugin.exports.output import STDOUT, cannot_write, replacing
from tb_memplugin.exports.perfetto import ROWS_AT_ONCE, counters
from tb_memplugin.read.kineto.insertion import KinetoText, read_text
from tb_memplugin.store import files
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.step_figures import WatchedSteps

_FORMATS = "; ".join(f"{name}: {format_.description}" for name, format_ in FORMATS.items())


@click.command("export", epilog=f"Formats: {_FORMATS}")
@click.argument("file", type=SOURCE)
@click.option("--to", "format_", type=click.Choice(list(FORMATS)), required=True, help="The format.")
@output_option
@click.option(
    "--by",
    type=click.Choice(ALL_DIVISIONS),
    multiple=True,
    help="html: what to color by; may be given several times. Default: every division that applies.",
)
@click.option(
    "--rules",
    type=PATH,
    metavar="TEXT",
    multiple=True,
    help="html: also color by name=regex, or by a JSON file of rules.",
)
@click.option(
    "--stacks/--no-stacks", default=True, help="csv: write whole call stacks, which are most of the file."
)
@click.option(
    "--add-to",
    type=PATH,
    metavar="TRACE",
    help="perfetto: write this Kineto trace with the memory counters added. Its own events stay as they are.",
)
@json_option("Print what was written as JSON.")
@reading_options
def command(
    file: str,
    format_: str,
    output: str,
    by: Sequence[By],
    rules: Sequence[str],
    stacks: bool,
    add_to: str | None,
    as_json: bool,
    reading: Reading,
) -> None:
    """Write a recording in another format.

    FILE is a memory snapshot, a Kineto trace, a raw memory timeline, a recorded window, or a recorded run's
    folder. For a folder, the window with the highest peak is taken. If MemoryMonitor alone recorded it, csv
    and json have the figures of every step.
    """
    refuse_own_input(file, output)
    _refuse_unused(format_, by=bool(by), rules=bool(rules), no_stacks=not stacks, add_to=add_to is not None)
    chosen = read_rules(rules) if rules else None
    try:
        trace = open_trace(file, reading).trace
    except NotRecordedError:
        watched = read_recordings(file).watched
        if not watched:
            raise
        notes = _write_watched(watched, file, format_, output)
    else:
        if add_to is not None:
            refuse_own_input(add_to, output)
            notes = tuple(write_into(trace, _kineto(add_to, reading), output))
        else:
            notes = write_as(format_, trace, output, Path(file).name, by=by, rules=chosen, stacks=stacks)
    report_written(file, output, format_, as_json, notes)


def _kineto(path: str, reading: Reading) -> KinetoText:
    """Read the trace to which counters are added."""
    try:
        with files.open_ranges(path) as (read, size):
            return read_text(read(0, size), path, reading.limit_bytes)
    except OSError as error:
        message = f"The trace cannot be read: {error.strerror or error}."
        raise MemPluginError(message, where=path, fix="Give a Kineto trace, *.pt.trace.json.") from error


def _refuse_unused(format_: str, *, by: bool, rules: bool, no_stacks: bool, add_to: bool) -> None:
    """Refuse options that another format has."""
    options = {
        "--by": (by, "html"),
        "--rules": (rules, "html"),
        "--no-stacks": (no_stacks, "csv"),
        "--add-to": (add_to, "perfetto"),
    }
    for option, (is_given, its_format) in options.items():
        if is_given and format_ != its_format:
            raise MemPluginError(
                f"{option} changes nothing in {format_}.",
                where=option,
                fix=f"Leave it out, or use --to {its_format}.",
            )


def _write_watched(
    watched: Sequence[WatchedSteps], folder: str, format_: str, output: str
) -> tuple[str, ...]:
    """Write the figures that monitors recorded. Return what they say is missing.

    Raises:
        MemPluginError: the format needs single allocations, or the file cannot be written.
    """
    if format_ not in ("csv", "json"):
        raise MemPluginError(
            f"{format_} needs single allocations, but MemoryMonitor alone recorded here.",
            where=folder,
            fix=f"Choose --to csv or --to json, or run: tensorboard --logdir {shlex.quote(folder)}",
        )
    write = monitored_steps.write_csv if format_ == "csv" else monitored_steps.write_json
    write(watched, output)
    return tuple(f"{worker.worker}: {note}" for worker in watched for note in worker.figures.notes)


def refuse_own_input(file: str, output: str) -> None:
    """Refuse to overwrite a recording with what is made from it.

    Raises:
        MemPluginError: input and output are the same file, or the file system does not tell.
    """
    try:
        same = Path(output).samefile(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # one of them is no local file
        same = False
    except OSError as error:
        raise cannot_write(output, error) from error
    if same:
        raise MemPluginError(
            "The output would replace the recording itself.", where=output, fix="Give another file with -o."
        )


def report_written(file: str, output: str, format_: str, as_json: bool, notes: Sequence[str] = ()) -> None:
    """Print what was written, and notes about what the format cannot express; if it is stdout, to stderr."""
    is_stdout, size = output == STDOUT, None
    if not is_stdout:
        with suppress(OSError):  # the file is written, whatever the file system says of it now
            size = Path(output).stat().st_size if Path(output).is_file() else None
    if as_json:
        document = {"source": file, "format": format_, "path": output, "bytes": size, "notes": list(notes)}
        click.echo(json.dumps(document, indent=2), err=is_stdout)
        return
    if size is not None:
        click.echo(f"Wrote {printable(output)} ({size_text(size)}).", err=True)
    for note in notes:
        click.echo(f"note: {printable(note)}", err=True)


def write_into(trace: MemoryTrace, kineto: KinetoText, path: str | os.PathLike[str]) -> Iterator[str]:
    """Write a Kineto trace with the memory counters of a recording in it, packed if the path ends in `.gz`.

    Its own events stay as they are. The counters are processes of their own, `memory of cuda:0`. Yields a
    sentence on how exactly the times of both agree.

    Raises:
        MemPluginError: the recording has no times, or none of the trace's; or the file cannot be written.
    """
    start, end = trace.first_time_ns, int(trace.events.time_ns[-1]) if len(trace.events) else 0
    if not trace.times_are_known:
        raise MemPluginError(
            "The recording has no times.", where=trace.source, fix="Record it with PyTorch 2.2 or newer."
        )
    if end < kineto.first_ns or start > kineto.last_ns:
        raise MemPluginError(
            f"The recording ({_clock(start)} to {_clock(end)}) and the trace ({_clock(kineto.first_ns)} to "
            f"{_clock(kineto.last_ns)}) have no time in common.",
            where=trace.source,
            fix="Give the trace and the recording of the same run.",
        )
    with replacing(path) as stream:
        if os.fspath(path).endswith(".gz"):
            with gzip.GzipFile(fileobj=stream, mode="wb", filename="", mtime=0) as packed:
                _write_merged(trace, kineto, packed)
        else:
            _write_merged(trace, kineto, stream)
    yield _agreement(trace, kineto)


def _write_merged(trace: MemoryTrace, kineto: KinetoText, stream: BinaryIO | gzip.GzipFile) -> None:
    records = counters(trace, kineto.free_pid, kineto.base_ns)
    stream.write(kineto.content[: kineto.begin])
    stream.write(b"\n" + next(records).encode("ascii"))
    while chunk := list(islice(records, ROWS_AT_ONCE)):
        stream.write("".join(f",\n{record}" for record in chunk).encode("ascii"))
    stream.write(b"," * kineto.has_events)
    stream.write(kineto.content[kineto.begin :])


def _agreement(trace: MemoryTrace, kineto: KinetoText) -> str:
    """Say how many allocations and frees of the recording the trace has, at the same nanosecond."""
    own = np.flatnonzero(np.isin(trace.events.kind, (Kind.ALLOC, Kind.FREE_COMPLETED)))
    time, address = trace.events.time_ns[own], trace.events.address[own]
    inside = (time >= kineto.first_ns) & (time <= kineto.last_ns)
    theirs = set(zip(kineto.memory_ns.tolist(), kineto.memory_address.tolist(), strict=True))
    pairs = zip(time[inside].tolist(), address[inside].tolist(), strict=True)
    if not theirs:
        return "The trace has no memory events (profile_memory=True) that could show how exactly times agree."
    common, count = sum(pair in theirs for pair in pairs), int(np.count_nonzero(inside))
    return (
        f"{common:,} of the {count:,} allocations and frees that the recording has in the time of the trace "
        "are memory events in it, at the same nanosecond."
    )


def _clock(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
