"""The folder of one writer in a logdir, which TensorBoard shows as a run: claimed once, then appended to."""

from __future__ import annotations

import logging
import os
import platform
import time
import uuid
import weakref

from tb_memplugin.errors import MemPluginError, NoFileError
from tb_memplugin.store import files
from tb_memplugin.store.event_file import first_record
from tb_memplugin.store.growing_file import AppendedFile, GrowingFile, NotOursError, PartFiles, UnsettledError
from tb_memplugin.store.paths import CLAIM, EVENT_FILE_END, SIDE_FOLDER, folder_name
from tb_memplugin.temporary import this_process

_log = logging.getLogger("tb_memplugin")

_MOST_WRITERS = 10_000

_told_by: weakref.WeakValueDictionary[tuple[str, ...], WriterFolder] = weakref.WeakValueDictionary()
"""Who has logged what of a worker in a logdir, whose windows and steps are in folders of their own."""


_workers: dict[tuple[int, str], list[str]] = {}
"""The workers that each process, of those that forked from one another, has written to each logdir."""


def workers_of_process(logdir: str) -> list[str]:
    """Return the names of the workers that this process has written to a logdir, the first one first."""
    return _workers.get((os.getpid(), logdir), [])


class WorkerFolder:
    """A folder that belongs to one writer, and the event file in it.

    Attributes:
        path: a local path or an fsspec URL.
        worker: the worker's name, with a number appended if the folder of the plain name was taken.
        writer_id: unique per writer.
        flushed: whether new files wait for the disk, see `files.write_new`.
    """

    def __init__(self, path: str, worker: str, writer_id: str, *, flushed: bool = False) -> None:
        self.path, self.worker, self.writer_id, self.flushed = path, worker, writer_id, flushed
        maker = f"{folder_name(platform.node())}.{os.getpid()}"
        self._event_stem = f"events.out.tfevents.{int(time.time()):010d}.{maker}"
        self._part = 0
        self._events: AppendedFile = self._growing_file()
        if files.is_remote(path):
            self._events = PartFiles(self._event_file, first_record())

    def is_gone(self) -> bool:
        """Whether the local path no longer leads to this folder. A remote folder is created by writing.

        An error of the file system is no answer: the folder then counts as there, and writing to it tells.
        """
        try:
            return not files.is_remote(self.path) and claimed_by(self.path)[0] != self.writer_id
        except OSError as error:
            return isinstance(error, FileNotFoundError | NotADirectoryError | NoFileError)

    @property
    def is_unsettled(self) -> bool:
        """Whether it is not known if the last events were written; `settle` completes them."""
        return bool(self._events.pending)

    def add_events(self, events: bytes) -> str:
        """Append to the event file. On remote file systems, which cannot append, write a new file instead.

        Returns:
            The file's path.

        Raises:
            UnsettledError: it is not known whether the events were written. They are kept for `settle`.
            OSError: the file system failed. Nothing of the events is in the file.
        """
        self.settle()
        try:
            self._events.append(events)
        except NotOursError:
            try:
                self._go_on_in_next_file()
            except OSError as error:
                raise UnsettledError(error.errno, error.strerror, self._events.path) from error
        return self._events.path

    def settle(self) -> None:
        """Complete events of which it is not known whether they were written.

        Raises:
            OSError: the file system failed; it is still not known.
        """
        try:
            self._events.settle()
        except NotOursError:
            self._go_on_in_next_file()

    def _go_on_in_next_file(self) -> None:
        pending, self._part = self._events.pending, self._part + 1
        self._events = self._growing_file()
        self._events.pending = pending
        self._events.settle()

    def _growing_file(self) -> GrowingFile:
        return GrowingFile(self._event_file(self._part), first_record(), flushed=self.flushed)

    def _event_file(self, part: int) -> str:
        return files.join(self.path, f"{self._event_stem}.{part:06d}{EVENT_FILE_END}")


class WriterFolder:
    """The folder of one writer: claimed at the first use, and again after a fork or when it was deleted.

    When a folder that was gone is back, as that of a disk that is mounted again, the writer goes on in it.

    Args:
        logdir: a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text; the folder's name is made safe from it.
        end: a suffix for the folder's name.
        claimed: a folder that was claimed already.
    """

    def __init__(
        self, logdir: str, worker: str, end: str = "", *, claimed: WorkerFolder | None = None
    ) -> None:
        self._logdir, self._worker, self.end = logdir, worker, end
        self._next_id = uuid.uuid4().hex
        self._pid = os.getpid()
        self._folders = [claimed] if claimed else []
        self._told: set[tuple[str, ...]] = set()

    def current(self) -> WorkerFolder:
        """Return the folder of this process; another object than before where a new one had to be claimed.

        Raises:
            OSError: the folder cannot be created.
            MemPluginError: too many writers have used the worker's name.
        """
        if self._pid != os.getpid():
            self._folders, self._next_id, self._pid = [], uuid.uuid4().hex, os.getpid()
        folder = next((each for each in reversed(self._folders) if not each.is_gone()), None)
        if folder is None:
            claimed = claim_free_folder(self._logdir, self._worker, self.end, self._next_id)
            if claimed.worker != self._worker:
                self._warn_once(
                    "%s already contains recordings of another writer, so this one writes to %s. Give "
                    "each process its own worker_name, and each training its own folder.",
                    files.join(self._logdir, folder_name(f"{self._worker}{self.end}")),
                    claimed.path,
                    about=claimed.worker,
                )
            elif self._folders:
                self._warn_once(
                    "%s is no longer the folder that was written to (it was deleted or moved, or a link was "
                    "changed); later recordings go into a new folder.",
                    self._folders[-1].path,
                    about=self._worker,
                )
            folder, self._next_id = claimed, uuid.uuid4().hex
            self._folders.append(folder)
            _workers.setdefault((self._pid, self._logdir), []).append(claimed.worker)
        return folder

    def settle(self) -> None:
        """Complete events of which it is not known whether they were written, if the folder is still there.

        Raises:
            OSError: the file system failed; it is still not known.
        """
        if any(folder.is_unsettled for folder in self._folders):
            self.current().settle()

    def _warn_once(self, message: str, *values: str, about: str) -> None:
        """Log a warning, unless this writer has, or one of the worker's other kind of recording."""
        key = message, self._logdir, about
        other = _told_by.setdefault(key, self)
        if key not in self._told and other.end == self.end:
            self._told.add(key)
            _log.warning(message, *values)


def claim_free_folder(logdir: str, worker: str, end: str, writer_id: str) -> WorkerFolder:
    """Find the first folder of a worker that has no other writer, and claim it.

    Args:
        logdir: a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text; the folder's name is made safe from it.
        writer_id: the writer's id. To try again with the same one after an error takes the same folder.

    Raises:
        OSError: the folder cannot be created.
        MemPluginError: too many writers have used the worker's name.
    """
    for number in range(1, _MOST_WRITERS):
        name = worker if number == 1 else f"{worker}.{number}"
        folder = files.join(logdir, folder_name(f"{name}{end}"))
        if claim_folder(folder, writer_id):
            return WorkerFolder(folder, name, writer_id)
    raise MemPluginError(
        f"{_MOST_WRITERS} writers have used this worker's folder.", where=logdir, fix="Choose a new folder."
    )


def claim_folder(folder: str, writer_id: str, origin: str = "", state: str = "") -> bool:
    """Create a worker's folder and claim it for one writer. Return False if another writer has used it.

    Args:
        folder: a worker's folder. It need not exist.
        writer_id: an id that is unique per writer.
        origin: the imported file, for an import. The claim then waits for the disk.
        state: what changes when that file does.

    Raises:
        OSError: the folder cannot be created.
    """
    if has_events(folder):
        return False
    files.make_folder(files.join(folder, SIDE_FOLDER))
    writer = f"{writer_id} {this_process()} {state}".rstrip()
    content = f"{writer}\n{origin}" if origin else writer
    path = files.join(folder, SIDE_FOLDER, CLAIM)
    return files.claim(path, content.encode("utf-8", "surrogatepass"), flushed=bool(origin))


def claimed_by(folder: str) -> tuple[str, str]:
    """Return the id of a folder's writer and the text of its process, see `this_process`; "" if not known.

    Raises:
        OSError: the claim cannot be read: FileNotFoundError if there is none, NoFileError for a pipe, say.
    """
    claim = files.read_begin(files.join(folder, SIDE_FOLDER, CLAIM))
    line = claim.partition(b"\n")[0].strip(b"\0")  # zeros: the machine stopped before it was on the disk
    writer_id, process, *_ = [*line.decode("ascii", "replace").split(" "), ""]
    return writer_id, process


def has_events(folder: str) -> bool:
    """Whether the folder contains event files. TensorBoard's Python loader would read only the newest.

    Raises:
        OSError: the file system failed, so that it is not known.
    """
    return any("tfevents" in name for name in files.names_in(folder))
