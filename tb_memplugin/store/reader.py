"""Reading recordings back: windows from side files, and what a logdir holds, without TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from tb_memplugin.analysis.breakdown import By, Part, merged
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.proto.metadata_pb2 import StepMetadata
from tb_memplugin.proto.summary_pb2 import DeviceSummary, ModuleTable, Parts, StepSummary
from tb_memplugin.store import files
from tb_memplugin.store.blob import read_metadata, read_summary
from tb_memplugin.store.envelope import KEEP, RERECORD
from tb_memplugin.store.event_file import blobs_of
from tb_memplugin.store.generations import superseded
from tb_memplugin.store.paths import EVENT_FILE_END, SIDE_FOLDER, STEPS_TAG, is_side_file_name
from tb_memplugin.store.records import records
from tb_memplugin.store.step_records import read_figures, read_series
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.store.windows import read_window
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.step_figures import StepFigures, joined
from tb_memplugin.trace.tables import NOT_NAMED


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One captured step as an event file holds it. `folder` is its worker's folder."""

    folder: str
    metadata: StepMetadata
    blob: bytes

    @property
    def side_file(self) -> str | None:
        """The window's side file, None where the step names none that could be one."""
        return side_file_path(self.folder, self.metadata.side_file)

    def summary(self) -> StepSummary:
        """The step's summary.

        Raises:
            UnreadableFileError: damaged, or newer than this reader.
        """
        return read_summary(self.blob, self.folder)


@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """What a monitor saw: the figures of all its steps. `folder` is the one that it wrote into."""

    folder: str
    worker: str
    figures: StepFigures


@dataclass(frozen=True, slots=True)
class Recordings:
    """What a folder and those below it hold, and what could not be read."""

    steps: tuple[RecordedStep, ...] = ()
    watched: tuple[WatchedSteps, ...] = ()
    problems: tuple[UnreadableFileError, ...] = field(default=())


def load_window(path: str) -> MemoryTrace:
    """The window in a side file, local or by an fsspec URL.

    Raises:
        UnreadableFileError: absent, truncated, foreign, damaged, or newer than this reader.
    """
    try:
        with files.open_ranges(path) as (read, size):
            return read_window(read, size, path)
    except FileNotFoundError as error:
        what = "The side file with this window's events is absent."
        raise UnreadableFileError(
            what, where=path, fix="Copy it here, or record the window again."
        ) from error
    except OSError as error:
        what = f"The side file cannot be read: {error.strerror or error}."
        raise UnreadableFileError(what, where=path, fix="Make it readable for this user.") from error


def full_summary(step: RecordedStep) -> StepSummary:
    """A step's summary; made anew from its side file where it had to be shortened, if that can be read.

    Raises:
        UnreadableFileError: damaged, or newer than this reader.
    """
    summary = step.summary()
    if not summary.folded or step.side_file is None:
        return summary
    try:
        return unfolded(load_window(step.side_file), step.metadata)
    except UnreadableFileError:
        return summary


def unfolded(trace: MemoryTrace, metadata: StepMetadata) -> StepSummary:
    """The summary of a step with all its rows and names.

    Raises:
        NotRecordedError: the window does not hold the step.
    """
    window = Window(metadata.worker, metadata.writer_id, metadata.window, metadata.side_file)
    return WindowSummaries(trace, window).summary(trace.step_row(metadata.step))


def peak_parts(summary: StepSummary, device: DeviceSummary, by: By) -> list[Part]:
    """A division of the peak as a summary holds it, largest first."""
    if by == "module":
        return _module_parts(summary, device.modules)
    parts: Parts = getattr(device.peak, f"by_{by}")
    return [Part(*row) for row in zip(parts.keys, parts.bytes, parts.counts, strict=True)]


def module_keys(summary: StepSummary, rows: Iterable[int]) -> list[str]:
    """The keys of rows of a summary's modules; -1 is what is not named."""
    keys = [*summary.modules.keys, NOT_NAMED]
    return [keys[row] for row in rows]


def _module_parts(summary: StepSummary, table: ModuleTable) -> list[Part]:
    width = len(Category)
    found: dict[str, Part] = {}
    for place, key in enumerate(module_keys(summary, table.modules)):
        row, count = table.own[place * width : (place + 1) * width], table.own_count[place]
        if count:
            part = Part(key, sum(row), count, category_bytes(row))
            found[key] = merged(found[key], part) if key in found else part
    return sorted(found.values(), key=lambda part: -part.bytes)


def category_bytes(row: Sequence[int]) -> dict[str, int]:
    """Bytes by category's key, those with none left out. The row has 12 values."""
    return {category.key: int(size) for category, size in zip(Category, row, strict=True) if size}


def side_file_path(folder: str, name: str) -> str | None:
    """Where a worker's side file lies, None where the name is none that a writer gives."""
    return files.join(folder, SIDE_FOLDER, name) if is_side_file_name(name) else None


def read_recordings(path: str) -> Recordings:
    """Every captured step in a folder and below it, by folder, window and step; and what monitors saw.

    Raises:
        MemPluginError: there is no such folder.
    """
    if not files.exists(path):
        raise MemPluginError(
            "There is no such folder.", where=path, fix="Give the folder passed to the handler."
        )
    steps: list[RecordedStep] = []
    watched: dict[str, list[WatchedSteps]] = {}
    problems: list[UnreadableFileError] = []
    for folder, names in files.walk(path):
        for name in names:
            if name.endswith(EVENT_FILE_END):
                try:
                    for found in _found_in(folder, files.join(folder, name)):
                        # One by one: what comes before an error counts.
                        if isinstance(found, RecordedStep):
                            steps.append(found)
                        else:
                            watched.setdefault(folder, []).append(found)
                except UnreadableFileError as error:
                    problems.append(error)
                except OSError as error:
                    what = f"The event file cannot be read: {error.strerror or error}."
                    where, fix = files.join(folder, name), "Make it readable for this user."
                    problems.append(UnreadableFileError(what, where=where, fix=fix))
    replaced = superseded({step.folder: step.metadata.worker for step in steps})
    steps = [step for step in steps if step.folder not in replaced]
    steps.sort(key=lambda step: (step.folder, step.metadata.window, step.metadata.step))
    whole = []
    for parts in watched.values():
        try:
            whole.append(replace(parts[0], figures=joined([part.figures for part in parts])))
        except ValueError as error:
            what = f"Figures of steps are damaged ({error})."
            problems.append(UnreadableFileError(what, where=parts[0].folder, fix=RERECORD))
    return Recordings(tuple(steps), tuple(whole), tuple(problems))


def _found_in(folder: str, path: str) -> Iterator[RecordedStep | WatchedSteps]:
    """The steps of one event file, and its records of figures, as far as it can be read.

    Raises:
        UnreadableFileError: at the first thing that cannot.
    """
    with files.open_ranges(path) as (read, size):
        offset = 0
        for data, end in records(read, size):
            offset = end
            try:
                found = list(blobs_of(data))
            except DecodeError as error:
                raise UnreadableFileError("A record is no event.", where=path, fix=RERECORD) from error
            for tag, content, blob in found:
                if tag == STEPS_TAG:
                    yield WatchedSteps(folder, read_series(content, path).worker, read_figures(blob, path))
                else:
                    yield RecordedStep(folder, read_metadata(content, path), blob)
    if offset != size:
        what = (
            f"The event file breaks off at byte {offset} of {size}: a write was cut short, or it is damaged."
        )
        raise UnreadableFileError(what, where=path, fix=KEEP)
