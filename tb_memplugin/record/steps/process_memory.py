"""Read the resident memory of this process from the operating system, and its peak since a reset.

Linux keeps the highest resident memory of a process (VmHWM) and sets it back to the current one when the
process writes 5 to /proc/self/clear_refs (proc(5), since Linux 4.0). Other values than 5 walk all page
tables; they are never written. The kernel derives `ru_maxrss` from the same mark, so `resource.getrusage` is
wrapped before the first reset, and still returns the highest value since the process began.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.steps.shared_peaks import Doors, SharedPeaks

_STATUS, _CLEAR_REFS = "/proc/self/status", "/proc/self/clear_refs"
_RESET_MARK = b"5"
_FIELDS = re.compile(rb"^Vm(HWM|RSS):\s*([0-9]+) kB", re.MULTILINE)

_MAXRSS = 2
"""The index of `ru_maxrss` in what `resource.getrusage` returns."""

_KERNEL_LAG = 4 << 20
"""The kernel adds up its page counters per CPU late, so a mark may differ from the current value by less
than this many bytes although a reset worked."""


class ResidentMemory:
    """The resident memory of a process, and its peak, which all readers in the process share.

    Args:
        read: returns the current resident bytes, and the system's mark: their highest value since the last
            reset.
        reset: sets the mark back to the current value. None: it cannot be reset.

    Attributes:
        highest: the highest mark in bytes of those that were reset.
        peaks: the mark as a counter that several readers take; None if it cannot be reset.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], reset: Callable[[], None] | None) -> None:
        self.read, self._reset = read, reset
        self._resets_work = False
        self.begin()

    def begin(self) -> None:
        """Begin without readers, as in a forked process: its mark is its own, and no thread holds a lock."""
        self.highest = self._mark = 0
        doors = SimpleNamespace(stats=self._stats, reset=self._reset_mark)
        self.peaks = None if self._reset is None else SharedPeaks(Doors(doors, ("stats",), ("reset",)))

    def since_start(self) -> tuple[int, int]:
        """Return the current resident bytes, and their highest value since the process began."""
        current, mark = self.read()
        return current, max(mark, self.highest)

    def _stats(self, _: int) -> dict[str, Any]:
        """Return the memory in the shape of torch's counters. `SharedPeaks` calls it under its lock."""
        current, self._mark = self.read()
        self.highest = max(self.highest, self._mark)
        no_reserve = {"current": 0, "peak": 0}
        return {
            "allocated_bytes": {"all": {"current": current, "peak": self._mark}},
            "reserved_bytes": {"all": no_reserve},
        }

    def _reset_mark(self, _: int) -> None:
        # Until a reset has lowered the mark, each is checked: an imitation of /proc may accept it in vain.
        assert self._reset is not None
        self._reset()
        if self._resets_work:
            return
        current, mark = self.read()
        if mark >= self._mark and mark - current > _KERNEL_LAG:
            raise OSError(f"a reset leaves the mark {mark - current:,} bytes above the resident memory")
        self._resets_work = mark < self._mark


@cache
def resident_memory() -> ResidentMemory:
    """Return the memory of this process, from Linux, elsewhere from psutil if that is installed.

    Raises:
        MemPluginError: neither is available.
    """
    if os.path.exists(_STATUS) and len(_FIELDS.findall(_read(_STATUS))) == 2:  # noqa: PTH110
        return ResidentMemory(_from_linux, _reset_on_linux)
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
        mark = info.peak_wset if hasattr(info, "peak_wset") else _highest_on_unix()
        return info.rss, max(info.rss, mark)

    return ResidentMemory(from_psutil, None)


@cache
def share_with_getrusage() -> None:
    """Wrap `resource.getrusage`, so that `ru_maxrss` stays the highest value since the process began.

    Only on Linux, where it is in kB. It stays wrapped, because the marks that were reset are lost.
    """
    import resource

    read, memory = resource.getrusage, resident_memory()

    @wraps(read)
    def getrusage(who: int, /) -> resource.struct_rusage:
        usage = read(who)
        highest = memory.highest >> 10  # after the read: a mark is noted before it is reset
        if who == resource.RUSAGE_CHILDREN or usage.ru_maxrss >= highest:
            return usage
        return resource.struct_rusage((*usage[:_MAXRSS], highest, *usage[_MAXRSS + 1 :]))

    setattr(resource, "getrusage", getrusage)  # noqa: B010  # mypy forbids to assign to a function


def _highest_on_unix() -> int:
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest << 10


def _from_linux() -> tuple[int, int]:
    sizes = {name: int(kilobytes) << 10 for name, kilobytes in _FIELDS.findall(_read(_STATUS))}
    return sizes[b"RSS"], sizes[b"HWM"]


def _reset_on_linux() -> None:
    descriptor = os.open(_CLEAR_REFS, os.O_WRONLY)
    try:
        share_with_getrusage()
        os.write(descriptor, _RESET_MARK)
    finally:
        os.close(descriptor)


def _read(path: str) -> bytes:
    """Read a file in one call. It is opened each time, because a forked process has its own status."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 8192)
    finally:
        os.close(descriptor)


def _forked() -> None:
    if resident_memory.cache_info().currsize:
        resident_memory().begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
