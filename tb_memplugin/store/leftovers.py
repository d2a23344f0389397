"""Deletes what killed writers left: temporary files, and the side file of a window that was not finished.

A file is deleted only if its name or its folder's claim says that it is ours, and its writer has ended. That
is known of processes of this boot and this namespace of process ids. Of other processes' files age tells: no
write takes a week.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from tb_memplugin.proto.metadata_pb2 import StepMetadata
from tb_memplugin.store import files
from tb_memplugin.store.event_file import blobs_of
from tb_memplugin.store.paths import EVENT_FILE_END, SIDE_FOLDER, STEPS_TAG, is_side_file_name
from tb_memplugin.store.records import is_cut, records
from tb_memplugin.store.worker_folder import claimed_by
from tb_memplugin.temporary import UNKNOWN_SECONDS, age_seconds, delete_left, has_ended

MOST_FOLDERS = 1_000
"""The largest number of workers' folders of a logdir that are searched."""


def clear_logdir(logdir: str) -> None:
    """Delete what killed writers left in the workers' folders of a local logdir. Failures are ignored."""
    if files.is_remote(logdir):
        return
    with suppress(OSError):
        for name in files.folders_in(logdir)[:MOST_FOLDERS]:
            clear_folder(files.join(logdir, name))


def clear_folder(folder: str) -> None:
    """Delete what a killed writer left in a worker's local folder. Failures are ignored."""
    side = files.join(folder, SIDE_FOLDER)
    with suppress(OSError):
        if not files.is_folder(side):
            return
        for parent in (folder, side):
            delete_left(parent)
        if not files.names_in(side) and age_seconds(side) > UNKNOWN_SECONDS:
            for path in (side, files.join(folder, "plugins"), folder):
                files.remove_empty_folder(path)
            return
        if has_ended(claimed_by(folder)[1]):
            _clear_unfinished(folder, side)


def _clear_unfinished(folder: str, side: str) -> None:
    """Delete the last side file if no step names it. If the event file is damaged, everything stays."""
    windows = sorted(filter(is_side_file_name, files.names_in(side)))
    events = [files.join(folder, name) for name in files.names_in(folder) if name.endswith(EVENT_FILE_END)]
    if not windows:
        return
    last = files.join(side, windows[-1])
    if any(_changed_ns(path) > _changed_ns(last) for path in events):
        return  # the steps of a window are written after its side file
    if all(_is_silent_about(path, windows[-1]) for path in events):
        files.remove(last)


def _is_silent_about(path: str, side_file: str) -> bool:
    """Whether an event file is whole, but for a last record that was cut, and names no such side file."""
    end = 0
    with files.open_ranges(path) as (read, size):
        for data, begin, reached in records(read, size):
            if begin != end:
                return False
            end = reached
            try:
                blobs = [content for tag, content, _ in blobs_of(data) if tag != STEPS_TAG]
                steps = map(StepMetadata.FromString, blobs)
                if any(step.side_file == side_file for step in steps):
                    return False
            except DecodeError:
                return False
        return end > 0 and is_cut(read, size, end)


def _changed_ns(path: str) -> int:
    return Path(path).stat().st_mtime_ns
