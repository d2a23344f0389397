"""The oracle for CPU memory: every block of torch's CPU allocator, in order, from below torch.

`cpu_blocks.c` says how. It must be preloaded: start the process with `preloaded_environment()`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_suffix(".c")
ENTRIES = 1 << 20  # as in the C code


def why_impossible() -> str:
    """Why the oracle cannot run on this machine, "" if it can."""
    if sys.platform != "linux":
        return f"the oracle preloads a library, as Linux can; this is {sys.platform}"
    if compiler() is None:
        return "no C compiler (cc, gcc or clang) was found for the oracle of CPU memory"
    return ""


def compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def library() -> Path:
    """Return the compiled oracle, compiled at the first call after its source changed."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"tb_memplugin_cpu_blocks_{os.getuid()}_{digest}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "built.so"
            options = ["-O2", "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-ldl", "-lpthread"]
            subprocess.run([str(compiler()), *options], check=True)
            moved = shutil.copy(built, f"{target}.{os.getpid()}")
            Path(moved).replace(target)  # at once, where several processes build it
    return target


def preloaded_environment() -> dict[str, str]:
    """Return this process's environment with the oracle to preload."""
    others = os.environ.get("LD_PRELOAD", "")
    return {**os.environ, "LD_PRELOAD": f"{library()} {others}".strip()}


@dataclass(frozen=True)
class Blocks:
    """What one stretch of a program took and gave back.

    Attributes:
        live_before: bytes alive when the stretch began.
        sizes: bytes of every allocation (above 0) and free (below 0), in order, by thread. Threads are
            numbered by their first entry in the process; the main thread has number 0. Frees with no
            allocation between them are sorted by size: autocast, for one, frees what it keeps in the order
            of a table of addresses, and no level depends on it.
        peak: the highest live bytes.
        live_after: bytes alive when the stretch ended.
    """

    live_before: int
    sizes: dict[int, tuple[int, ...]]
    peak: int
    live_after: int

    def sorted(self) -> Blocks:
        """Return the same without an order, and so without a peak: for threads that work at the same time."""
        every = sorted(size for thread in self.sizes.values() for size in thread)
        return Blocks(self.live_before, {0: tuple(every)}, 0, self.live_after)


class CpuBlocks:
    """The preloaded library of this process.

    Raises:
        RuntimeError: it is not preloaded.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "cpu_blocks_log"):
            raise RuntimeError(
                "cpu_blocks.c is not preloaded: start the process with preloaded_environment()"
            )
        self._library.cpu_blocks_live.restype = ctypes.c_int64
        self._library.cpu_blocks_count.restype = ctypes.c_int64
        self._library.cpu_blocks_entries.restype = ctypes.POINTER(ctypes.c_int64)
        self._before = 0

    def live(self) -> int:
        """Bytes alive now."""
        return int(self._library.cpu_blocks_live())

    def start(self) -> None:
        """Start a log."""
        self._before = self.live()
        self._library.cpu_blocks_log(1)

    def stop(self) -> Blocks:
        """End the log and return it.

        Raises:
            RuntimeError: it had more entries than there is room for.
        """
        self._library.cpu_blocks_log(0)
        count = int(self._library.cpu_blocks_count())
        if count > ENTRIES:
            raise RuntimeError(f"{count:,} allocations and frees are more than {ENTRIES:,}")
        if not count:
            return Blocks(self._before, {}, self._before, self._before)
        log = np.ctypeslib.as_array(self._library.cpu_blocks_entries(), (count, 2))
        levels = self._before + np.cumsum(log[:, 0])
        numbers = dict.fromkeys(int(number) for number in log[:, 1])
        sizes = {thread: _frees_sorted(log[log[:, 1] == thread, 0]) for thread in numbers}
        return Blocks(self._before, sizes, max(self._before, int(levels.max())), int(levels[-1]))


def _frees_sorted(sizes: np.ndarray) -> tuple[int, ...]:
    run = np.cumsum(sizes > 0)  # the same number for an allocation and the frees after it
    order = np.lexsort((sizes, sizes < 0, run))
    return tuple(sizes[order].tolist())
