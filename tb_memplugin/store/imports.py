"""Write a trace from another file into a logdir, replacing an earlier import of the same file."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tb_memplugin.errors import MemPluginError, NoFileError, fix_of
from tb_memplugin.store import files
from tb_memplugin.store.leftovers import clear_folder
from tb_memplugin.store.paths import (
    CLAIM,
    EVENT_FILE_END,
    SIDE_FOLDER,
    folder_name,
    generation,
    generation_folder,
    is_side_file_name,
)
from tb_memplugin.store.worker_folder import claim_folder, has_events
from tb_memplugin.store.writer import RunWriter, WrittenWindow
from tb_memplugin.temporary import age_seconds, is_running, this_process
from tb_memplugin.trace import MemoryTrace

FILL_SECONDS = 0.2
"""Seconds after which an empty claim counts as left by a process that was killed."""

ABANDONED = "\0"
"""The owner of a folder whose claim is empty. No file has this name."""

FOREIGN = b"?"
"""A claim that no writer of ours has, so that its folder counts as another's."""

MOST_SECONDS = 600
"""How long an import waits for another process that writes one of the same file."""

UNKNOWN_WRITER_SECONDS = 60
"""The age to which the claim of a process of which nothing is known, on another machine, counts as in use."""

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


def imported_as(run_folder: str, worker: str, origin: str, state: str) -> str | None:
    """Return the name of the worker that is the import of a file in this state, None if it is not imported.

    What interrupted imports of the file left beside it is deleted.

    Args:
        run_folder, worker, origin, state: as for `write_import`.
    """
    if not state:
        return None
    wanted = f" {state}\n{origin}".encode("utf-8", "surrogatepass")
    with suppress(OSError):  # to write there tells why
        older: list[str] = []
        complete: list[tuple[int, str, str]] = []
        for name, paths in _workers(run_folder, worker):
            if name != worker and not paths:
                break
            ours = {number: path for number, path in paths.items() if _owner(path) in (origin, ABANDONED)}
            older += ours.values()
            complete += [(number, name, path) for number, path in ours.items() if _has_content(path)]
        if complete and (_claim_of(newest := max(complete)[2]) or b"").endswith(wanted):
            for folder in older:
                if folder != newest and not _is_in_progress(folder):
                    _delete(folder)
            if not files.is_remote(newest):
                clear_folder(newest)  # killed before it deleted its temporary files
            return max(complete)[1]
    return None


def write_import(run_folder: str, worker: str, origin: str, trace: MemoryTrace, state: str = "") -> Import:
    """Write a trace as a worker of a run, replacing an earlier import of the same file.

    The earlier import stays readable until the new one is complete, then it is deleted. If the worker's
    name belongs to another file or to a recording, `<worker>.2` is used, and so on.

    Args:
        run_folder: the run's folder, a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text.
        origin: the absolute path or URL of the imported file.
        state: what changes when the file does, without spaces, for `imported_as`. It is kept in the claim.

    Raises:
        MemPluginError: the folder cannot be written or the disk is full. Earlier content stays.
    """
    try:
        claim = _claim_worker(run_folder, worker, origin, state)
        written = _write(claim, trace)
    except OSError as error:
        raise MemPluginError(
            f"The import could not be written: {error.strerror or error}.",
            where=run_folder,
            fix=fix_of(error, "Choose a folder that you can write to."),
        ) from error
    for folder in claim.older:
        _delete(folder)
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


def _claim_worker(run_folder: str, wanted: str, origin: str, state: str) -> _Claim:
    """Claim the next folder of the first worker name that is free or belongs to an import of this file."""
    writer_id, refused = uuid.uuid4().hex, set[str]()
    patience = time.monotonic() + MOST_SECONDS
    while True:
        older: list[str] = []
        free: _Claim | None = None
        for worker, paths in _workers(run_folder, wanted):
            if free is not None and not paths:
                break  # further names have not been used, so that no import of this file has one
            owners = {number: owner for number, path in paths.items() if (owner := _owner(path)) is not None}
            older += [paths[number] for number, owner in owners.items() if owner in (origin, ABANDONED)]
            folder = files.join(run_folder, generation_folder(worker, max(owners, default=0) + 1))
            if free is None and folder not in refused and {origin, ABANDONED}.issuperset(owners.values()):
                free = _Claim(folder, worker, writer_id)
        if free is None:
            raise MemPluginError(
                f"{_MOST_NAMES} files of this name have been imported.",
                where=run_folder,
                fix="Give another --run.",
            )
        if any(map(_is_in_progress, older)) and time.monotonic() < patience:
            time.sleep(FILL_SECONDS)
            continue
        if not files.is_remote(free.folder):
            clear_folder(free.folder)  # killed between creating and claiming it
        if not claim_folder(free.folder, writer_id, origin, state):  # another process was faster
            refused.add(free.folder)
            continue
        if _are_anothers(_folders_of(files.folders_in(run_folder), run_folder, free.worker), origin):
            _delete(free.folder)  # another process took the name meanwhile
            continue
        return replace(free, older=tuple(older))


def _workers(run_folder: str, wanted: str) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield the names that a worker may get, each with the folders of its imports, by import number."""
    names = files.folders_in(run_folder)
    for number in range(1, _MOST_NAMES):
        worker = wanted if number == 1 else f"{wanted}.{number}"
        yield worker, _folders_of(names, run_folder, worker)


def _folders_of(names: Sequence[str], run_folder: str, worker: str) -> dict[int, str]:
    """Return the folders of a worker's imports among the names in a run's folder, by import number."""
    begin = folder_name(worker)
    numbers = {generation(name, worker): name for name in names if name.startswith(begin)}
    return {number: files.join(run_folder, name) for number, name in numbers.items() if number}


def _is_in_progress(folder: str) -> bool:
    """Whether another process writes an import into a folder now, as far as that is known."""
    claim = _claim_of(folder)
    if not claim or _has_content(folder):
        return False
    process = claim.partition(b"\n")[0].decode("ascii", "replace").split(" ")[1:2]
    if not process or process[0] == this_process():
        return False
    running = is_running(process[0])
    if running is None and not files.is_remote(folder):
        return age_seconds(files.join(folder, SIDE_FOLDER, CLAIM)) < UNKNOWN_WRITER_SECONDS
    return bool(running)


def _has_content(folder: str) -> bool:
    """Whether an import into a folder was completed: its steps are written last, all at once.

    Where there are no hard links, an empty event file is there before.
    """
    steps = [files.join(folder, name) for name in files.names_in(folder) if name.endswith(EVENT_FILE_END)]
    return any(files.is_remote(folder) or files.read_begin(path, 1) for path in steps) and any(
        map(is_side_file_name, files.names_in(files.join(folder, SIDE_FOLDER)))
    )


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
    """Return the content of a folder's claim, None if it has none, `FOREIGN` of what is no file."""
    try:
        return files.read_begin(files.join(folder, SIDE_FOLDER, CLAIM))
    except NoFileError:
        return FOREIGN
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
