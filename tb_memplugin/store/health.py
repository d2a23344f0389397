"""Check of the files in a local logdir: which of them cannot be read, and why."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from tb_memplugin.errors import UnreadableFileError, cannot_read
from tb_memplugin.store import files
from tb_memplugin.store.envelope import KEEP, RERECORD, EnvelopeReader, without_content
from tb_memplugin.store.paths import EVENT_FILE_END, SIDE_FOLDER
from tb_memplugin.store.records import checked, framed

MOST_FOLDERS = 5_000
"""The largest number of folders to check. Files in further folders are checked when a view opens them."""

MOST_SIDE_FILES = 100
"""The largest number of side files that are opened for a list. Of more none is: a view that opens one says
what is wrong with it."""

SUM_SECONDS = 0.2
"""How many seconds one check spends on the checksums of event files. Then it reads one record of each; the
next check goes on there. TensorBoard does not help: its fast data server does not check them, and shows
damaged numbers; its Python path stops at a damaged record without a word."""

_WRITE_SECONDS = 0.05
"""Seconds to wait before a recent file is reported. If it grows meanwhile, it is still being written."""

_summed: dict[str, tuple[int, os.stat_result]] = {}
"""By path: up to where the checksums of an event file's records are right, and the file's state then."""


def unreadable_files(logdir: str, most_side_files: int = MOST_SIDE_FILES) -> tuple[UnreadableFileError, ...]:
    """Return an error for each unreadable event file and side file under a logdir.

    A file is unreadable if it is truncated, of another format, damaged, or newer than this reader. Of side
    files only heads and ends are read, and of more than `most_side_files` nothing. What has not changed is
    not read again.
    """
    errors: list[UnreadableFileError] = []
    side_files: list[Path] = []
    until = time.monotonic() + SUM_SECONDS
    failed = lambda error: errors.extend(unlisted_folder(error))  # noqa: E731
    for number, (folder, names) in enumerate(files.walk(logdir, failed)):
        if number == MOST_FOLDERS:
            break
        ours = folder.replace("\\", "/").endswith(SIDE_FOLDER)
        for name in names:
            if ours and name.endswith(".mem"):
                side_files.append(Path(folder, name))
            elif _is_event_file(folder, name):
                errors += _checked(Path(folder, name), until)
    for path in side_files if len(side_files) <= most_side_files else ():
        errors += _checked(path, until)
    return tuple(errors)


def unlisted_folder(error: OSError) -> Iterator[UnreadableFileError]:
    """Yield the error of a folder that cannot be listed; nothing if it was deleted meanwhile."""
    if not isinstance(error, FileNotFoundError):
        yield cannot_read("The folder", error, str(error.filename or ""))


def _is_event_file(folder: str, name: str) -> bool:
    """Whether a file is an event file of this plugin, or another in the same folder.

    The other can prevent TensorBoard from reading this plugin's file.
    """
    return name.endswith(EVENT_FILE_END) or (
        "tfevents" in name and files.is_folder(files.join(folder, SIDE_FOLDER))
    )


def _checked(path: Path, until: float) -> Iterator[UnreadableFileError]:
    try:
        status = path.stat()
        error = _check(str(path), status.st_size, status.st_mtime_ns)
        if error is None and path.name.endswith(EVENT_FILE_END):
            error = _sum(str(path), status, until)
        if error is not None and time.time() - status.st_mtime < _WRITE_SECONDS:
            time.sleep(_WRITE_SECONDS)
            if path.stat().st_size != status.st_size:
                return
        if error is not None:
            yield error
    except FileNotFoundError:  # deleted meanwhile
        return
    except OSError as error:
        yield cannot_read("The file", error, str(path))


@lru_cache(maxsize=100_000)
def _check(path: str, size: int, changed_ns: int) -> UnreadableFileError | None:  # noqa: ARG001  # part of the key
    with files.open_ranges(path) as (read, _):
        try:
            if path.endswith(".mem"):
                EnvelopeReader(read, size, path)
            else:
                _check_event_file(read, size, path)
        except UnreadableFileError as error:
            return error
    return None


def _check_event_file(read: files.ReadRange, size: int, path: str) -> None:
    end = framed(read, size)
    if not end:
        message = "This is not an event file: TensorBoard cannot read it."
        raise UnreadableFileError(without_content(read(0, 16)) or message, where=path, fix=RERECORD)
    if end != size:
        message = f"The event file ends unexpectedly at byte {end} of {size}."
        raise UnreadableFileError(message, where=path, fix=KEEP)


def _sum(path: str, status: os.stat_result, until: float) -> UnreadableFileError | None:
    """Compute the checksums of the records that were not checked before, until a moment of the clock."""
    reached, before = _summed.get(path, (0, status))
    has_grown = status.st_ino == before.st_ino and status.st_size > before.st_size
    if status.st_mtime_ns != before.st_mtime_ns and not has_grown:
        reached = 0
    if reached == status.st_size:
        return None
    wrong = ""
    with files.open_ranges(path) as (read, _):
        for end, data in checked(read, reached, status.st_size):
            wrong = _wrong(data)
            reached = reached if wrong else end
            if wrong or time.monotonic() > until:
                break
    _summed[path] = (reached, status)
    if not wrong:
        return None
    message = f"A record of the event file is damaged at byte {reached}: {wrong}."
    return UnreadableFileError(message, where=path, fix=KEEP)


def _wrong(data: bytes | None) -> str:
    """Return what is wrong with a record, "" for nothing. TensorBoard reads nothing after one that is."""
    if data is None:
        return "its checksum is wrong"
    try:
        Event.FromString(data)
    except DecodeError:
        return "it is not an event"
    return ""
