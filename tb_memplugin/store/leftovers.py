"""Deletes what killed writers left: temporary files, and the side file of a window that was not finished.

A file is deleted only if its name or its folder's claim says that it is ours, and its writer has ended. That
is known of processes of this boot and this namespace of process ids. Of other processes' files age tells: no
write takes a week.
"""

from __future__ import annotations

from contextlib import suppress

from google.protobuf.message import DecodeError

from tb_memplugin.proto.recording_pb2 import StepMetadata
from tb_memplugin.store import files
from tb_memplugin.store.event_file import blobs_of
from tb_memplugin.store.paths import EVENT_FILE_END, SIDE_FOLDER, STEPS_TAG, is_side_file_name, window_of
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
    """Delete the side files of windows of which the event file shows that they were not finished.

    Steps are appended in the order of their windows. So a window that has none, before one that has some,
    failed, and only one after them may have been killed. Where the event file is damaged or gone, or someone
    else changed it so that there are several, nothing is known, and everything stays.
    """
    windows = set(filter(is_side_file_name, files.names_in(side)))
    events = [files.join(folder, name) for name in files.names_in(folder) if name.endswith(EVENT_FILE_END)]
    if not windows or len(events) != 1:
        return
    named = _side_files_named(events[0])
    if named is None:
        return
    last = max(map(window_of, named), default=-1)
    later = {name for name in windows if window_of(name) > last}
    for name in windows - named - (later if len(later) > 1 else set()):
        files.remove(files.join(side, name))


def _side_files_named(path: str) -> set[str] | None:
    """Return the side files that an event file's steps name; None if it is damaged, but for a cut record."""
    named = set()
    with files.open_ranges(path) as (read, size):
        end = 0
        for data, begin, reached in records(read, size):
            if begin != end:
                return None
            end = reached
            try:
                for tag, content, _ in blobs_of(data):
                    if tag != STEPS_TAG:
                        named.add(StepMetadata.FromString(content).side_file)
            except DecodeError:
                return None
        return named if end > 0 and is_cut(read, size, end) else None
