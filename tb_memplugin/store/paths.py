"""Names of files and folders in a logdir, and conversion of any name to a safe one.

Repeated imports: a running TensorBoard keeps what it has read from a folder as long as the folder exists, so
new content needs a new folder: `rank0`, then `rank0.v2`, then `rank0.v3`. The newest counts; the old one is
deleted when the new one is complete.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

PLUGIN_NAME = "tb_memplugin"
"""The plugin's name in TensorBoard: in the metadata of tags, in URLs, and in the logdir."""

SIDE_FOLDER = f"plugins/{PLUGIN_NAME}"
"""The folder of a worker's side files, relative to the worker's folder."""

HEAD_MAGIC = b"\x89TBMEM\r\n"
"""The first bytes of a side file."""

CLAIM = "claimed"
"""The file in the side folder that marks the worker's folder as taken by a writer."""

EVENT_FILE_END = f".{PLUGIN_NAME}"
"""Suffix of this plugin's event files, so that commands need not open other event files."""

STEPS_END = ".steps"
"""Suffix of the worker's folder that contains figures of steps; its windows are in the one without it."""

STEPS_TAG = "memory/steps"
"""The tag of the records with figures of steps."""

_LONGEST = 120
_HOSTILE = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\ud800-\udfff]+')
_SIDE_FILE = re.compile(r"window-([0-9]{6,18})\.mem")


def side_file_name(window: int) -> str:
    """Return the name of the side file of a writer's n-th window, counted from 0."""
    return f"window-{window:06d}.mem"


def is_side_file_name(name: str) -> bool:
    """Whether a name has the form of a side file's name, without folders or anything else."""
    return window_of(name) >= 0


def window_of(name: str) -> int:
    """Return the number of the window whose side file has a name; -1 if it is no side file's name."""
    match = _SIDE_FILE.fullmatch(name)
    return -1 if match is None else int(match[1])


def folder_name(name: str) -> str:
    """Return a folder name for a worker's name: one path component that is valid on every system.

    A name that must be changed ends in a hash of the original, so that different names stay different.
    """
    clean = _HOSTILE.sub("_", name).strip(". ")
    while len(clean.encode()) > _LONGEST:
        clean = clean[: min(len(clean) - 1, _LONGEST)]
    if clean == name and clean:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{clean}-{digest}" if clean else f"worker-{digest}"


def readable(text: str) -> str:
    """Return text that protobuf accepts: lone surrogates, which UTF-8 cannot encode, become `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


_NUMBER = re.compile(r"\.v([1-9][0-9]{0,8})")


def generation_folder(worker: str, number: int) -> str:
    """Return the folder name of a worker's n-th import, counted from 1."""
    return folder_name(worker) if number == 1 else f"{folder_name(worker)}.v{number}"


def generation(folder: str, worker: str) -> int:
    """Return the number of the worker's import that a folder name stands for, from 1; 0 if it is none."""
    name = folder_name(worker)
    if folder == name:
        return 1
    number = _NUMBER.fullmatch(folder.removeprefix(name)) if folder.startswith(name) else None
    return int(number[1]) if number else 0


def superseded(workers: Mapping[str, str]) -> set[str]:
    """Return the folders that a newer import replaces: not yet deleted, or still known to TensorBoard.

    Args:
        workers: the worker's name that each folder's recording contains, by folder.
    """
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    old = set()
    for folder, worker in workers.items():
        above, _, name = folder.replace("\\", "/").rpartition("/")
        number = generation(name, worker)
        if not number:
            continue
        best = newest.setdefault((above, worker), (number, folder))
        if best[1] != folder:
            old.add(min(best, (number, folder))[1])
            newest[above, worker] = max(best, (number, folder))
    return old
