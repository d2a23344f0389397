"""Exported windows: files in the folder for temporary files, each of which is downloaded once."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.formats import write_as
from tb_memplugin.server.turns import holding
from tb_memplugin.trace import MemoryTrace

MOST_WAITING = 2
"""How many files may wait to be fetched. A file of a million events can have hundreds of megabytes."""

_Key = tuple[str, int, int, str]


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported file."""

    path: Path
    bytes: int
    notes: tuple[str, ...]
    """Sentences about what had to be made up or left out."""


class Exports:
    """Writes one file at a time, because each may need hundreds of megabytes of memory for a few seconds.

    A file is deleted when it has been fetched, when too many newer ones wait, and at the end of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[_Key, Exported] = OrderedDict()
        self._folder: Path | None = None
        self._count = 0

    def written(self, key: _Key, trace: MemoryTrace, title: str) -> Exported:
        """Return the file of a window in a format; write it if it does not exist yet.

        Args:
            key: the side file's path, size and time of change, and the format's name.
            trace: the window.
            title: the heading in formats that have one.

        Raises:
            MemPluginError: the file cannot be written.
        """
        with holding(self._lock):
            return self._write(key, trace, title)

    def fetched(self, key: _Key, trace: MemoryTrace, title: str) -> tuple[Exported, BinaryIO]:
        """Return the file, opened for reading, and delete its name.

        Windows keeps the name of an open file: there the caller must call `forget` after closing it.

        Raises:
            MemPluginError: the file cannot be written.
        """
        with holding(self._lock):
            exported = self._write(key, trace, title)
            del self._waiting[key]
            stream = exported.path.open("rb")
            self.forget(exported)
            return exported, stream

    def forget(self, exported: Exported) -> None:
        """Delete a file, if it still exists."""
        with suppress(OSError):
            exported.path.unlink(missing_ok=True)

    def _write(self, key: _Key, trace: MemoryTrace, title: str) -> Exported:
        exported = self._waiting.get(key)
        if exported is None or not exported.path.is_file():
            path = self._new_path()
            notes = _written(key[-1], trace, path, title)
            exported = self._waiting[key] = Exported(path, path.stat().st_size, notes)
        self._waiting.move_to_end(key)
        while len(self._waiting) > MOST_WAITING:
            self.forget(self._waiting.popitem(last=False)[1])
        return exported

    def _new_path(self) -> Path:
        if self._folder is None or not self._folder.is_dir():
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="tb_memplugin-"))
            except OSError as error:
                raise _no_room(str(error)) from error
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count += 1
        return self._folder / f"{self._count}.export"


def _written(format_: str, trace: MemoryTrace, path: Path, title: str) -> tuple[str, ...]:
    try:
        return write_as(format_, trace, path, title)
    except MemPluginError as error:
        if isinstance(error.__cause__, OSError):
            raise _no_room(error.what) from error
        raise


def _no_room(reason: str) -> MemPluginError:
    return MemPluginError(
        f"The server has no place to write the file: {reason}",
        where="TensorBoard's folder for temporary files",
        fix="Make room there, start TensorBoard with another TMPDIR, or use: tb-memplugin export",
    )
