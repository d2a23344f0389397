"""Checks of `tb-memplugin doctor`: whether a logdir has recordings that the Memory tab can show."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tb_memplugin.analysis.account import AccountLevel, AccountLine, account_line
from tb_memplugin.analysis.units import counted
from tb_memplugin.analysis.whole_device import whole_line
from tb_memplugin.commands.doctor_findings import Finding, fine, hint, problem
from tb_memplugin.errors import UnreadableFileError, fix_of
from tb_memplugin.proto.recording_pb2 import StepMetadata
from tb_memplugin.store import files
from tb_memplugin.store.health import unreadable_files
from tb_memplugin.store.paths import CLAIM, EVENT_FILE_END, SIDE_FOLDER, is_side_file_name
from tb_memplugin.store.reader import (
    RecordedStep,
    Recordings,
    load_window,
    read_recordings,
    recorded_accounts,
    recorded_whole,
)
from tb_memplugin.store.repair import repair
from tb_memplugin.trace import DevicePart, WholeDevice

READ_SECONDS = 10
"""How many seconds to spend on reading side files completely; a large logdir has gigabytes of them."""

RECORD = "Record with torch.profiler.profile(profile_memory=True, on_trace_ready=memory_trace_handler(DIR))."

_WORST_FIRST: tuple[AccountLevel, ...] = ("different", "not_known", "not_recorded", "simulated", "exact")
_COMPLETE = (
    "Of the CPU, record with TB_MEMPLUGIN_EXACT_CPU=1, which counts every call of its allocator; of a GPU, "
    "with snapshot=True, which records all threads."
)
_BY_PROCESS = (
    "To know what is CUDA's context and what other processes have, install nvidia-ml-py where you record."
)

SNAPSHOTS = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
TRACES = ("trace.json", "trace.json.gz")
TIMELINES = (".raw.json", ".raw.json.gz")
"""Usual endings of files that `tb-memplugin import` reads."""


def check_logdir(logdir: str) -> Iterator[Finding]:
    """Check the folder, its event files, the recordings in them, and the side files that they name."""
    absent = _check_folder(logdir)
    if absent is not None:
        yield absent
        return
    recordings = read_recordings(logdir)  # refuses what is no logdir, such as /
    unlisted: list[OSError] = []
    walked = files.walk(logdir, unlisted.append)
    names = [(folder, name) for folder, in_folder in walked for name in in_folder]
    closed = [] if files.is_remote(logdir) else [str(error.filename) for error in unlisted]
    for folder in closed:
        yield problem(f"This user cannot read the folder {folder}.", _allow(folder))
    events = [(folder, name) for folder, name in names if "tfevents" in name]
    without = _without_event_file(names, events)
    if without:
        others = f" and {counted(len(without) - 1, 'more folder')}" if len(without) > 1 else ""
        yield problem(
            f"There are side files, but not the event files that belong to them: {without[0]}{others}.",
            "Copy whole run folders, or make new event files from the side files: "
            f"tb-memplugin doctor --repair {shlex.quote(logdir)}",
        )
    if recordings.steps or recordings.watched or not (without or (closed and not names)):
        yield _check_events(logdir, names, events, recordings)
    if recordings.watched:
        count = sum(len(series.figures) for series in recordings.watched)
        yield fine(
            f"MemoryMonitor watched {counted(count, 'step')} of {counted(len(recordings.watched), 'worker')}"
        )
    yield from _check_neighbors(events)
    yield from _check_claims(names, events)
    errors = [
        *recordings.problems,
        *(() if files.is_remote(logdir) else unreadable_files(logdir, sys.maxsize)),
    ]
    # A file that two checks name is told once.
    broken = {error.where: error for error in errors if error.where not in closed}
    for error in broken.values():
        yield problem(f"{error.where}: {error.what}", error.fix)
    yield from _check_side_files(_side_files(recordings.steps, closed), broken)
    yield from _check_accounts(recordings.steps)
    yield from _check_whole_devices(recordings.steps)
    yield from _check_access(logdir, recordings)


def repaired(logdir: str) -> Iterator[Finding]:
    """Save what is intact of damaged recordings, and report what was saved."""
    if files.is_remote(logdir):
        yield problem(f"{logdir} is not on this machine.", "Copy it here, and repair the copy.")
        return
    for done in repair(logdir):
        if done.failed is not None:
            path = done.failed.filename
            of_file = f" ({path})" if path and path != done.folder else ""
            text = f"{done.folder} was not repaired: {done.failed.strerror or done.failed}{of_file}."
            yield problem(text, fix_of(done.failed, "Let this user write there, and repair it again."))
        elif done.waits:
            text = f"{done.folder} is damaged, but the process that writes it may still run."
            yield hint(text, "Repair it when that process has ended.")
        else:
            saved = f"{counted(done.records, 'record')} and {counted(done.steps, 'step')} of side files"
            kept = f"; the damaged files are now {', '.join(done.kept)}" if done.kept else ""
            yield fine(f"{done.folder}: {saved} were saved in new event files{kept}")


def _check_folder(logdir: str) -> Finding | None:
    try:
        is_there = files.exists(logdir) and (files.is_remote(logdir) or Path(logdir).exists())  # a link's end
    except OSError as error:
        return problem(f"This user cannot read {logdir}: {error.strerror or error}.", _allow(logdir))
    if not is_there:
        return problem(
            f"The folder {shlex.quote(logdir)} does not exist.",
            "Use the same folder here, in tensorboard --logdir and in memory_trace_handler. The handler "
            "creates it when the first window ends: does the loop call profiler.step(), and reach the steps "
            "that the schedule records?",
        )
    if files.is_remote(logdir):
        return None
    path = Path(os.path.realpath(logdir))
    worker = next((above for above in path.parents if _is_side_path(path, above)), None)
    if worker is not None:
        state = "contains only side files" if path.is_dir() else "is a side file"
        return problem(f"{logdir} {state}.", f"Use the run's folder: {worker.parent}")
    if not path.is_dir():
        if path.name.endswith((*SNAPSHOTS, *TRACES, *TIMELINES)):
            fix = f"Import it: {_import([logdir], 'LOGDIR')}"
            return problem(f"{logdir} is a file, not a folder.", fix)
        return problem(f"{logdir} is a file, not a folder.", f"Give the folder: {path.parent}")
    if not os.access(path, os.R_OK | os.X_OK):
        return problem(f"This user cannot read {logdir}.", _allow(str(path)))
    return None


def _is_side_path(path: Path, worker: Path) -> bool:
    """Whether a path is in a worker's folder of side files, or above it in the worker's folder."""
    side = worker / SIDE_FOLDER
    return side.is_dir() and (path == side.parent or path == side or side in path.parents)


def _allow(path: str) -> str:
    return f"Give the user who runs TensorBoard permission: chmod -R a+rX {shlex.quote(path)}"


def _import(paths: Sequence[str], logdir: str) -> str:
    named = " ".join([*map(shlex.quote, paths[:3]), *(["..."] if len(paths) > 3 else [])])
    return f"tb-memplugin import {named} --logdir {shlex.quote(logdir)}"


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
    return _check_importable(logdir, names) or _nothing_recorded(len(events))


def _without_event_file(names: list[tuple[str, str]], events: list[tuple[str, str]]) -> list[str]:
    """Return the workers' folders that have side files and no event file of ours."""
    written = {folder.replace("\\", "/") for folder, name in events if name.endswith(EVENT_FILE_END)}
    sides = {side.replace("\\", "/") for side, name in names if is_side_file_name(name)}
    folders = {side.removesuffix(f"/{SIDE_FOLDER}") for side in sides if side.endswith(f"/{SIDE_FOLDER}")}
    return sorted(folders - written)


def _check_importable(logdir: str, names: list[tuple[str, str]]) -> Finding | None:
    """Look for files that could be imported; None if there are none."""
    for description, endings, condition in (
        ("look like memory snapshots", SNAPSHOTS, ""),
        ("look like memory timelines", TIMELINES, ""),
        ("are profiler traces", TRACES, " if they were recorded with profile_memory=True"),
    ):
        paths = [files.join(folder, name) for folder, name in names if name.endswith(endings)]
        if paths:
            text = f"There is no recording, but there are files that {description}, such as {paths[0]}."
            return problem(text, f"Import them{condition}: {_import(paths, logdir)}")
    return None


def _nothing_recorded(event_files: int) -> Finding:
    if event_files:
        return problem(
            f"There is no recording, only {counted(event_files, 'event file')} with other data.", RECORD
        )
    return problem(
        "There is no event file.",
        f"{RECORD} If you did: is this the folder given to memory_trace_handler, or one above it? Did the "
        "training reach the steps that the profiler's schedule records?",
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


def _check_claims(names: list[tuple[str, str]], events: list[tuple[str, str]]) -> Iterator[Finding]:
    """Look for folders that a process claimed and has written nothing to: it was killed, or is about to."""
    written = {folder for folder, _ in events}
    used = {folder for folder, name in names if name != CLAIM}
    for side, name in names:
        folder = side.replace("\\", "/").removesuffix(f"/{SIDE_FOLDER}")
        if side in used or folder in used:
            continue  # what is there may be worth keeping
        if name == CLAIM and folder != side.replace("\\", "/") and folder not in written:
            text = f"{folder} belongs to a process that has written no step."
            fix = (
                "If it is still running, nothing. If an import was interrupted, import the file again. Else "
                f"the folder can be deleted: rm -r {shlex.quote(folder)}"
            )
            yield hint(text, fix)


def _side_files(steps: tuple[RecordedStep, ...], closed: list[str]) -> dict[str, StepMetadata]:
    """Return the side files that steps name, without those in closed folders, and a step of each window."""
    named = {step.side_file: step.metadata for step in steps if step.side_file is not None}
    return {
        path: step
        for path, step in sorted(named.items())
        if not any(path.startswith(f"{folder}/") for folder in closed)
    }


def _check_side_files(paths: dict[str, StepMetadata], broken: Container[str]) -> Iterator[Finding]:
    missing = [path for path in paths if _is_missing(path)]
    existing = paths.keys() - missing
    for path in missing[:10]:
        fix = "Copy the plugins/ folder together with the event files. Without it, the timeline is coarse."
        yield problem(f"The side file {path} is missing.", fix)
    if len(missing) > 10:
        yield problem(f"{len(missing) - 10} more side files are missing.", "See above.")
    complete = (path for path in reversed(paths) if path in existing and path not in broken)
    yield from _check_content({path: paths[path] for path in complete})


def _is_missing(path: str) -> bool:
    """Whether a file is known not to exist; where that is not known, reading it tells why."""
    try:
        return not files.exists(path)
    except OSError:
        return False


def _check_content(paths: Mapping[str, StepMetadata]) -> Iterator[Finding]:
    """Check that side files are complete by reading them to the end, as many as `READ_SECONDS` allow."""
    until, complete, read = time.monotonic() + READ_SECONDS, 0, 0
    for path, step in paths.items():
        read += 1
        try:
            load_window(path, step)
            complete += 1
        except UnreadableFileError as error:
            yield problem(f"{error.where}: {error.what}", error.fix)
        if time.monotonic() > until:
            break
    if complete:
        left = f"; {len(paths) - read} more were not read" if read < len(paths) else ""
        yield fine(f"{counted(complete, 'side file')} complete{left}")


def _check_accounts(steps: Sequence[RecordedStep]) -> Iterator[Finding]:
    """Report for each worker and device the worst account of its windows."""
    windows = {(step.folder, step.metadata.window): step for step in steps}
    lines: dict[tuple[str, str], list[AccountLine]] = {}
    for (folder, _), step in windows.items():
        with suppress(UnreadableFileError):  # the errors of files are findings already
            for device in step.summary().devices:
                lines.setdefault((folder, device.name), []).append(account_line(recorded_accounts(device)))
    for (folder, name), of_windows in lines.items():
        worst = min(of_windows, key=lambda line: _WORST_FIRST.index(line.level))
        count = sum(line.level == worst.level for line in of_windows)
        text = f"{folder}, {name}, {count} of {counted(len(of_windows), 'window')}: {worst.text}"
        yield problem(text, _COMPLETE) if worst.level == "different" else fine(text)


def _check_whole_devices(steps: Sequence[RecordedStep]) -> Iterator[Finding]:
    """Report for each worker and device what filled the whole device when it had least free memory."""
    fullest: dict[tuple[str, str], tuple[int, tuple[WholeDevice, ...]]] = {}
    for step in steps:
        with suppress(UnreadableFileError):  # see _check_accounts
            for device in step.summary().devices:
                readings = recorded_whole(device)
                free = [
                    size for reading in readings for part, size in reading.parts if part is DevicePart.FREE
                ]
                key = (step.folder, device.name)
                if free and (key not in fullest or min(free) < fullest[key][0]):
                    fullest[key] = (min(free), readings)
    for (folder, name), (_, readings) in fullest.items():
        text = f"{folder}, {name}: {whole_line(readings, name)}"
        by_process = any(DevicePart.CONTEXT in dict(reading.parts) for reading in readings)
        yield fine(text) if name == "cpu" or by_process else hint(text, _BY_PROCESS)


def _check_access(logdir: str, recordings: Recordings) -> Iterator[Finding]:
    if files.is_remote(logdir) or os.access(logdir, os.W_OK):
        return
    text = f"This user cannot write to {logdir}."
    fix = "To record here, choose a folder that the training can write to."
    yield hint(text, fix) if recordings.steps else problem(text, fix)
