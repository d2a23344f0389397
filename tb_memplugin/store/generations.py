"""Folder names of repeated imports: each import has its own folder, and the newest one counts.

A running TensorBoard keeps what it has read from a folder as long as the folder exists, so new content needs
a new folder: `rank0`, then `rank0.v2`, then `rank0.v3`. The old one is deleted when the new one is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tb_memplugin.store.paths import folder_name

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
