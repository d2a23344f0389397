"""Open what a PATH on the command line names: a file of any kind, or a recorded step of a folder."""

from __future__ import annotations

import functools
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tb_memplugin.commands.tables import printable, progress_bar, refusal
from tb_memplugin.errors import (
    PERMIT,
    MemPluginError,
    NoFileError,
    NotRecordedError,
    UnreadableFileError,
    fix_of,
)
from tb_memplugin.loading import load
from tb_memplugin.read.content import Progress
from tb_memplugin.store import files
from tb_memplugin.store.paths import readable
from tb_memplugin.trace import MemoryTrace, Note
from tb_memplugin.trace.notes import OTHER

if TYPE_CHECKING:
    from tb_memplugin.store.reader import RecordedStep, Recordings
    from tb_memplugin.trace.step_figures import WatchedSteps

PATH_HELP = (
    "a snapshot, a Kineto trace, a raw memory timeline, a recorded window, a recorded run's folder, or - for "
    "standard input"
)

DEVICE_TYPES = ("cuda", "xpu", "cpu", "mps", "mtia", "hpu", "npu", "musa", "mlu", "privateuseone")
"""Device types of PyTorch and its backends that count memory; `load` takes any other name, too."""

ABOUT = 0.95
"""What has so much of a peak has about that peak."""

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
        type=click.Choice(DEVICE_TYPES),
        default="cuda",
        show_default=True,
        help="Device type of a snapshot, which does not record it.",
    )
    return limit(device_type(with_reading))


def open_trace(
    path: str,
    reading: Reading,
    *,
    device: str | None = None,
    step: int | None = None,
    worker: str | None = None,
    choose: Callable[[Sequence[RecordedStep], str | None], RecordedStep] | None = None,
) -> Opened:
    """Read the trace in a file, or the window with the highest peak in the folder of a run or a logdir.

    Args:
        device, step, worker: in a folder, consider only recorded steps with these.
        choose: returns one of several steps, on a device if that is not None. Default: `highest`.

    Raises:
        MemPluginError: the path does not exist or cannot be read.
        NotRecordedError: the folder has no such recordings.
    """
    if files.is_folder(path):
        from tb_memplugin.store.reader import load_window  # only folders need TensorBoard

        steps = chosen_steps(path, step, device, worker)
        best = (choose or highest)(steps, device)
        print_others(steps, best.folder)
        if best.side_file is None:
            raise UnreadableFileError(
                "The step does not name a side file.", where=best.folder, fix="Record it again."
            )
        recorded = load_window(best.side_file, best.metadata)
        print_notes(recorded, best.folder)
        return Opened(recorded, best.folder)
    return Opened(load_file(path, reading), path)


def load_file(path: str, reading: Reading) -> MemoryTrace:
    """Read the trace in a file; print its notes to stderr and, on a terminal, a progress bar.

    Raises:
        MemPluginError: the file does not exist or cannot be read.
    """
    with progress_bar(printable(f"Reading {Path(path).name}", 36), of_files=False) as bar:
        trace = read_file(path, reading, bar and (lambda done, total: bar(completed=done, total=total)))
    print_notes(trace, path)
    return trace


def read_file(path: str, reading: Reading, progress: Progress | None = None) -> MemoryTrace:
    """Read the trace in a file; print nothing.

    Raises:
        MemPluginError: the file does not exist or cannot be read.
    """
    try:
        return load(path, device_type=reading.device_type, limit_bytes=reading.limit_bytes, progress=progress)
    except FileNotFoundError as error:
        raise MemPluginError(
            "This file or folder does not exist.", where=path or "''", fix=f"Give {PATH_HELP}."
        ) from error
    except NoFileError as error:
        message = f"This cannot be read: {error.strerror}."
        raise UnreadableFileError(message, where=path, fix="Save its content to a file first.") from error
    except OSError as error:
        why, fix = "The file cannot be read", PERMIT
        if files.is_remote(path):
            why, fix = "The file or its host cannot be reached", "Check the URL, and who may read it."
        message = f"{why}: {error.strerror or error}."
        raise UnreadableFileError(message, where=path, fix=fix_of(error, fix)) from error


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
    _print_notes(path, trace.notes)


def _print_notes(path: str, notes: Sequence[Note]) -> None:
    name = printable(Path(path).name, 80)
    for note in notes[:MOST_NOTES]:
        click.echo(f"note: {name}: {printable(note)}", err=True)
    if len(notes) > MOST_NOTES:
        click.echo(f"note: {name}: {len(notes) - MOST_NOTES:,} more notes.", err=True)


def print_shared_notes(files_notes: Sequence[tuple[str, Sequence[Note]]]) -> None:
    """Print to stderr the notes of several files: one that many have once, with their number.

    Notes are the same if they have the same code, because figures in their texts differ from file to file.
    """
    if len(files_notes) == 1:
        _print_notes(*files_notes[0])
        return
    first: dict[str, tuple[str, Note]] = {}
    counts: Counter[str] = Counter()
    for path, notes in files_notes:
        kinds = {note.code if note.code != OTHER else str(note): note for note in reversed(notes)}
        counts.update(kinds.keys())
        for kind, note in kinds.items():
            first.setdefault(kind, (path, note))
    for kind, (path, note) in first.items():
        more = f" ({counts[kind] - 1:,} more files have such a note.)" if counts[kind] > 1 else ""
        click.echo(f"note: {printable(Path(path).name, 80)}: {printable(note)}{more}", err=True)


def recordings_below(path: str) -> Recordings:
    """Return what is recorded below a folder. Files that cannot be read are warnings on stderr."""
    from tb_memplugin.store.reader import read_recordings

    recordings = read_recordings(path)
    for problem in recordings.problems:
        click.echo(refusal(problem, "warning"), err=True)
    return recordings


def chosen_steps(path: str, step: int | None, device: str | None, worker: str | None) -> list[RecordedStep]:
    """Return the recorded steps below a folder that match the options; there is at least one.

    Files that cannot be read are reported as warnings on stderr.

    Raises:
        NotRecordedError: no step matches; the message names the values that exist.
    """
    recordings = recordings_below(path)
    steps = list(recordings.steps)
    if not steps and recordings.watched:
        count = sum(len(series.figures) for series in recordings.watched)
        raise NotRecordedError(
            f"This folder has only MemoryMonitor figures, of {count:,} steps: no step was recorded in full.",
            where=path,
            fix=f"Write them as a table: tb-memplugin export {shlex.quote(path)} --to csv -o steps.csv  "
            f"or show them: tensorboard --logdir {shlex.quote(path)}",
        )
    if not steps:
        fix = f"Record one with memory_trace_handler, or find out why with: tb-memplugin doctor {path}"
        raise NotRecordedError("This folder has no memory recording.", where=path, fix=fix)
    if worker is not None:
        choices = sorted({entry.metadata.worker for entry in steps})
        steps = [entry for entry in steps if entry.metadata.worker == readable(worker)]
        _require(steps, f"Worker {worker!r}", choices, path)
    if step is not None:
        choices = [str(number) for number in sorted({entry.metadata.step for entry in steps})]
        steps = [entry for entry in steps if entry.metadata.step == step]
        _require(steps, f"Step {step}", choices, path)
    if device is not None:
        choices = sorted({name for entry in steps for name in peaks(entry)})
        steps = [entry for entry in steps if device in peaks(entry)]
        _require(steps, f"Device {device!r}", choices, path)
    return steps


def _require(steps: Sequence[RecordedStep], subject: str, choices: Sequence[str], path: str) -> None:
    if not steps:
        raise NotRecordedError(
            f"{subject} was not recorded.", where=path, fix=f"Choose one of: {', '.join(choices)}."
        )


def peaks(step: RecordedStep) -> dict[str, int]:
    """Return the peak of each device in a step, in bytes."""
    return {device.device: device.stats.peak_bytes for device in step.metadata.devices}


def highest(steps: Sequence[RecordedStep], device: str | None) -> RecordedStep:
    """Return the step with the highest peak on a device; without one, on any device."""
    return max(steps, key=lambda step: _peak(step, device))


def highest_or_dump(steps: Sequence[RecordedStep], device: str | None) -> RecordedStep:
    """Return the highest step, or what was written when a request of its worker failed.

    That says more, if it has about that peak. But it may name other modules, and is not for comparisons.
    """
    best = highest(steps, device)
    run, worker = best.folder.rpartition("/")[0], best.metadata.worker
    dumps = [
        step
        for step in steps
        if (step.folder.rpartition("/")[0], step.metadata.dump_of) == (run, worker)
        and _peak(step, device) >= ABOUT * _peak(best, device)
    ]
    return highest(dumps or [best], device)


def _peak(step: RecordedStep, device: str | None) -> int:
    return peaks(step)[device] if device else max(peaks(step).values(), default=-1)


def highest_watched(path: str, worker: str | None = None) -> WatchedSteps | None:
    """Return the steps that a monitor watched below a folder, of the worker with the highest peak, if any."""
    if not files.is_folder(path):
        return None
    from tb_memplugin.store.reader import read_recordings

    return max(
        (steps for steps in read_recordings(path).watched if worker in (None, steps.worker)),
        key=lambda steps: max((int(device.peak.max()) for device in steps.figures.devices), default=0),
        default=None,
    )


def print_others(steps: Sequence[RecordedStep], folder: str) -> None:
    """If there are several folders, say on stderr which one is shown, and name the others.

    The other names are relative to the folder that contains them all.
    """
    other_folders = sorted({other.folder for other in steps} - {folder})
    if other_folders:
        begin = os.path.commonprefix([folder, *other_folders])  # noqa: RUF071  # by character, as some are URLs
        above = begin.rpartition("/")[0].rstrip("/")
        shown = [printable(name[len(above) :].lstrip("/"), 80) for name in other_folders[:5]]
        names = ", ".join(shown) + (", …" if len(other_folders) > 5 else "")
        is_dump = any(step.metadata.dump_of for step in steps if step.folder == folder)
        why = "written when a request failed" if is_dump else "which has the highest peak"
        click.echo(
            f"Showing {printable(folder)}, {why}. To see another, give its folder, "
            f"below {printable(above or '/')}: {names}",
            err=True,
        )
