"""Read the memory of this process from the operating system, for devices without torch counters."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

from tb_memplugin.errors import MemPluginError

_STATUS = "/proc/self/status"
_FIELDS = re.compile(rb"^Vm(HWM|RSS):\s*([0-9]+) kB", re.MULTILINE)


def resident_memory() -> Callable[[], tuple[int, int]]:
    """Return a function that returns the process's resident bytes, and their highest value ever.

    It reads them from Linux, elsewhere from psutil if that is installed.

    Raises:
        MemPluginError: neither is available.
    """
    if os.path.exists(_STATUS) and len(_FIELDS.findall(_read(_STATUS))) == 2:  # noqa: PTH110
        return _from_linux
    try:
        import psutil  # type: ignore[import-untyped,unused-ignore]  # optional
    except ImportError as error:
        raise MemPluginError(
            "The memory of the process cannot be read here.",
            where=sys.platform,
            fix="Install psutil, or give a device that torch has counters for.",
        ) from error
    process = psutil.Process()

    def from_psutil() -> tuple[int, int]:
        info = process.memory_info()
        return info.rss, max(info.rss, getattr(info, "peak_wset", 0))

    return from_psutil


def _from_linux() -> tuple[int, int]:
    found = {name: int(kilobytes) << 10 for name, kilobytes in _FIELDS.findall(_read(_STATUS))}
    return found[b"RSS"], found[b"HWM"]


def _read(path: str) -> bytes:
    """Read a file in one call. It is opened each time, because a forked process has its own status."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 8192)
    finally:
        os.close(descriptor)
