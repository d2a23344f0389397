"""What is intact of damaged recordings, saved in new event files. Nothing is deleted or overwritten.

The intact records of a damaged event file go into a new one beside it, and the steps of a side file that no
record has into another. The damaged file goes into the folder of side files, where TensorBoard looks for no
event files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from google.protobuf.message import DecodeError

from tb_memplugin.errors import NoFileError, UnreadableFileError
from tb_memplugin.proto.recording_pb2 import StepMetadata
from tb_memplugin.store import files
from tb_memplugin.store.blob import read_metadata
from tb_memplugin.store.envelope import EnvelopeReader
from tb_memplugin.store.event_file import blobs_of, first_record, step_record
from tb_memplugin.store.paths import EVENT_FILE_END, SIDE_FOLDER, STEPS_TAG, is_side_file_name, window_of
from tb_memplugin.store.reader import walk_logdir
from tb_memplugin.store.records import record, records
from tb_memplugin.store.summary import Window
from tb_memplugin.store.windows import read_window
from tb_memplugin.store.worker_folder import claimed_by
from tb_memplugin.store.writer import window_steps
from tb_memplugin.temporary import age_seconds, delete_left, has_ended, is_here

QUIET_SECONDS = 600
"""How long the files of another machine's process must be unchanged, so that it counts as ended."""

SAVED_END = f".saved{EVENT_FILE_END}"
"""Suffix of the event files with what was saved. It follows the whole name of the damaged file: a running
TensorBoard reads only what sorts after the file that it has read last.
"""


@dataclass(frozen=True, slots=True)
class Repair:
    """What was done in a worker's folder.

    Attributes:
        folder: the worker's folder; with `failed`, perhaps the event file there that could not be read.
        waits: whether nothing was done, because a process may still write there.
        failed: an error of the file system. Nothing is lost by that, and to try again is safe.
        records: how many records of damaged event files are saved that no other event file has.
        steps: how many steps of side files are saved of which no record was left.
        kept: where the damaged event files are now.
    """

    folder: str
    waits: bool = False
    failed: OSError | None = None
    records: int = 0
    steps: int = 0
    kept: tuple[str, ...] = ()


@dataclass(slots=True)
class _EventFile:
    """What is intact of an event file: hashes of records, and the metadata of steps."""

    is_whole: bool = True
    hashes: set[bytes] = field(default_factory=set)
    steps: list[StepMetadata] = field(default_factory=list)


def repair(logdir: str) -> Iterator[Repair]:
    """Save what is intact in each worker's folder, under a local logdir, in which something is damaged.

    Raises:
        MemPluginError: it has so many folders without a recording that it is no logdir.
    """
    for folder, names in walk_logdir(logdir):
        if files.is_folder(files.join(folder, SIDE_FOLDER)):
            delete_left(folder)  # by a repair that was killed
            paths = [files.join(folder, name) for name in names if name.endswith(EVENT_FILE_END)]
            events: dict[str, _EventFile] = {}
            for path in paths:
                try:
                    events[path] = _read(path)
                except OSError as error:
                    yield Repair(path, failed=error)
            try:
                done = _repair_folder(folder, events, all_are_read=len(events) == len(paths))
            except OSError as error:
                done = Repair(folder, failed=error)
            if done is not None:
                yield done


def _repair_folder(folder: str, events: Mapping[str, _EventFile], *, all_are_read: bool) -> Repair | None:
    """Save what is intact in a worker's folder. Return None where nothing is damaged.

    The steps of side files wait until all event files can be read: they may be in the others.
    """
    writer_id, process = "", ""
    with suppress(FileNotFoundError, NoFileError):
        writer_id, process = claimed_by(folder)
    missing = list(_steps_without_record(folder, writer_id, events)) if all_are_read else []
    damaged = [path for path, content in events.items() if not content.is_whole]
    if not damaged and not missing:
        return None
    if _may_be_written(process, [files.join(folder, SIDE_FOLDER), *events]):
        return Repair(folder, waits=True)
    in_whole_files = {digest for content in events.values() if content.is_whole for digest in content.hashes}
    saved = 0
    for path in damaged:
        lost = events[path].hashes - in_whole_files
        if lost:
            _write(path, _records_with(path, lost))
        saved, in_whole_files = saved + len(lost), in_whole_files | lost
    if missing:
        now = files.join(folder, f"events.out.tfevents.{int(time.time()):010d}")
        _write(f"{max((now, *events))}.windows", missing)  # after all others, and what was saved of them
    kept = tuple(_set_aside(folder, path) for path in damaged)  # by them, a second try knows what is missing
    return Repair(folder, records=saved, steps=len(missing), kept=kept)


def _read(path: str) -> _EventFile:
    """Return what is intact of an event file."""
    content, reached = _EventFile(), 0
    with files.open_ranges(path) as (read, size):
        for data, begin, end in records(read, size):
            content.is_whole &= _is_added(content, data) and begin == reached
            reached = end
    content.is_whole &= 0 < size == reached
    return content


def _is_added(content: _EventFile, data: bytes) -> bool:
    """Note what is in a record. Return whether it is an event."""
    try:
        blobs = list(blobs_of(data))
    except DecodeError:
        return False
    if blobs:  # the first record only says that this is an event file
        content.hashes.add(sha256(data).digest())
    for tag, about, _ in blobs:
        with suppress(UnreadableFileError):  # one of a newer version is saved as it is
            content.steps += [read_metadata(about)] * (tag != STEPS_TAG)
    return True


def _steps_without_record(folder: str, claimed_id: str, events: Mapping[str, _EventFile]) -> Iterator[bytes]:
    """Yield the records of steps of intact side files that no event file has.

    A side file says who wrote it, as does a step: an event file may have records of strangers. Of older side
    files, the steps that name them say it, or else the claim.
    """
    side = files.join(folder, SIDE_FOLDER)
    steps = [step for content in events.values() for step in content.steps]
    recorded = {(step.writer_id, step.side_file, step.step) for step in steps}
    writers = {step.side_file: step.writer_id for step in steps}
    workers = {step.writer_id: step.worker for step in steps}
    is_complete = all(content.is_whole for content in events.values()) and len(workers) == 1
    for name in filter(is_side_file_name, files.names_in(side)):
        if is_complete and name in writers:
            continue
        path = files.join(side, name)
        try:
            with files.open_ranges(path) as (read, size):
                footer = EnvelopeReader(read, size, path).footer
                writer = footer.writer_id or writers.get(name, claimed_id)
                window = Window(workers.get(writer, Path(folder).name), writer, window_of(name), name)
                trace = read_window(read, size, path, (writer, window.number))
        except UnreadableFileError:
            continue
        for metadata, blob in window_steps(trace, window):
            if (writer, name, metadata.step) not in recorded:
                yield step_record(metadata, blob)


def _may_be_written(process: str, paths: Sequence[str]) -> bool:
    """Whether the process that claimed a folder may still write to its files."""
    if is_here(process):
        return not has_ended(process)
    return any(age_seconds(path) < QUIET_SECONDS for path in paths)


def _records_with(path: str, hashes: set[bytes]) -> Iterator[bytes]:
    """Yield the records of an event file that have certain hashes, each once."""
    left = set(hashes)
    with files.open_ranges(path) as (read, size):
        for data, _, _ in records(read, size):
            digest = sha256(data).digest()
            if digest in left:
                left.remove(digest)
                yield record(data)


def _write(stem: str, content: Iterable[bytes]) -> None:
    files.write_new(
        stem + SAVED_END, lambda stream: stream.writelines((first_record(), *content)), flushed=True
    )


def _set_aside(folder: str, path: str) -> str:
    """Move a damaged event file to where nobody reads it. Return its new path."""
    name = Path(path).name.removesuffix(EVENT_FILE_END).replace("tfevents", "damaged")
    kept = files.join(folder, SIDE_FOLDER, name)
    if files.exists(kept):
        raise FileExistsError(f"{kept} exists")
    Path(path).rename(kept)
    return kept
