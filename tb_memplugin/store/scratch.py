"""Large columns in files of their own without a name, so that memory follows what is looked at.

They are ours alone: nobody can shorten them, as somebody may a side file while it is mapped.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from tb_memplugin.trace.tables import Array, in_memory

MAPPED_FROM = 4 << 20
"""From how many bytes on an array is mapped."""

_STATM = Path("/proc/self/statm")
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def joined(pieces: Callable[[], Iterable[Array]]) -> Array:
    """Return pieces as one array. A large one is read-only, and in a scratch file if there is room.

    Pages of scratch files are in memory only while they are used. They lie in `TMPDIR`, else in /var/tmp.

    Args:
        pieces: yields arrays of one dtype and width; called again where a file could not be written.
    """
    coming, first, size = iter(pieces()), list[Array](), 0
    for piece in coming:
        first.append(piece)
        size += piece.nbytes
        if size >= MAPPED_FROM:
            break
    else:
        return in_memory(first)
    try:
        with tempfile.TemporaryFile(buffering=0, dir=_folder()) as file:
            for piece in chain(first, coming):
                _write(file, np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return in_memory(list(pieces()))
    _maps.add(content)
    return np.frombuffer(content, piece.dtype).reshape(-1, *piece.shape[1:])  # type: ignore[return-value]


def _folder() -> str | None:
    """Return where scratch files lie: /tmp may be in memory. None is the folder of `tempfile`."""
    return None if "TMPDIR" in os.environ or not Path("/var/tmp").is_dir() else "/var/tmp"


def _write(file: IO[bytes], content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def is_mapped(values: np.ndarray) -> bool:
    """Return whether an array is one of those in scratch files, or a view of one."""
    base = values.base
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, memoryview | mmap.mmap)


def release(most_bytes: int) -> None:
    """Give pages of scratch files back to the system if more than `most_bytes` are in memory (Linux)."""
    try:
        resident = int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except OSError:
        return
    if resident > most_bytes:
        for content in list(_maps):
            content.madvise(mmap.MADV_DONTNEED)
