"""Large columns in files of their own without a name, so that memory follows what is looked at.

They are ours alone: nobody can shorten them, as somebody may a side file while it is mapped.
"""

from __future__ import annotations

import mmap
import tempfile
import weakref
from pathlib import Path
from typing import TypeVar

import numpy as np

MAPPED_FROM = 4 << 20
"""From how many bytes on an array is mapped."""

_STATM = Path("/proc/self/statm")
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

Array = TypeVar("Array", bound=np.ndarray)


def mapped(values: Array) -> Array:
    """Return the same values, read-only; many of them in a scratch file, in memory where that is full.

    Its pages are in memory only while they are used. The folder is that of `tempfile` (`TMPDIR`).
    """
    if values.nbytes < MAPPED_FROM or 0 in values.strides:
        return values
    try:
        with tempfile.TemporaryFile() as file:
            file.write(np.ascontiguousarray(values).data)
            file.flush()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return values
    _maps.add(content)
    return np.frombuffer(content, values.dtype).reshape(values.shape)  # type: ignore[return-value]


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
