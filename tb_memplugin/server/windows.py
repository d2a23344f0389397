"""A cache of windows: side files are read when a view needs them, and kept while they fit in memory."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.server.catalog import Entry
from tb_memplugin.store import files
from tb_memplugin.store.paths import SIDE_FOLDER
from tb_memplugin.store.reader import load_window, side_file_path
from tb_memplugin.trace import MemoryTrace

MOST_BYTES = 1 << 30
"""The most bytes of all cached windows together; the last one loaded is kept whatever its size."""

DERIVED_BYTES = 160
"""Bytes per event that pairing and curves take in addition to the columns."""

_Key = tuple[str, int, int]

_NO_STAMP = (-1, -1)


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    trace: MemoryTrace | None = None


class Windows:
    """Loads each side file below one logdir once, and drops the least recently used ones.

    Args:
        logdir: TensorBoard's; empty if it was started with --logdir_spec.
        most_bytes: the most bytes of all cached windows together.
    """

    def __init__(self, logdir: str, most_bytes: int = MOST_BYTES) -> None:
        self._logdir, self._most = logdir, most_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[_Key, _Slot] = OrderedDict()
        self._refused: dict[str, tuple[_Key, UnreadableFileError]] = {}

    def path(self, entry: Entry) -> str:
        """Return the path of a step's side file, which is always within the folder of its run.

        Raises:
            UnreadableFileError: the logdir is not known, or the file's name is not a valid one.
        """
        where = self.display(entry)
        if not self._logdir:
            what = (
                "TensorBoard was started with --logdir_spec, so the location of the run's files is not known."
            )
            raise UnreadableFileError(
                what, where=where, fix="Start it with --logdir and a folder that contains the runs."
            )
        parts = PurePosixPath(entry.folder.replace(os.sep, "/"))
        path = None
        if not parts.is_absolute() and ".." not in parts.parts and "\0" not in entry.folder:
            path = side_file_path(files.join(self._logdir, entry.folder), entry.metadata.side_file)
        if path is None:
            what = (
                "The name of the step's side file is not one that tb_memplugin writes, so it is not opened."
            )
            raise UnreadableFileError(what, where=where, fix="Record the window again.")
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
            return files.exists(self.path(entry))
        except UnreadableFileError:
            return False
        except OSError:
            return True

    def load(self, entry: Entry) -> MemoryTrace:
        """Return the window to which a step belongs.

        Raises:
            UnreadableFileError: its side file does not exist or cannot be read.
        """
        path = self.path(entry)
        key = (path, *_stamp(path))
        refused = self._refused.get(path)
        if refused and refused[0] == key and not files.is_remote(path):
            raise refused[1]
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
        with slot.lock:
            if slot.trace is None:
                try:
                    slot.trace = load_window(path, entry.metadata.epoch_ns)
                    _ = slot.trace.allocations  # compute it under the lock, so that waiting requests need not
                except UnreadableFileError as error:
                    with self._lock:
                        self._slots.pop(key, None)
                        if _stays(error, key):
                            self._refused[path] = (key, error)
                    raise
                self._refused.pop(path, None)
                self._forget(key)
            return slot.trace

    def problems(self) -> list[UnreadableFileError]:
        """Return the errors of side files that could not be read, while they and their runs stay."""
        return [
            error
            for path, (key, error) in list(self._refused.items())
            if key == (path, *_stamp(path)) and not _has_no_run(path)
        ]

    def _forget(self, newest: _Key) -> None:
        with self._lock:
            total = 0
            for key in reversed(list(self._slots)):
                trace = self._slots[key].trace
                total += _weight(trace) if trace is not None else 0
                if total > self._most and key != newest and trace is not None:
                    del self._slots[key]


def _stays(error: UnreadableFileError, key: _Key) -> bool:
    """Whether an error lasts while the file does not change: of its content, or that it is absent."""
    is_absent = isinstance(error.__cause__, FileNotFoundError) and key[1:] == _NO_STAMP
    return is_absent or not isinstance(error.__cause__, OSError)


def _has_no_run(path: str) -> bool:
    """Return whether the worker's folder of a local side file was deleted."""
    try:
        return not files.is_remote(path) and not files.exists(str(Path(path).parents[2]))
    except OSError:  # it is not known
        return False


def _weight(trace: MemoryTrace) -> int:
    columns: int = sum(getattr(trace.events, name).nbytes for name in trace.events.__slots__)
    return columns + DERIVED_BYTES * (len(trace.events) + len(trace.start))


def _stamp(path: str) -> tuple[int, int]:
    """Return size and time of change, by which a file that replaced another one is recognized."""
    if files.is_remote(path):
        return (0, 0)
    try:
        status = Path(path).stat()
    except OSError:
        return _NO_STAMP
    return (status.st_size, status.st_mtime_ns)
