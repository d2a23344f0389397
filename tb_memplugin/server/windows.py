"""A cache of windows: side files are read when a view needs them, and kept while they fit in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import StepMetadata
from tb_memplugin.server.cache import Cache
from tb_memplugin.server.catalog import Entry
from tb_memplugin.store import files
from tb_memplugin.store.paths import SIDE_FOLDER
from tb_memplugin.store.reader import load_window, side_file_path
from tb_memplugin.store.scratch import is_mapped, release
from tb_memplugin.trace import MemoryTrace

MOST_BYTES = 1 << 30
"""The most bytes of all cached windows together; the last one loaded is kept whatever its size."""

BYTES_PER_EVENT, BYTES_PER_MAPPED_EVENT = 160, 16
"""What columns, pairing and curves take in memory; and what stays there of windows in scratch files."""

MOST_MAPPED_BYTES = 1 << 27
"""From how many bytes of scratch files in memory on their pages are given back to the system."""

Read = tuple[str, int, int]
"""A side file of which an answer depends: its path, size and time of change."""

_NO_STAMP, _NEVER_THE_SAME = (-1, -1), (-2, -2)

_noted: ContextVar[set[Read] | None] = ContextVar("noted", default=None)


class Windows:
    """Loads each side file below one logdir once, and drops the least recently used ones.

    Args:
        logdir: TensorBoard's; empty if it was started with --logdir_spec.
        most_bytes: the most bytes of all cached windows together.
    """

    def __init__(self, logdir: str, most_bytes: int = MOST_BYTES) -> None:
        self._logdir = logdir
        self._kept = Cache(most_bytes)
        self._refused: dict[str, tuple[Read, UnreadableFileError]] = {}

    def path(self, entry: Entry) -> str:
        """Return the path of a step's side file, which is always within the folder of its run.

        Raises:
            UnreadableFileError: the logdir is not known, or the file's name is not a valid one.
        """
        where = self.display(entry)
        if not self._logdir:
            message = (
                "TensorBoard was started with --logdir_spec, so the location of the run's files is not known."
            )
            raise UnreadableFileError(
                message, where=where, fix="Start it with --logdir and a folder that contains the runs."
            )
        parts = PurePosixPath(entry.folder.replace(os.sep, "/"))
        path = None
        if not parts.is_absolute() and ".." not in parts.parts and "\0" not in entry.folder:
            path = side_file_path(files.join(self._logdir, entry.folder), entry.metadata.side_file)
        if path is None:
            message = (
                "The name of the step's side file is not one that tb_memplugin writes, so it is not opened."
            )
            raise UnreadableFileError(message, where=where, fix="Record the window again.")
        return path

    def display(self, entry: Entry) -> str:
        """Return the side file's path relative to the logdir, for display."""
        folder = "" if entry.folder in {"", "."} else f"{entry.folder}/"
        return f"{folder}{SIDE_FOLDER}/{entry.metadata.side_file}"

    def file(self, entry: Entry) -> tuple[str, tuple[int, int]]:
        """Return the path of a step's side file, and its size and time of change, which identify the window.

        Raises:
            UnreadableFileError: the logdir is not known, or the file's name is not a valid one.
        """
        path = self.path(entry)
        return path, _stamp(path)

    def present(self, entry: Entry) -> bool:
        """Return whether the side file exists, as far as is known; it may still be unreadable."""
        try:
            path = self.path(entry)
        except UnreadableFileError:
            return False
        read = _read(path)
        try:
            is_present = files.exists(path)
        except OSError:
            is_present = True
        if is_present == (read[1:] == _NO_STAMP):
            _note((path, *_NEVER_THE_SAME))  # two answers of the file system: no answer of ours is kept
        return is_present

    def load(self, entry: Entry) -> MemoryTrace:
        """Return the window to which a step belongs.

        Raises:
            UnreadableFileError: its side file does not exist or cannot be read.
        """
        release(MOST_MAPPED_BYTES)
        path = self.path(entry)
        read = _read(path)
        refused = self._refused.get(path)
        if refused and refused[0] == read and not files.is_remote(path):
            raise refused[1]
        try:
            trace = self._kept.get(read, lambda: _loaded(path, entry.metadata), _weight)
        except UnreadableFileError as error:
            if _stays(error, read):
                self._refused[path] = (read, error)
            else:
                _note((path, *_NEVER_THE_SAME))  # no answer without this file is kept
            raise
        self._refused.pop(path, None)
        return trace

    def problems(self) -> list[UnreadableFileError]:
        """Return the errors of side files that could not be read, while they and their runs stay."""
        return [
            error
            for path, (read, error) in list(self._refused.items())
            if read == (path, *_stamp(path)) and not _has_no_run(path)
        ]


@contextmanager
def noted_reads() -> Iterator[set[Read]]:
    """Yield a set to which every side file that this thread reads or looks for is added."""
    reads: set[Read] = set()
    token = _noted.set(reads)
    try:
        yield reads
    finally:
        _noted.reset(token)


def is_unchanged(read: Read) -> bool:
    """Return whether a side file is still the same; False on remote file systems, which do not say."""
    return not files.is_remote(read[0]) and read == (read[0], *_stamp(read[0]))


def _read(path: str) -> Read:
    return _note((path, *_stamp(path)))


def _note(read: Read) -> Read:
    reads = _noted.get()
    if reads is not None:
        reads.add(read)
    return read


def _loaded(path: str, step: StepMetadata) -> MemoryTrace:
    trace = load_window(path, step)
    _ = trace.allocations  # compute it here, so that waiting requests need not
    return trace


def _stays(error: UnreadableFileError, read: Read) -> bool:
    """Whether an error lasts while the file does not change: of its content, or that it is absent."""
    is_absent = isinstance(error.__cause__, FileNotFoundError) and read[1:] == _NO_STAMP
    return is_absent or not isinstance(error.__cause__, OSError)


def _has_no_run(path: str) -> bool:
    """Return whether the worker's folder of a local side file was deleted."""
    try:
        return not files.is_remote(path) and not files.exists(str(Path(path).parents[2]))
    except OSError:  # it is not known
        return False


def _weight(trace: MemoryTrace) -> int:
    each = BYTES_PER_MAPPED_EVENT if is_mapped(trace.allocations.freed) else BYTES_PER_EVENT
    return each * (len(trace.events) + len(trace.start))


def _stamp(path: str) -> tuple[int, int]:
    """Return size and time of change, by which a file that replaced another one is recognized."""
    if files.is_remote(path):
        return (0, 0)
    try:
        status = Path(path).stat()
    except OSError:
        return _NO_STAMP
    return (status.st_size, status.st_mtime_ns)
