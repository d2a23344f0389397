"""Read what fills the host's memory from Linux: this process, its children, files, and what is free.

The whole is the tightest limit of the cgroups that the process is in (cgroup v2 `memory.max`, v1
`memory.limit_in_bytes`), else all memory of the machine (`MemTotal`). After a fork, processes share pages.
They count as this process's, and for its children count the pages that each has alone (`Private_Dirty` in
/proc/PID/smaps_rollup). The kernel walks all pages of a child for that, so the time for it is limited.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

from tb_memplugin.trace.counters import DevicePart

LONGEST_WALK_S = 0.05
"""How long the pages of all children may be walked; if they are more, their bytes are not known."""

HEAP_SHARE, HEAP_PAUSE_S = 0.01, 0.1
"""The share of the time that reading the heap may take, and the shortest pause between two readings."""

_KILOBYTES = re.compile(r"^(\w+):\s*(\d+) kB$", re.MULTILINE)
_BYTES = re.compile(r"^(\w+) (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a cgroup: its bytes, and the files that say how much is used and by what."""

    bytes: int
    usage: Path
    statistics: Path
    cache: str
    shared: str


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The whole host: its bytes, whether these are a limit, and the bytes of the parts that are known."""

    total: int
    is_limit: bool
    parts: dict[DevicePart, int]


def host_memory(root: Path = Path("/"), *, children: bool = True) -> HostMemory:
    """Return what fills the host's memory now.

    Args:
        root: where /proc and /sys are.
        children: whether to read the memory of this process's children.

    Raises:
        OSError: there is no /proc of Linux.
        KeyError: it lacks a number.
    """
    parts = _processes(root / "proc", children=children)
    limit = memory_limit(root)
    if limit is None:
        machine = _sizes(root / "proc/meminfo")
        parts[DevicePart.FILES] = machine["Cached"] + machine["Buffers"] - machine["Shmem"]
        parts[DevicePart.FREE] = machine["MemFree"]
        return HostMemory(machine["MemTotal"], is_limit=False, parts=parts)
    statistics = dict(_BYTES.findall(limit.statistics.read_text()))
    parts[DevicePart.FILES] = int(statistics[limit.cache]) - int(statistics[limit.shared])
    parts[DevicePart.FREE] = limit.bytes - int(limit.usage.read_text())
    return HostMemory(limit.bytes, is_limit=True, parts=parts)


def host_free() -> tuple[int, int] | None:
    """Return the free and all bytes of the host in some microseconds; None where they are not known."""
    limit = memory_limit()
    try:
        if limit is not None:
            with limit.usage.open("rb", buffering=0) as usage:
                return limit.bytes - int(usage.read()), limit.bytes
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


class HeapFree:
    """Reads what the C library holds free in the heap of this process, as glibc (2.33 and later) counts it.

    Blocks that were freed, but lie between others that live on, cannot go back to the system. glibc walks
    them for an answer, so after each reading comes a pause.
    """

    def __init__(self) -> None:
        self._not_before = 0.0

    def read(self) -> int | None:
        """Return the free bytes; None during a pause, or where the C library does not say."""
        mallinfo2 = _mallinfo2()
        begin = perf_counter()
        if mallinfo2 is None or begin < self._not_before:
            return None
        size = int(mallinfo2().fordblks)
        end = perf_counter()
        self._not_before = end + max((end - begin) / HEAP_SHARE, HEAP_PAUSE_S)
        return size


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None
    function.restype = _Mallinfo2
    return function


@cache
def memory_limit(root: Path = Path("/")) -> Limit | None:
    """Return the tightest limit of this process's cgroups; None if none is below the machine's memory."""
    try:
        limits = list(_limits(root))
        machine = _sizes(root / "proc/meminfo")["MemTotal"]
    except (OSError, KeyError):
        return None
    below = [limit for limit in limits if limit.bytes < machine]
    return min(below, key=lambda limit: limit.bytes, default=None)


def _limits(root: Path) -> Iterator[Limit]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            top, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "file", "shmem")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
            top, files = root / "sys/fs/cgroup/memory", names
        else:
            continue
        own = top / group.lstrip("/")
        # Within a container, the path may be the host's, which is not there: then the top is its own group.
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield from _limit(folder, *files)


def _limit(folder: Path, limit: str, usage: str, cache: str, shared: str) -> Iterator[Limit]:
    with suppress(OSError, ValueError):  # ValueError: "max"
        size = int((folder / limit).read_text())
        yield Limit(size, folder / usage, folder / "memory.stat", cache, shared)


def _processes(proc: Path, *, children: bool) -> dict[DevicePart, int]:
    """Return the bytes of this process and of its children, mapped files left out."""
    # /proc/self is this process in whatever PID namespace /proc is of.
    own = (proc / "self").resolve()
    sizes = _sizes(own / "status")
    parts = {DevicePart.PROCESS: sizes["RssAnon"] + sizes["RssShmem"]}
    until = perf_counter() + LONGEST_WALK_S
    if children:
        parts[DevicePart.CHILDREN] = 0
        for child in _descendants(own):
            if perf_counter() > until:
                del parts[DevicePart.CHILDREN]
                break
            parts[DevicePart.CHILDREN] += _of_child(child)
    return parts


def _descendants(process: Path) -> Iterator[Path]:
    with suppress(OSError):
        for thread in sorted((process / "task").iterdir()):
            with suppress(OSError):
                for number in (thread / "children").read_text().split():
                    yield process.parent / number
                    yield from _descendants(process.parent / number)


def _of_child(process: Path) -> int:
    """Return the bytes that a process has alone, mapped files left out; 0 of one that has ended.

    Files that it maps are clean, or shared with the page cache, which counts them.
    """
    try:
        sizes = _sizes(process / "smaps_rollup")
    except OSError:
        return 0
    return sizes.get("Private_Dirty", 0)


def _sizes(path: Path) -> dict[str, int]:
    return {name: int(size) << 10 for name, size in _KILOBYTES.findall(path.read_text())}
