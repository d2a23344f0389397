"""Read recordings without TensorBoard: windows from side files, and all steps in a logdir."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf.message import DecodeError

from tb_memplugin.analysis.account import Account
from tb_memplugin.analysis.divisions import By, Part, merged
from tb_memplugin.analysis.moments import LiveAllocation
from tb_memplugin.errors import PERMIT, MemPluginError, UnreadableFileError, cannot_read, fix_of
from tb_memplugin.proto.recording_pb2 import DeviceSummary, ModuleTable, Parts, StepMetadata, StepSummary
from tb_memplugin.store import files
from tb_memplugin.store.blob import read_metadata, read_summary
from tb_memplugin.store.envelope import KEEP, RERECORD
from tb_memplugin.store.event_file import blobs_of
from tb_memplugin.store.health import unlisted_folder
from tb_memplugin.store.paths import (
    CLAIM,
    EVENT_FILE_END,
    SIDE_FOLDER,
    STEPS_END,
    STEPS_TAG,
    is_side_file_name,
    superseded,
)
from tb_memplugin.store.records import records
from tb_memplugin.store.step_records import SeriesReader, read_series
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.store.summary import epoch_ns as epoch_of
from tb_memplugin.store.whole_devices import read_whole
from tb_memplugin.store.windows import of_another_window, read_window
from tb_memplugin.trace import Category, Cause, Counter, MemoryTrace, Moment, Phase, Reason, WholeDevice
from tb_memplugin.trace.counters import code_of
from tb_memplugin.trace.step_figures import StepFigures, WatchedSteps, joined_before
from tb_memplugin.trace.tables import CERTAIN, NOT_NAMED

MOST_FOREIGN_FOLDERS = 100_000
"""A folder is no logdir if none of its first so many folders has a recording."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One captured step as stored in an event file. `folder` is its worker's folder."""

    folder: str
    metadata: StepMetadata
    blob: bytes

    @property
    def side_file(self) -> str | None:
        """The path of the window's side file, None if the step does not contain a valid name of one."""
        return side_file_path(self.folder, self.metadata.side_file)

    def summary(self) -> StepSummary:
        """Return the step's summary.

        Raises:
            UnreadableFileError: the summary is damaged or newer than this reader.
        """
        return read_summary(self.blob, self.folder, self.metadata)


@dataclass(frozen=True, slots=True)
class Recordings:
    """The recordings in a folder and below it, and the errors of files that could not be read."""

    steps: tuple[RecordedStep, ...] = ()
    watched: tuple[WatchedSteps, ...] = ()
    problems: tuple[UnreadableFileError, ...] = field(default=())

    def watched_beside(self, folder: str) -> StepFigures | None:
        """Return all watched steps of the worker whose windows are in a folder; None if none were watched."""
        of_folder = (series.figures for series in self.watched if series.folder == folder + STEPS_END)
        return next(of_folder, None)


def load_window(path: str, step: StepMetadata | None = None) -> MemoryTrace:
    """Return the window in a side file, given by a local path or an fsspec URL.

    Args:
        step: the metadata of a step of the window; None accepts any window.

    Raises:
        UnreadableFileError: the file is missing, truncated, not a side file, damaged, newer than this
            reader, or of another window.
    """
    try:
        with files.open_ranges(path) as (read, size):
            trace = read_window(read, size, path, (step.writer_id, step.window) if step else None)
    except FileNotFoundError as error:
        message = "The side file with this window's events is missing."
        raise UnreadableFileError(
            message, where=path, fix="Copy it here, or record the window again."
        ) from error
    except OSError as error:
        raise cannot_read("The side file", error, path) from error
    if step is not None and step.epoch_ns != epoch_of(trace):
        raise of_another_window(path)
    return trace


def full_summary(step: RecordedStep) -> StepSummary:
    """Return a step's summary. If it is folded, compute it from the side file where that is readable.

    Raises:
        UnreadableFileError: the stored summary is damaged or newer than this reader.
    """
    summary = step.summary()
    if not summary.folded or step.side_file is None:
        return summary
    try:
        return unfolded(load_window(step.side_file, step.metadata), step.metadata)
    except UnreadableFileError:
        return summary


def unfolded(trace: MemoryTrace, metadata: StepMetadata) -> StepSummary:
    """Return the summary of a step with all rows and full names.

    Raises:
        NotRecordedError: the window does not contain the step.
    """
    window = Window(metadata.worker, metadata.writer_id, metadata.window, metadata.side_file)
    row = trace.step_row(metadata.step)
    return WindowSummaries(trace, window, only=row).summary(row)


def peak_parts(summary: StepSummary, device: DeviceSummary, by: By) -> list[Part]:
    """Return the breakdown of the peak by `by` from a summary, largest part first."""
    if by == "module":
        return _module_parts(summary, device.modules)
    parts: Parts = getattr(device.peak, f"by_{by}")
    return [Part(*row) for row in zip(parts.keys, parts.bytes, parts.counts, strict=True)]


def recorded_accounts(device: DeviceSummary) -> tuple[Account, ...]:
    """Return the accounts of a device from a summary; () if its version or source recorded none."""
    return tuple(
        Account(
            Moment(stored.moment),
            stored.counted_bytes,
            code_of(Counter, stored.counter),
            stored.allocator_bytes if stored.HasField("allocator_bytes") else None,
            stored.at_least,
            tuple(
                (code_of(Cause, cause), size)
                for cause, size in zip(stored.causes, stored.cause_bytes, strict=True)
            ),
        )
        for stored in device.accounts
    )


def recorded_whole(device: DeviceSummary) -> tuple[WholeDevice, ...]:
    """Return what filled the whole device, from a summary; () if its version or source recorded nothing."""
    return tuple(map(read_whole, device.whole_devices))


def largest_at_peak(summary: StepSummary, device: DeviceSummary) -> Iterator[LiveAllocation]:
    """Yield the largest allocations alive at a device's peak, with times in epoch nanoseconds, row -1."""
    blocks, epoch = device.peak.largest, summary.metadata.epoch_ns
    modules = [None if row < 0 else summary.modules.keys[row] for row in blocks.modules]
    reasons = blocks.reasons or [Reason.NOT_RECORDED] * len(blocks.bytes)
    confidences = blocks.module_confidences or [CERTAIN] * len(blocks.bytes)
    tensors = blocks.tensors or [""] * len(blocks.bytes)
    for row, size in enumerate(blocks.bytes):
        born_ns, freed_ns = blocks.born_ns[row], blocks.freed_ns[row]
        yield LiveAllocation(
            row=-1,
            bytes=size,
            address=blocks.addresses[row],
            category=Category(blocks.categories[row]),
            phase=Phase(blocks.phases[row]),
            module=modules[row],
            operator=blocks.operators[row] or None,
            name=blocks.names[row] or None,
            born_ns=None if born_ns < 0 else epoch + born_ns,
            freed_ns=None if freed_ns < 0 else epoch + freed_ns,
            reason=Reason(reasons[row]),
            module_confidence=confidences[row],
            tensor=tensors[row] or None,
        )


def module_keys(summary: StepSummary, rows: Iterable[int]) -> list[str]:
    """Return the keys for rows of a summary's modules; row -1 is `NOT_NAMED`."""
    keys = [*summary.modules.keys, NOT_NAMED]
    return [keys[row] for row in rows]


def _module_parts(summary: StepSummary, table: ModuleTable) -> list[Part]:
    width = len(Category)
    parts: dict[str, Part] = {}
    for index, key in enumerate(module_keys(summary, table.modules)):
        row, count = table.own[index * width : (index + 1) * width], table.own_count[index]
        if count:
            part = Part(key, sum(row), count, category_bytes(row))
            parts[key] = merged(parts[key], part) if key in parts else part
    return sorted(parts.values(), key=lambda part: -part.bytes)


def category_bytes(row: Sequence[int]) -> dict[str, int]:
    """Return the non-zero bytes by category key. The row has one value per category."""
    return {category.key: int(size) for category, size in zip(Category, row, strict=True) if size}


def side_file_path(folder: str, name: str) -> str | None:
    """Return the path of a worker's side file, None if the name is not a valid side file name."""
    return files.join(folder, SIDE_FOLDER, name) if is_side_file_name(name) else None


def _is_file(path: str) -> bool:
    """Whether a local path is a file, a pipe or a device; False if that is not known."""
    with suppress(OSError):
        return not stat.S_ISDIR(Path(path).stat().st_mode)
    return False


def read_recordings(path: str) -> Recordings:
    """Return all steps captured in a folder and below it, and the figures that monitors recorded.

    The steps are sorted by folder, window and number.

    Raises:
        MemPluginError: the folder does not exist or is a file, or that is not known; or it has so many
            folders without an event file of ours that it is no logdir.
    """
    try:
        is_there = files.exists(path)
    except OSError as error:
        message = f"The folder cannot be read: {error.strerror or error}."
        fix = fix_of(error, PERMIT)
        raise MemPluginError(message, where=path, fix=fix) from error
    if not is_there:
        raise MemPluginError(
            "There is no such folder.", where=path, fix="Give the folder passed to the handler."
        )
    if _is_file(path):
        fix = "Give a folder. What is in a file is shown by: tb-memplugin peak FILE"
        raise MemPluginError("This is no folder.", where=path, fix=fix)
    by_key: dict[tuple[str, str, int, int], RecordedStep] = {}
    watched: dict[str, list[WatchedSteps]] = {}
    problems: list[UnreadableFileError] = []
    for folder, names in walk_logdir(path, lambda error: problems.extend(unlisted_folder(error))):
        for name in names:
            if not name.endswith(EVENT_FILE_END):
                continue
            try:
                for recording in _recordings_in(folder, files.join(folder, name)):
                    # Add them one by one, to keep those before an error.
                    if isinstance(recording, RecordedStep):
                        about = recording.metadata
                        key = folder, about.writer_id, about.window, about.step
                        by_key.setdefault(key, recording)  # written twice, it is there once
                    else:
                        watched.setdefault(folder, []).append(recording)
            except UnreadableFileError as error:
                problems.append(error)
            except OSError as error:
                problems.append(cannot_read("The event file", error, files.join(folder, name)))
    steps = list(by_key.values())
    replaced = superseded({step.folder: step.metadata.worker for step in steps})
    steps = [step for step in steps if step.folder not in replaced]
    steps.sort(key=lambda step: (step.folder, step.metadata.window, step.metadata.step))
    joined_steps = []
    for parts in watched.values():
        figures, damage = joined_before([part.figures for part in parts])
        if figures is not None:
            joined_steps.append(replace(parts[0], figures=figures))
        if damage is not None:
            message = f"The figures of steps are damaged ({damage})."
            problems.append(UnreadableFileError(message, where=parts[0].folder, fix=KEEP))
    return Recordings(tuple(steps), tuple(joined_steps), tuple(problems))


def walk_logdir(
    path: str, failed: Callable[[OSError], object] = lambda _: None
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder under a logdir with the sorted names of its files, as `files.walk`.

    Raises:
        MemPluginError: it has so many folders without a recording that it is no logdir, such as `/`.
    """
    is_logdir = False
    for number, (folder, names) in enumerate(files.walk(path, failed)):
        if number == MOST_FOREIGN_FOLDERS and not is_logdir:
            message = f"None of the first {number:,} folders in it has a recording."
            raise MemPluginError(
                message, where=path, fix="Give the folder of a run, or the logdir above runs."
            )
        is_logdir = is_logdir or any(name == CLAIM or name.endswith(EVENT_FILE_END) for name in names)
        yield folder, names


def _recordings_in(folder: str, path: str) -> Iterator[RecordedStep | WatchedSteps]:
    """Yield the captured steps and the records of figures in one event file.

    Raises:
        UnreadableFileError: after the last of them, if a record cannot be read, or if the file has more than
            records.
    """
    problem: UnreadableFileError | None = None
    with files.open_ranges(path) as (read, size):
        end, lost, series = 0, list[tuple[int, int]](), SeriesReader(path)
        for data, begin, following in records(read, size):
            if begin != end:
                lost.append((end, begin))
            end = following
            try:
                for tag, content, blob in blobs_of(data):
                    if tag == STEPS_TAG:
                        yield WatchedSteps(folder, read_series(content, path).worker, series.read(blob))
                    else:
                        yield RecordedStep(folder, read_metadata(content, path), blob)
            except DecodeError:
                problem = problem or UnreadableFileError("A record is not an event.", where=path, fix=KEEP)
            except UnreadableFileError as error:
                problem = problem or error
    if not size:
        raise UnreadableFileError("The event file is empty.", where=path, fix=RERECORD)
    if lost:
        raise UnreadableFileError(_damaged_parts(lost), where=path, fix=KEEP)
    if end != size:
        message = (
            f"The event file ends unexpectedly at byte {end} of {size}: a write was interrupted, or "
            "the file is damaged."
        )
        raise UnreadableFileError(message, where=path, fix=KEEP)
    if problem is not None:
        raise problem


def _damaged_parts(lost: Sequence[tuple[int, int]]) -> str:
    total, (begin, end) = sum(end - begin for begin, end in lost), lost[0]
    more = f", and {total - (end - begin):,} bytes further on" if len(lost) > 1 else ""
    return f"The event file is damaged at byte {begin}, up to {end}{more}. The records around that are read."
