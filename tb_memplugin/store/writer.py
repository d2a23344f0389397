"""Writing recordings into a logdir: what TensorBoard finds while training goes on."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from typing import NoReturn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files
from tb_memplugin.store.blob import pack
from tb_memplugin.store.event_file import first_record, step_record
from tb_memplugin.store.paths import CLAIM, EVENT_FILE_END, SIDE_FOLDER, folder_name, side_file_name
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.store.windows import write_window
from tb_memplugin.trace import MemoryTrace

_log = logging.getLogger("tb_memplugin")

_MOST_WRITERS = 10_000


@dataclass(frozen=True, slots=True)
class WrittenWindow:
    """What one write put where.

    Attributes:
        folder: the worker's folder: a run, for TensorBoard.
        worker: the worker's name, with a number where the folder was taken.
        window: the window's number within the folder, from 0.
        steps: the steps' numbers.
        side_file, event_file: the files written or extended.
        side_file_bytes, summary_bytes: sizes; the latter one entry a step.
    """

    folder: str
    worker: str
    window: int
    steps: tuple[int, ...]
    side_file: str
    event_file: str
    side_file_bytes: int
    summary_bytes: tuple[int, ...]


class RunWriter:
    """Writes the windows of one worker into `<logdir>/<worker>`.

    Nothing is touched before the first write. A folder that another writer has, or had, is left
    alone: `<worker>.2` is taken instead, and so on. One process and its forks may share a writer.

    Args:
        logdir: a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text; its folder has a cleaned one.
    """

    def __init__(self, logdir: str, worker: str) -> None:
        self._logdir, self._worker = os.fspath(logdir), worker
        self._lock = threading.Lock()
        self._pid = -1
        self._folder = ""
        self._taken_worker = worker
        self._writer_id = ""
        self._event_stem = ""
        self._windows = 0

    @classmethod
    def into(cls, folder: str, worker: str, writer_id: str) -> RunWriter:
        """A writer for a folder that `claim_folder` took for it."""
        writer = cls(folder, worker)
        writer._use(folder, worker, writer_id)
        return writer

    def write(self, trace: MemoryTrace) -> WrittenWindow:
        """Write a window: one side file, and one summary a step. Readers see it when this returns.

        Raises:
            MemPluginError: the folder cannot be written or the disk is full. What was written before
                stays readable, and nothing of this window stays behind.
        """
        with self._lock:
            try:
                return self._write(trace)
            except OSError as error:
                self._refuse(error)

    def _write(self, trace: MemoryTrace) -> WrittenWindow:
        if self._pid != os.getpid():
            self._take_folder()
        window = Window(self._taken_worker, self._writer_id, self._windows, side_file_name(self._windows))
        summaries = WindowSummaries(trace, window)
        steps = range(len(trace.steps))
        metadata = [summaries.metadata(row) for row in steps]
        blobs = [pack(lambda limits, row=row: summaries.summary(row, limits)) for row in steps]  # type: ignore[misc]
        events = b"".join(map(step_record, metadata, blobs))
        side_file = files.join(self._folder, SIDE_FOLDER, window.side_file)
        size = files.write_whole(side_file, lambda stream: write_window(stream, trace))
        try:
            event_file = self._add_events(events)
        except OSError:
            files.remove(side_file)
            raise
        self._windows += 1
        return WrittenWindow(
            folder=self._folder,
            worker=self._taken_worker,
            window=window.number,
            steps=tuple(step.number for step in trace.steps),
            side_file=side_file,
            event_file=event_file,
            side_file_bytes=size,
            summary_bytes=tuple(map(len, blobs)),
        )

    def _add_events(self, events: bytes) -> str:
        """Append to the event file; where nothing can be appended to, every window gets a file of its own."""
        part = self._windows if files.is_remote(self._folder) else 0
        path = files.join(self._folder, f"{self._event_stem}.{part:06d}{EVENT_FILE_END}")
        if not files.is_remote(self._folder) and files.exists(path):
            files.append(path, events)
        else:
            files.write_whole(path, lambda stream: stream.write(first_record() + events))
        return path

    def _take_folder(self) -> None:
        """Find the first folder that no writer has, and claim it."""
        writer_id = uuid.uuid4().hex
        for number in range(1, _MOST_WRITERS):
            worker = self._worker if number == 1 else f"{self._worker}.{number}"
            folder = files.join(self._logdir, folder_name(worker))
            if not claim_folder(folder, writer_id):
                continue
            if number > 1:
                _log.warning(
                    "%s already holds recordings of another writer; this one writes to %s. "
                    "Give each process its own worker_name, and each training its own folder.",
                    files.join(self._logdir, folder_name(self._worker)),
                    folder,
                )
            self._use(folder, worker, writer_id)
            return
        raise MemPluginError(
            f"{_MOST_WRITERS} writers have used this worker's folder.",
            where=self._logdir,
            fix="Choose a new folder.",
        )

    def _use(self, folder: str, worker: str, writer_id: str) -> None:
        self._pid, self._folder = os.getpid(), folder
        self._taken_worker, self._writer_id = worker, writer_id
        maker = f"{folder_name(socket.gethostname())}.{os.getpid()}"
        self._event_stem = f"events.out.tfevents.{int(time.time()):010d}.{maker}"
        self._windows = 0

    def _refuse(self, error: OSError) -> NoReturn:
        raise MemPluginError(
            f"The memory profile could not be written: {error.strerror or error}.",
            where=self._folder or self._logdir,
            fix="Free space on the disk, or choose a folder that this process may write to.",
        ) from error


def claim_folder(folder: str, writer_id: str, origin: str = "") -> bool:
    """Make a worker's folder and take it for one writer; False where it has, or had, another.

    Args:
        folder: a worker's folder. It need not exist.
        writer_id: unique per writer.
        origin: of an import, the file that it comes from.

    Raises:
        OSError: the folder cannot be made.
    """
    if _has_events(folder):
        return False
    files.make_folder(files.join(folder, SIDE_FOLDER))
    content = f"{writer_id}\n{origin}" if origin else writer_id
    return files.claim(files.join(folder, SIDE_FOLDER, CLAIM), content.encode("utf-8", "surrogatepass"))


def _has_events(folder: str) -> bool:
    """Whether somebody's event files are there: TensorBoard's Python path reads the newest one only."""
    _, names = next(iter(files.walk(folder)), ("", []))
    return any("tfevents" in name for name in names)
