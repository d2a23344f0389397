"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

LARGE = 1 << 20
"""From how many bytes on a block goes back as soon as it is freed."""

POOLS = 2
"""From how many pools threads take smaller blocks; each pool keeps what it needed once."""

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc's malloc.h


def give_back_freed_memory() -> None:
    """Have glibc give every freed large array back to the system, and share pools of smaller blocks.

    By default it keeps blocks of up to 32 MB, in eight pools for each core. TensorBoard handles every request
    in a thread of its own, so that after requests of many clients several hundred megabytes stay.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_THRESHOLD, LARGE)
            library.mallopt(_M_ARENA_MAX, POOLS)
