"""Write a trace from another file into a logdir, replacing an earlier import of the same file."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace

from tb_memplugin.errors import MemPluginError, fix_of
from tb_memplugin.store import files
from tb_memplugin.store.generations import generation, generation_folder
from tb_memplugin.store.leftovers import clear_folder, clear_logdir
from tb_memplugin.store.paths import CLAIM, EVENT_FILE_END, SIDE_FOLDER, is_side_file_name
from tb_memplugin.store.worker_folder import claim_folder, has_events
from tb_memplugin.store.writer import RunWriter, WrittenWindow
from tb_memplugin.trace import MemoryTrace

FILL_SECONDS = 0.2
"""Seconds after which an empty claim counts as left by a process that was killed."""

ABANDONED = "\0"
"""The owner of a folder whose claim is empty. No file has this name."""

_MOST_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class Import:
    """The result of an import; `replaced` tells whether an earlier import of the file was deleted."""

    written: WrittenWindow
    replaced: bool


@dataclass(frozen=True, slots=True)
class _Claim:
    folder: str
    worker: str
    writer_id: str
    older: tuple[str, ...] = ()


def write_import(run_folder: str, worker: str, origin: str, trace: MemoryTrace) -> Import:
    """Write a trace as a worker of a run, replacing an earlier import of the same file.

    The earlier import stays readable until the new one is complete, then it is deleted. If the worker's
    name belongs to another file or to a recording, `<worker>.2` is used, and so on.

    Args:
        run_folder: the run's folder, a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text.
        origin: the absolute path or URL of the imported file.
        trace: the trace of that file.

    Raises:
        MemPluginError: the folder cannot be written or the disk is full. Earlier content stays.
    """
    try:
        claim = _claim_worker(run_folder, worker, origin)
        written = _write(claim, trace)
    except OSError as error:
        raise MemPluginError(
            f"The import could not be written: {error.strerror or error}.",
            where=run_folder,
            fix=fix_of(error, "Choose a folder that you can write to."),
        ) from error
    for folder in claim.older:
        _delete(folder)
    clear_logdir(run_folder)
    return Import(written, bool(claim.older))


def _write(claim: _Claim, trace: MemoryTrace) -> WrittenWindow:
    """Write the trace and wait until the disk has it, before it loses an older one.

    Raises:
        OSError, MemPluginError: the folder cannot be written. Nothing of it remains.
    """
    try:
        written = RunWriter.into(claim.folder, claim.worker, claim.writer_id).write(trace)
        if not files.is_remote(claim.folder):
            files.flush_path(claim.folder)  # again: a failure after the last file has its name is no error
    except BaseException:
        _delete(claim.folder)
        raise
    return written


def _claim_worker(run_folder: str, wanted: str, origin: str) -> _Claim:
    """Claim the next folder of the first worker name that is free or belongs to an import of this file."""
    writer_id = uuid.uuid4().hex
    older: list[str] = []
    claim: _Claim | None = None
    for number in range(1, _MOST_NAMES):
        worker = wanted if number == 1 else f"{wanted}.{number}"
        paths = _folders_of(run_folder, worker)
        older += [path for path in paths.values() if _owner(path) in (origin, ABANDONED)]
        if claim is not None:
            if not paths:
                break  # further names have not been used, so that no import of this file has one
            continue
        if _are_anothers(paths, origin):
            continue
        folder = files.join(run_folder, generation_folder(worker, max(paths, default=0) + 1))
        if not claim_folder(folder, writer_id, origin):
            continue
        if _are_anothers(_folders_of(run_folder, worker), origin):  # another process took the name meanwhile
            _delete(folder)
            continue
        claim = _Claim(folder, worker, writer_id)
    if claim is None:
        raise MemPluginError(
            f"{_MOST_NAMES} files of this name have been imported.",
            where=run_folder,
            fix="Give another --run.",
        )
    return replace(claim, older=tuple(older))


def _folders_of(run_folder: str, worker: str) -> dict[int, str]:
    """Return the folders of a worker's imports, by import number."""
    folders = {
        generation(name, worker): files.join(run_folder, name) for name in files.folders_in(run_folder)
    }
    folders.pop(0, None)
    return folders


def _are_anothers(paths: dict[int, str], origin: str) -> bool:
    """Whether one of the folders contains an import of another file, or a recording."""
    return any(_owner(path) not in (origin, ABANDONED, None) for path in paths.values())


def _owner(folder: str) -> str | None:
    """Return the file from which a folder was imported, "" if it contains a recording, None if neither.

    An empty claim is `ABANDONED`: a claim is created with its content, except where the file system has no
    hard links and by older versions, and those fill it at once unless they are killed.

    Raises:
        OSError: the file system failed, so that it is not known.
    """
    content = _claim_of(folder)
    if content == b"" and not has_events(folder):
        time.sleep(FILL_SECONDS)
        content = _claim_of(folder)
        if content == b"" and not has_events(folder):
            return ABANDONED
    if content is not None:
        return content.partition(b"\n")[2].decode("utf-8", "surrogatepass")
    return "" if has_events(folder) else None


def _claim_of(folder: str) -> bytes | None:
    """Return the content of a folder's claim, None if it has none."""
    try:
        return files.read_begin(files.join(folder, SIDE_FOLDER, CLAIM))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _delete(folder: str) -> None:
    """Delete the files of an import, event files first, and then its folders if they are empty.

    After a failure the rest stays, the claim above all: by it the next import of the file deletes them.
    """
    side = files.join(folder, SIDE_FOLDER)
    if not files.is_remote(folder):
        clear_folder(folder)
    with suppress(OSError):
        for parent, ours in ((folder, lambda name: name.endswith(EVENT_FILE_END)), (side, is_side_file_name)):
            for name in filter(ours, files.names_in(parent)):
                files.remove(files.join(parent, name))
        files.remove(files.join(side, CLAIM))
        for path in (side, files.join(folder, "plugins"), folder):
            files.remove_empty_folder(path)
