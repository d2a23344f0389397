"""The folder of one writer in a logdir, which TensorBoard shows as a run: claimed once, then appended to."""

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
        worker: the worker's name, with a number appended if the folder of the plain name was taken.
        writer_id: unique per writer.
    """

    def __init__(self, path: str, worker: str, writer_id: str) -> None:
        self.path, self.worker, self.writer_id = path, worker, writer_id
        maker = f"{folder_name(socket.gethostname())}.{os.getpid()}"
        self._event_stem = f"events.out.tfevents.{int(time.time()):010d}.{maker}"
        self._parts = 0

    def is_gone(self) -> bool:
        """Whether the local folder was deleted; logs a warning. A remote folder is created by writing."""
        if files.is_remote(self.path) or files.exists(files.join(self.path, SIDE_FOLDER, CLAIM)):
            return False
        _log.warning("%s was deleted; later recordings go into a new folder.", self.path)
        return True

    def add_events(self, events: bytes) -> str:
        """Append to the event file. On remote file systems, which cannot append, write a new file instead.

        Returns:
            The file's path.

        Raises:
            OSError: the file system failed. The file is unchanged.
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
    """Find the first folder of a worker that has no writer, and claim it.

    Args:
        logdir: a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text; the folder's name is made safe from it.
        end: a suffix for the folder's name.

    Raises:
        OSError: the folder cannot be created.
        MemPluginError: too many writers have used the worker's name.
    """
    writer_id = uuid.uuid4().hex
    for number in range(1, _MOST_WRITERS):
        name = worker if number == 1 else f"{worker}.{number}"
        folder = files.join(logdir, folder_name(f"{name}{end}"))
        if not claim_folder(folder, writer_id):
            continue
        if number > 1:
            _log.warning(
                "%s already contains recordings of another writer, so this one writes to %s. Give "
                "each process its own worker_name, and each training its own folder.",
                files.join(logdir, folder_name(f"{worker}{end}")),
                folder,
            )
        return WorkerFolder(folder, name, writer_id)
    raise MemPluginError(
        f"{_MOST_WRITERS} writers have used this worker's folder.", where=logdir, fix="Choose a new folder."
    )


def claim_folder(folder: str, writer_id: str, origin: str = "") -> bool:
    """Create a worker's folder and claim it for one writer. Return False if another writer has used it.

    Args:
        folder: a worker's folder. It need not exist.
        writer_id: an id that is unique per writer.
        origin: the imported file, for an import.

    Raises:
        OSError: the folder cannot be created.
    """
    if has_events(folder):
        return False
    files.make_folder(files.join(folder, SIDE_FOLDER))
    content = f"{writer_id}\n{origin}" if origin else writer_id
    return files.claim(files.join(folder, SIDE_FOLDER, CLAIM), content.encode("utf-8", "surrogatepass"))


def has_events(folder: str) -> bool:
    """Whether the folder contains event files. TensorBoard's Python loader would read only the newest."""
    return any("tfevents" in name for name in files.names_in(folder))
