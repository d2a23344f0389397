"""Open what a PATH on the command line names: a file of any kind that can be read, or a recorded run."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tb_memplugin.commands.choosing import chosen_steps, highest, print_others
from tb_memplugin.commands.tables import printable
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.loading import load
from tb_memplugin.store import files
from tb_memplugin.store.reader import load_window
from tb_memplugin.trace import MemoryTrace

PATH_HELP = "a snapshot, a Kineto trace, a raw memory timeline, a recorded window, or a recorded run's folder"

MOST_NOTES = 10
"""How many notes of a trace are printed; of further notes only the number is."""

_OPENED = "tb_memplugin.opened"
"""Key in the click context under which a command keeps (path, source) of each trace that it opened."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read files: the most bytes that an unpacked file may have, and the device type of snapshots."""

    limit_bytes: int | None = None
    device_type: str = "cuda"


@dataclass(frozen=True, slots=True)
class Opened:
    """A trace and the file or folder from which it was read."""

    trace: MemoryTrace
    source: str


def reading_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for reading files to a command, which receives them as `reading`."""

    @functools.wraps(command)
    def with_reading(*args: Any, limit_bytes: int | None, device_type: str, **options: Any) -> None:
        command(*args, reading=Reading(limit_bytes, device_type), **options)

    limit = click.option(
        "--limit-bytes",
        type=click.IntRange(min=1),
        help=(
            "Maximum size of an unpacked file, in bytes. Default: TB_MEMPLUGIN_LIMIT_BYTES, else a "
            "quarter of the memory."
        ),
    )
    device_type = click.option(
        "--device-type",
        default="cuda",
        show_default=True,
        help="Device type of a snapshot, which does not record it: cuda, xpu, …",
    )
    return limit(device_type(with_reading))


def open_trace(
    path: str,
    reading: Reading,
    *,
    device: str | None = None,
    step: int | None = None,
    worker: str | None = None,
) -> Opened:
    """Read the trace in a file, or the window with the highest peak in the folder of a run or a logdir.

    Args:
        path: a file that `load` reads, or a folder.
        reading: how to read it.
        device, step, worker: in a folder, consider only recorded steps with these.

    Raises:
        MemPluginError: the path does not exist or cannot be read.
        NotRecordedError: the folder has no such recordings.
    """
    if files.is_folder(path):
        steps = chosen_steps(path, step, device, worker)
        best = highest(steps, device)
        print_others(steps, best.folder)
        if best.side_file is None:
            raise UnreadableFileError(
                "The step does not name a side file.", where=best.folder, fix="Record it again."
            )
        recorded = load_window(best.side_file, best.metadata.epoch_ns)
        print_notes(recorded, best.folder)
        return Opened(recorded, best.folder)
    return Opened(load_file(path, reading), path)


def load_file(path: str, reading: Reading) -> MemoryTrace:
    """Read the trace in a file; print its notes to stderr and, on a terminal, a progress bar.

    Raises:
        MemPluginError: the file does not exist or cannot be read.
    """
    try:
        with _progress(path) as progress:
            trace = load(
                path, device_type=reading.device_type, limit_bytes=reading.limit_bytes, progress=progress
            )
    except (FileNotFoundError, IsADirectoryError) as error:  # the latter for "", which `is_folder` denies
        raise MemPluginError(
            "This file or folder does not exist.", where=path or "''", fix=f"Give {PATH_HELP}."
        ) from error
    except io.UnsupportedOperation as error:
        raise UnreadableFileError(
            "A pipe cannot be read: the file must be seekable.", where=path, fix="Save it to a file first."
        ) from error
    except OSError as error:
        raise UnreadableFileError(
            f"The file cannot be read: {error.strerror or error}.",
            where=path,
            fix="Give this user permission to read it.",
        ) from error
    print_notes(trace, path)
    return trace


def naming_files(error: MemPluginError, context: click.Context) -> MemPluginError:
    """Return the error with the paths of the opened files in place of a trace's source, if it names one."""
    opened: list[tuple[str, str]] = context.meta.get(_OPENED, [])
    paths = [path for path, source in opened if source == error.where]
    if ", ".join(source for _, source in opened) == error.where:
        paths = [path for path, _ in opened]
    return type(error)(error.what, where=", ".join(dict.fromkeys(paths)) or error.where, fix=error.fix)


def print_notes(trace: MemoryTrace, path: str) -> None:
    """Print to stderr the notes of a trace: what in it is contradictory, not exact or not known.

    It also stores the trace's path in the click context, for `naming_files`.
    """
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta.setdefault(_OPENED, []).append((path, trace.source))
    name = printable(Path(path).name, 80)
    for note in trace.notes[:MOST_NOTES]:
        click.echo(f"note: {name}: {printable(note)}", err=True)
    if len(trace.notes) > MOST_NOTES:
        click.echo(f"note: {name}: {len(trace.notes) - MOST_NOTES:,} more notes.", err=True)


@contextmanager
def _progress(path: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr until the block ends; if stderr is not a terminal, show nothing."""
    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not screen.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(printable(f"Reading {Path(path).name}", 36))
        yield lambda done, total: bar.update(task, completed=done, total=total)
