"""Writing a trace from elsewhere into a logdir, in the place of what the same file gave before."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files
from tb_memplugin.store.generations import generation, generation_folder
from tb_memplugin.store.paths import CLAIM, EVENT_FILE_END, SIDE_FOLDER, is_side_file_name
from tb_memplugin.store.worker_folder import claim_folder
from tb_memplugin.store.writer import RunWriter, WrittenWindow
from tb_memplugin.trace import MemoryTrace

_MOST_NAMES = 10_000


@dataclass(frozen=True, slots=True)
class Import:
    """What an import put where; `replaced` says that an earlier import of the file had to go."""

    written: WrittenWindow
    replaced: bool


@dataclass(frozen=True, slots=True)
class _Place:
    folder: str
    worker: str
    writer_id: str
    older: tuple[str, ...]


def write_import(run_folder: str, worker: str, origin: str, trace: MemoryTrace) -> Import:
    """Write a trace as a worker of a run; what the same file gave before is deleted when the new is whole.

    Until then the old one stays readable. Where the worker's name belongs to another file or to a
    recording, `<worker>.2` is taken, and so on.

    Args:
        run_folder: the run's folder, a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text.
        origin: which file it is: its absolute path or URL.
        trace: what it holds.

    Raises:
        MemPluginError: the folder cannot be written or the disk is full. What was there stays.
    """
    try:
        place = _take_place(run_folder, worker, origin)
    except OSError as error:
        raise MemPluginError(
            f"The import could not be written: {error.strerror or error}.",
            where=run_folder,
            fix="Free space on the disk, or choose a folder that you may write to.",
        ) from error
    try:
        written = RunWriter.into(place.folder, place.worker, place.writer_id).write(trace)
    except BaseException:
        _delete(place.folder)
        raise
    for folder in place.older:
        _delete(folder)
    return Import(written, bool(place.older))


def _take_place(run_folder: str, wanted: str, origin: str) -> _Place:
    """Claim the next folder of the first name that is free, or that an earlier import of the file has."""
    writer_id = uuid.uuid4().hex
    for number in range(1, _MOST_NAMES):
        worker = wanted if number == 1 else f"{wanted}.{number}"
        paths = _folders_of(run_folder, worker)
        if _are_anothers(paths, origin):
            continue
        folder = files.join(run_folder, generation_folder(worker, max(paths, default=0) + 1))
        if not claim_folder(folder, writer_id, origin):
            continue
        if _are_anothers(_folders_of(run_folder, worker), origin):  # another process took the name meanwhile
            _delete(folder)
            continue
        older = tuple(path for path in paths.values() if _origin(path) == origin)
        return _Place(folder, worker, writer_id, older)
    raise MemPluginError(
        f"{_MOST_NAMES} files of this name have been imported.", where=run_folder, fix="Give another --run."
    )


def _folders_of(run_folder: str, worker: str) -> dict[int, str]:
    """The folders of a worker's imports, by their number."""
    found = {generation(name, worker): files.join(run_folder, name) for name in files.folders_in(run_folder)}
    found.pop(0, None)
    return found


def _are_anothers(paths: dict[int, str], origin: str) -> bool:
    """Whether one of the folders is from another file, or a recording."""
    return any(_origin(path) not in (origin, None) for path in paths.values())


def _origin(folder: str) -> str | None:
    """The file from which a folder was imported, "" if a writer recorded there, None if nobody did.

    Also "" where a claim has nothing in it yet: somebody is writing it.
    """
    claim = files.join(folder, SIDE_FOLDER, CLAIM)
    content = files.read_small(claim)
    if content or files.exists(claim):
        return content.partition(b"\n")[2].decode("utf-8", "surrogatepass")
    _, names = next(iter(files.walk(folder)), ("", []))
    return "" if any("tfevents" in name for name in names) else None


def _delete(folder: str) -> None:
    """Delete what an import wrote, event files first, and the folders if nothing else is in them."""
    side = files.join(folder, SIDE_FOLDER)
    for place, ours in ((folder, lambda name: name.endswith(EVENT_FILE_END)), (side, is_side_file_name)):
        _, names = next(iter(files.walk(place)), ("", []))
        for name in filter(ours, names):
            files.remove(files.join(place, name))
    files.remove(files.join(side, CLAIM))
    for path in (side, files.join(folder, "plugins"), folder):
        files.remove_empty_folder(path)
