"""The folder of one writer in a logdir: a run, for TensorBoard. Taken once, then added to."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files
from tb_memplugin.store.event_file import first_record
from tb_memplugin.store.paths import CLAIM, EVENT_FILE_END, SIDE_FOLDER, folder_name

_log = logging.getLogger("tb_memplugin")

_MOST_WRITERS = 10_000


class WorkerFolder:
    """A folder that belongs to one writer, and the event file in it.

    Attributes:
        path: a local path or an fsspec URL.
        worker: the worker's name, with a number where the folder of the plain name was taken.
        writer_id: unique per writer.
    """

    def __init__(self, path: str, worker: str, writer_id: str) -> None:
        self.path, self.worker, self.writer_id = path, worker, writer_id
        maker = f"{folder_name(socket.gethostname())}.{os.getpid()}"
        self._event_stem = f"events.out.tfevents.{int(time.time()):010d}.{maker}"
        self._parts = 0

    def is_gone(self) -> bool:
        """Whether somebody deleted it, which is told. Elsewhere than here, writing makes it again."""
        if files.is_remote(self.path) or files.exists(files.join(self.path, SIDE_FOLDER, CLAIM)):
            return False
        _log.warning("%s was deleted; what is recorded from here on goes into a new one.", self.path)
        return True

    def add_events(self, events: bytes) -> str:
        """Append to the event file; where nothing can be appended to, every call makes a file of its own.

        Returns:
            The file's path.

        Raises:
            OSError: what the file system says. The file is as it was.
        """
        part = self._parts if files.is_remote(self.path) else 0
        path = files.join(self.path, f"{self._event_stem}.{part:06d}{EVENT_FILE_END}")
        if not files.is_remote(self.path) and files.exists(path):
            files.append(path, events)
        else:
            files.write_whole(path, lambda stream: stream.write(first_record() + events))
        self._parts += 1
        return path


def take_folder(logdir: str, worker: str, end: str = "") -> WorkerFolder:
    """Find the first folder of a worker that no writer has, and claim it.

    Args:
        logdir: a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text; its folder has a cleaned one.
        end: how the folder's name ends, beside the worker's.

    Raises:
        OSError: the folder cannot be made.
        MemPluginError: far too many writers were here.
    """
    writer_id = uuid.uuid4().hex
    for number in range(1, _MOST_WRITERS):
        name = worker if number == 1 else f"{worker}.{number}"
        folder = files.join(logdir, folder_name(f"{name}{end}"))
        if not claim_folder(folder, writer_id):
            continue
        if number > 1:
            _log.warning(
                "%s already holds recordings of another writer; this one writes to %s. "
                "Give each process its own worker_name, and each training its own folder.",
                files.join(logdir, folder_name(f"{worker}{end}")),
                folder,
            )
        return WorkerFolder(folder, name, writer_id)
    raise MemPluginError(
        f"{_MOST_WRITERS} writers have used this worker's folder.",
        where=logdir,
        fix="Choose a new folder.",
    )


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
