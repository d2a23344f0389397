"""Checks of `tb-memplugin doctor`: whether a logdir has recordings that the Memory tab can show."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from tb_memplugin.analysis.units import counted
from tb_memplugin.commands.findings import Finding, fine, hint, problem
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.store import files
from tb_memplugin.store.health import unreadable_files
from tb_memplugin.store.paths import EVENT_FILE_END, SIDE_FOLDER
from tb_memplugin.store.reader import RecordedStep, Recordings, load_window, read_recordings

READ_SECONDS = 10
"""How many seconds to spend on reading side files completely; a large logdir has gigabytes of them."""

RECORD = "Record with torch.profiler.profile(profile_memory=True, on_trace_ready=memory_trace_handler(DIR))."


def check_logdir(logdir: str) -> Iterator[Finding]:
    """Check the folder, its event files, the recordings in them, and the side files that they name."""
    absent = _check_folder(logdir)
    if absent is not None:
        yield absent
        return
    names = [(folder, name) for folder, found in files.walk(logdir) for name in found]
    events = [(folder, name) for folder, name in names if "tfevents" in name]
    recordings = read_recordings(logdir)
    yield _check_events(logdir, names, events, recordings)
    if recordings.watched:
        count = sum(len(series.figures) for series in recordings.watched)
        yield fine(
            f"MemoryMonitor watched {counted(count, 'step')} of {counted(len(recordings.watched), 'worker')}"
        )
    yield from _check_neighbors(events)
    broken = _unreadable(logdir, recordings)
    for error in broken.values():
        yield problem(f"{error.where}: {error.what}", error.fix)
    yield from _check_side_files(recordings.steps, broken)
    yield from _check_access(logdir, recordings)


def _check_folder(logdir: str) -> Finding | None:
    if not files.exists(logdir):
        return problem(
            f"The folder {logdir} does not exist.",
            "Use the same folder here, in tensorboard --logdir and in memory_trace_handler.",
        )
    if files.is_remote(logdir):
        return None
    path = Path(logdir).resolve()
    if not path.is_dir():
        return problem(f"{logdir} is a file, not a folder.", f"Give the folder: {path.parent}")
    if path.as_posix().endswith(SIDE_FOLDER):
        return problem(f"{logdir} contains only side files.", f"Use the run's folder: {path.parents[2]}")
    if not os.access(path, os.R_OK | os.X_OK):
        return problem(f"This user cannot read {logdir}.", f"Run: chmod u+rx {path}")
    return None


def _check_events(
    logdir: str, names: list[tuple[str, str]], events: list[tuple[str, str]], recordings: Recordings
) -> Finding:
    if recordings.steps:
        workers = len({step.folder for step in recordings.steps})
        steps = counted(len(recordings.steps), "recorded step")
        return fine(f"{steps} of {counted(workers, 'worker')} in {logdir}")
    if recordings.watched:
        return fine(f"no step in {logdir} is recorded in full, but MemoryMonitor watched some")
    if any(name.endswith(EVENT_FILE_END) for _, name in events):
        return problem(
            "The event files of the recordings contain no step that can be read.",
            "See the files named below.",
        )
    if any(name.endswith(".mem") for _, name in names):
        return problem(
            "There are side files, but not the event files that belong to them.",
            "Copy whole run folders. If the process ended while it was writing, record again.",
        )
    if any(name.endswith((".pt.trace.json", ".pt.trace.json.gz")) for _, name in names):
        return problem(
            "There are profiler traces (tensorboard_trace_handler), but no memory recording.", RECORD
        )
    if events:
        return problem(f"There are {len(events)} event files, but none contains a memory recording.", RECORD)
    return problem(
        "There is no event file.",
        f"{RECORD} Is this the folder given to memory_trace_handler, or one above it?",
    )


def _check_neighbors(events: list[tuple[str, str]]) -> Iterator[Finding]:
    """Look for event files of other writers beside ours; TensorBoard's Python reader reads one at a time."""
    ours = {folder for folder, name in events if name.endswith(EVENT_FILE_END)}
    for folder in sorted({folder for folder, name in events if not name.endswith(EVENT_FILE_END)} & ours):
        fix = (
            "Give the other writer its own folder: without its fast data server, TensorBoard reads only "
            "the newest file."
        )
        yield hint(f"{folder} also contains another writer's event file.", fix)


def _unreadable(logdir: str, recordings: Recordings) -> dict[str, UnreadableFileError]:
    """Return the error of each file that a quick check finds to be unreadable, by its path."""
    errors = [*recordings.problems, *(() if files.is_remote(logdir) else unreadable_files(logdir))]
    return {error.where: error for error in errors}


def _check_side_files(steps: tuple[RecordedStep, ...], broken: Container[str]) -> Iterator[Finding]:
    paths = sorted({step.side_file for step in steps if step.side_file is not None})
    existing = {path for path in paths if files.exists(path)}
    missing = [path for path in paths if path not in existing]
    for path in missing[:10]:
        fix = "Copy the plugins/ folder together with the event files. Without it, the timeline is coarse."
        yield problem(f"The side file {path} is missing.", fix)
    if len(missing) > 10:
        yield problem(f"{len(missing) - 10} more side files are missing.", "See above.")
    yield from _check_content([path for path in reversed(paths) if path in existing and path not in broken])


def _check_content(paths: Sequence[str]) -> Iterator[Finding]:
    """Check that side files are complete by reading them to the end, as many as `READ_SECONDS` allow."""
    until, complete, read = time.monotonic() + READ_SECONDS, 0, 0
    for path in paths:
        read += 1
        try:
            load_window(path)
            complete += 1
        except UnreadableFileError as error:
            yield problem(f"{error.where}: {error.what}", error.fix)
        if time.monotonic() > until:
            break
    if complete:
        left = f"; {len(paths) - read} more were not read" if read < len(paths) else ""
        yield fine(f"{complete} side files are complete{left}")


def _check_access(logdir: str, recordings: Recordings) -> Iterator[Finding]:
    if files.is_remote(logdir) or os.access(logdir, os.W_OK):
        return
    text = f"This user cannot write to {logdir}."
    fix = "To record here, choose a folder that the training can write to."
    yield hint(text, fix) if recordings.steps else problem(text, fix)
