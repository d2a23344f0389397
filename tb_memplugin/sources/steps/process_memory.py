"""The memory of this process as the system counts it: what there is to say where torch counts nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

from tb_memplugin.errors import MemPluginError

_STATUS = "/proc/self/status"
_FIELDS = re.compile(rb"^Vm(HWM|RSS):\s*([0-9]+) kB", re.MULTILINE)


def resident_memory() -> Callable[[], tuple[int, int]]:
    """A function that gives the process's resident bytes, and the highest there ever were.

    Linux tells both; elsewhere psutil does, where it is installed.

    Raises:
        MemPluginError: nothing here tells them.
    """
    if os.path.exists(_STATUS) and len(_FIELDS.findall(_read(_STATUS))) == 2:  # noqa: PTH110
        return _from_linux
    try:
        import psutil  # type: ignore[import-untyped,unused-ignore]  # no requirement of ours
    except ImportError as error:
        raise MemPluginError(
            "Nothing here tells how much memory the process has.",
            where=sys.platform,
            fix="Install psutil, or give a device that torch counts for.",
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
    """At once, and opened each time: a process that forked has a status of its own."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 8192)
    finally:
        os.close(descriptor)
