"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

LARGE = 1 << 20
"""From how many bytes on a block goes back as soon as it is freed."""

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def give_back_large_arrays() -> None:
    """Have glibc give every large array back to the system when it is freed.

    By default it keeps blocks of up to 32 MB, one pool for each of many threads. TensorBoard handles every
    request in a thread of its own, so that after requests of many clients several hundred megabytes stay.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE)
