"""How much memory and time reading a file may take, and a process that cannot take more.

The rule is in `memory_budget` and `seconds_budget`. Readers count what they create against it. A process that
only reads files calls `confine`: then the system holds it to the rule, also in code that cannot count.

Measured with `python -m tests.bombs FILE…` on strangers' recordings (14 snapshots, 4 Kineto traces, a
timeline) on 2026-11-24: pickles of at least 0.9 MB took 5.6 to 9.8 times their size, JSON of at least 2 MB
4.1 to 6.0 times its unpacked size. The rule matters from 100 MB on. So each of four pickles and a trace was
repeated until it had 116 to 196 MB, with other names, addresses and times in each copy (2026-11-25): pickles
took 3.1 to 4.7 times their size, JSON 4.0 times. Ten leaves room for others. gzip makes traces up to 46 times
smaller: one of 9.1 MB on disk took 691 MB. Since a Kineto trace's events are read piece by piece
(2026-11-26), a GPU's trace of 234 MB took 0.17 GB instead of 0.61 GB.

A pickle of 228 MB took 5.4 seconds, a GPU's trace of 33.5 MB on disk, 537 MB unpacked, 13. So 60 seconds are
enough for pickles of two gigabytes, but not for a gzip file of 150 MB.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tb_memplugin.errors import MemPluginError, UnreadableFileError

if sys.platform != "win32":
    import resource

MEMORY_VARIABLE = "TB_MEMPLUGIN_LIMIT_MEMORY"
SECONDS_VARIABLE = "TB_MEMPLUGIN_LIMIT_SECONDS"

BYTES_OF_ANY_FILE, BYTES_PER_BYTE = 1_000_000_000, 10
"""What reading any file may take, in bytes; and of a larger one, for each of its bytes."""

SECONDS = 60
"""CPU seconds that reading a file may take."""

_AVAILABLE = re.compile(r"^MemAvailable:\s+([0-9]{1,15}) kB$", re.MULTILINE)
_PRIVATE = re.compile(r"^VmData:\s+([0-9]{1,15}) kB$", re.MULTILINE)


class OverBudgetError(UnreadableFileError):
    """Reading the file takes more memory than it may. With more memory, it may succeed."""


@dataclass(slots=True)
class _Confined:
    """A process that only reads files: the last one's size, and the limits."""

    tell: Callable[[str, int], None]
    jobs: int = 1
    file_bytes: int = 0
    begin: int = 0
    """The process's private bytes when it opened that file."""
    bytes: int = 0
    seconds: int = 0


_process: _Confined | None = None


def memory_budget(content_bytes: int) -> int:
    """Return how many bytes reading a content of this size may take: 1 GB or 10 times its size.

    In a confined process, content that a file has packed counts as what the file has.

    Raises:
        MemPluginError: the environment variable that sets another number is no number.
    """
    counted = content_bytes if _process is None else min(content_bytes, _process.file_bytes)
    return from_environment(MEMORY_VARIABLE, "bytes") or max(BYTES_OF_ANY_FILE, BYTES_PER_BYTE * counted)


def seconds_budget() -> int:
    """Return how many CPU seconds reading a file may take: 60.

    Raises:
        MemPluginError: the environment variable that sets another number is no number.
    """
    return from_environment(SECONDS_VARIABLE, "seconds") or SECONDS


def from_environment(variable: str, unit: str) -> int | None:
    """Return the whole number above 0 in an environment variable, None if it is not set.

    Raises:
        MemPluginError: it is set to something else.
    """
    text = os.environ.get(variable)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text)):
        raise MemPluginError(
            f"{variable} is {text[:80]!r}, which is not a number of {unit}.",
            where="the environment",
            fix=f"Set it to a whole number: export {variable}={60 if unit == 'seconds' else 8000000000}",
        )
    return int(text)


def confine(tell: Callable[[str, int], None], jobs: int = 1) -> None:
    """Hold this process to the budget of each file that it opens from now on, until it ends.

    Memory is limited on Linux (`RLIMIT_DATA`, which unlike `RLIMIT_AS` does not count what numpy and torch
    reserve and never touch): an allocation beyond it raises MemoryError. CPU seconds are limited on Linux and
    macOS (`RLIMIT_CPU`): the system ends a process that needs more with SIGXCPU, whatever it is in the midst
    of. Neither is limited on Windows.

    Args:
        tell: called as `tell(path, seconds)` when a file is opened, with the CPU seconds that it may take.
        jobs: how many such processes read beside each other, and so share what memory is free.

    Raises:
        MemPluginError: an environment variable that sets a limit is no number.
    """
    global _process  # limits belong to the process
    memory_budget(0)
    seconds_budget()
    _process = _Confined(tell, jobs)


def open_file(path: str, size: int) -> None:
    """In a confined process, allow what reading a file of this size may take, beyond what is taken."""
    if _process is None or sys.platform == "win32":
        return
    _process.begin, _process.file_bytes = _private_bytes(), size
    seconds = seconds_budget()
    _process.tell(path, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _process.seconds = max(_process.seconds, int(used.ru_utime + used.ru_stime) + 1 + seconds)
    _limit(resource.RLIMIT_CPU, _process.seconds)
    _limit(resource.RLIMIT_CORE, 0)
    if not sys.platform.startswith("linux"):
        return
    allowed = _process.begin + min(memory_budget(size), free_bytes() // _process.jobs)
    if allowed > _process.bytes:
        _process.bytes = allowed
        _limit(resource.RLIMIT_DATA, allowed)


def _limit(kind: int, most: int) -> None:
    """Set a limit of this process, unless a lower one was set for it from outside."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def too_much_memory(where: str, budget: int, what: str = "The file") -> OverBudgetError:
    """Return the error for a file whose reading takes more than its budget of memory."""
    return OverBudgetError(
        f"{what} takes more memory than a file of this size may: {budget:,} bytes.",
        where=where,
        fix=more_memory(),
    )


def more_memory() -> str:
    """Return what to do where a file takes more memory than it may."""
    return (
        f"If you trust the file and this machine has the memory, set {MEMORY_VARIABLE} to more bytes. "
        "Else ask the sender for the file that torch.cuda.memory._dump_snapshot() or the profiler wrote."
    )


def out_of_memory(where: str, what: str = "The file") -> OverBudgetError:
    """Return the error for a MemoryError: of a confined process the budget is spent, else all memory."""
    if _process is not None:
        return too_much_memory(where, _process.bytes - _process.begin, what)
    return OverBudgetError(
        f"{what} needs more memory than there is.", where=where, fix="Load it on a machine with more memory."
    )


def too_much_time(where: str, seconds: int) -> UnreadableFileError:
    """Return the error for a file whose reading takes more than its budget of time."""
    return UnreadableFileError(
        f"The file takes far too long to read: it was not done after {seconds:,} seconds of computing. "
        "It may have been made to cause this.",
        where=where,
        fix=f"If you trust the file, set {SECONDS_VARIABLE} to more seconds.",
    )


def free_bytes() -> int:
    """Return the free memory of the system in bytes; `sys.maxsize` if it is not known."""
    return _kilobytes("/proc/meminfo", _AVAILABLE, sys.maxsize >> 10) << 10


def _private_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    return _kilobytes("/proc/self/status", _PRIVATE, 0) << 10


def _kilobytes(path: str, line: re.Pattern[str], unknown: int) -> int:
    try:
        read = line.search(Path(path).read_text("ascii", "replace"))
        return int(read[1]) if read else unknown
    except (OSError, ValueError):
        return unknown


def give_back_freed() -> None:
    """Have glibc give freed memory back to the system, which it keeps between what is in use."""
    with suppress(AttributeError, OSError):
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
