"""Memory that was freed goes back to the system.

TensorBoard handles every request in a thread of its own. glibc has up to eight pools for each core, and each
keeps what its threads needed once: after requests of many clients several hundred megabytes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress

LARGE = 1 << 17
"""From how many bytes on a block goes back as soon as it is freed. glibc raises this to 32 MB by itself."""

AFTER_SECONDS = 2.0
"""How long after a request smaller blocks go back. It takes some milliseconds, in which others compute."""

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


class FreedMemory:
    """Has glibc give freed memory back. Does nothing with another C library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._lock = threading.Lock()
        self._waits = False
        with suppress(AttributeError, OSError):
            if self._library is not None:
                self._library.mallopt(_M_MMAP_THRESHOLD, LARGE)

    def give_back_soon(self) -> None:
        """Give freed memory back in two seconds, unless that is planned already."""
        with self._lock:
            if self._waits:
                return
            self._waits = True
        timer = threading.Timer(AFTER_SECONDS, self._give_back)
        timer.daemon = True
        timer.start()

    def _give_back(self) -> None:
        with self._lock:
            self._waits = False
        with suppress(AttributeError, OSError):
            if self._library is not None:
                self._library.malloc_trim(0)
