"""Windows in memory: side files read when a view needs them, and kept as long as they fit."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.server.catalogue import Entry
from tb_memplugin.store import files
from tb_memplugin.store.paths import SIDE_FOLDER
from tb_memplugin.store.reader import load_window, side_file_path
from tb_memplugin.trace import MemoryTrace

MOST_BYTES = 1 << 30
"""What the kept windows may take together; the one in use stays whatever its size."""

DERIVED_BYTES = 160
"""Bytes that pairing and curves take for each event, beside the columns themselves."""

_Key = tuple[str, int, int]


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    trace: MemoryTrace | None = None


class Windows:
    """Loads side files under the runs of one logdir, once each, and forgets the least used.

    Args:
        logdir: TensorBoard's; empty where it was started with --logdir_spec.
        most_bytes: what to keep.
    """

    def __init__(self, logdir: str, most_bytes: int = MOST_BYTES) -> None:
        self._logdir, self._most = logdir, most_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[_Key, _Slot] = OrderedDict()
        self._refused: dict[str, tuple[_Key, UnreadableFileError]] = {}

    def path(self, entry: Entry) -> str:
        """Where the side file of a step lies: always within the folder of the run that names it.

        Raises:
            UnreadableFileError: it cannot lie anywhere.
        """
        where = self.display(entry)
        if not self._logdir:
            what = "TensorBoard was started with --logdir_spec: it is not known where the run's files are."
            raise UnreadableFileError(
                what, where=where, fix="Start it with --logdir and a folder above the runs."
            )
        parts = PurePosixPath(entry.folder.replace(os.sep, "/"))
        path = None
        if not parts.is_absolute() and ".." not in parts.parts and "\0" not in entry.folder:
            path = side_file_path(files.join(self._logdir, entry.folder), entry.metadata.side_file)
        if path is None:
            what = "The step names a side file that no writer of ours would: it is not opened."
            raise UnreadableFileError(what, where=where, fix="Record the window again.")
        return path

    def display(self, entry: Entry) -> str:
        """The side file's path within the logdir, for people."""
        folder = "" if entry.folder in {"", "."} else f"{entry.folder}/"
        return f"{folder}{SIDE_FOLDER}/{entry.metadata.side_file}"

    def present(self, entry: Entry) -> bool:
        """Whether the side file is there. It may still be unreadable."""
        try:
            return files.exists(self.path(entry))
        except UnreadableFileError:
            return False

    def load(self, entry: Entry) -> MemoryTrace:
        """The window that a step belongs to.

        Raises:
            UnreadableFileError: its side file is absent or cannot be read.
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
                    slot.trace = load_window(path)
                    _ = (
                        slot.trace.allocations
                    )  # once, here: requests that wait for it run side by side afterwards
                except UnreadableFileError as error:
                    with self._lock:
                        self._slots.pop(key, None)
                        self._refused[path] = (key, error)
                    raise
                self._refused.pop(path, None)
                self._forget(key)
            return slot.trace

    def problems(self) -> list[UnreadableFileError]:
        """The side files that were refused since, as far as they have not changed."""
        return [error for path, (key, error) in list(self._refused.items()) if key == (path, *_stamp(path))]

    def _forget(self, newest: _Key) -> None:
        with self._lock:
            total = 0
            for key in reversed(list(self._slots)):
                trace = self._slots[key].trace
                total += _weight(trace) if trace is not None else 0
                if total > self._most and key != newest and trace is not None:
                    del self._slots[key]


def _weight(trace: MemoryTrace) -> int:
    columns: int = sum(getattr(trace.events, name).nbytes for name in trace.events.__slots__)
    return columns + DERIVED_BYTES * (len(trace.events) + len(trace.start))


def _stamp(path: str) -> tuple[int, int]:
    """Size and time of change: another file under the same name is another window."""
    if files.is_remote(path):
        return (0, 0)
    try:
        status = Path(path).stat()
    except OSError:
        return (-1, -1)
    return (status.st_size, status.st_mtime_ns)
