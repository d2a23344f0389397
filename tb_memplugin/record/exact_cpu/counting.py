"""Count the calls of torch's CPU allocator, with a small C library that is compiled once."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.compiling import cache_folder, compile_library, installed_compiler
from tb_memplugin.record.storages import allocated_by_torch
from tb_memplugin.record.storages_alive import other_threads_may_run, storages_alive
from tb_memplugin.record.torch_private.tensors import storage_address
from tb_memplugin.trace import Cause, Counter, CounterReading, Moment
from tb_memplugin.trace.tables import Int64, UInt64

SOURCE = Path(__file__).with_name("allocator_calls.c")

CALL = np.dtype([("time_ns", np.int64), ("address", np.uint64), ("bytes", np.int64), ("unknown", np.uint64)])
"""An allocation (positive bytes) or free (negative) at an epoch time. `unknown` is 1 for the free of a block
that was allocated before counting began; its bytes are those that malloc can use, at least those requested.
Of these, frees of less than 256 bytes are left out: many are not blocks of tensors."""

_MACHINES = ("x86_64", "aarch64")
_COMPILERS = ("cc", "gcc", "clang")
_FIX = (
    "Install a C compiler (gcc or clang), or name one in the environment variable CC. Or record without "
    "exact_cpu."
)
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CountedCalls:
    """What was counted in a window.

    Attributes:
        start_bytes, peak_bytes, end_bytes: live bytes.
        calls: dtype `CALL`; those at one address in the order in which they were made. None if they were
            too many, or if there was no memory for them.
        is_exact: whether every call was counted.
        since_first: whether counting began before there was any tensor, so that no block is left out.
    """

    start_bytes: int
    peak_bytes: int
    end_bytes: int
    calls: npt.NDArray[np.void] | None
    is_exact: bool
    since_first: bool

    def readings(self, device: int, foreign: int = 0) -> Iterator[CounterReading]:
        """Yield the readings of the counter for a trace.

        Args:
            device: the CPU's row in the trace's devices.
            foreign: the bytes in the trace that torch's allocator did not allocate.
        """
        for moment, level in zip(Moment, (self.start_bytes, self.peak_bytes, self.end_bytes), strict=True):
            yield CounterReading(
                device,
                moment,
                Counter.CALLS,
                level,
                at_least=not (self.is_exact and self.since_first),
                causes=((Cause.FOREIGN, -foreign),) if foreign else (),
            )


_lock = threading.RLock()
_windows: list[CountedWindow] = []
_since_first = False


def is_counting() -> bool:
    """Whether counting has begun in this process."""
    return bool(_library.cache_info().currsize)


def start_counting() -> None:
    """Begin to count, for as long as the process lives. Later calls do nothing.

    Blocks that are live now and that Python can reach are counted with the size of their storage.

    Raises:
        MemPluginError: this is not Linux on x86-64 or aarch64, no compiler was found, compiling failed, or
            this torch allocates in a way that cannot be counted.
    """
    global _since_first
    with _lock:
        if is_counting():
            return
        library = _library()
        torch.empty(_PROBE_BYTES, dtype=torch.uint8)  # the loader resolves what libc10.so calls
        before = _adopted(library) if not library.tbm_start() else -1
        if before < 0 or not _sees_a_tensor(library):
            library.tbm_stop()
            _library.cache_clear()
            raise MemPluginError(
                "This torch allocates its CPU tensors in a way that cannot be counted.",
                where=f"torch {torch.__version__}",
                fix="Record without exact_cpu: everything else stays as it is.",
            )
        library.tbm_reset_peak()  # the probe's
        _since_first = before == 0


def _adopted(library: ctypes.CDLL) -> int:
    """Count the blocks that are live already and known to Python; return how many they are."""
    count = 0
    for storage in storages_alive(of_gradients=not other_threads_may_run()):
        if storage.device.type == "cpu" and not storage.is_shared() and allocated_by_torch(storage):
            count += int(library.tbm_adopt(storage_address(storage), storage.nbytes()))
    return count


def _sees_a_tensor(library: ctypes.CDLL) -> bool:
    def probe_is_live() -> bool:
        address, size, _ = _blocks(library)
        return bool(((address == pointer) & (size == _PROBE_BYTES)).any())

    tensor = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    pointer = tensor.data_ptr()
    is_seen = probe_is_live()
    del tensor
    return is_seen and not probe_is_live()


def begin_window() -> CountedWindow:
    """Begin a window. Counting must have begun. Windows may overlap."""
    return CountedWindow()


class CountedWindow:
    """Counts what is called from now on until `stop`."""

    def __init__(self) -> None:
        library = _library()
        with _lock:
            _keep_peaks(library)
            self.address, self.bytes, now = _blocks(library, begin=True)
            self.start_bytes = self.peak_bytes = int(now[0])
            self._first = _call_count(library)[0]
            _windows.append(self)

    def blocks(self) -> list[tuple[str, int, int]]:
        """Return what was live when it began: (device name, address, bytes)."""
        return [("cpu", *block) for block in zip(self.address.tolist(), self.bytes.tolist(), strict=True)]

    def stop(self) -> CountedCalls:
        """End the window and return what was counted in it."""
        library = _library()
        with _lock:
            _keep_peaks(library)
            calls = _calls_from(library, self._first)
            if calls is not None and _since_first:
                calls = calls[calls["unknown"] == 0]  # no block is unknown: libc10.so frees others, too
            counted = CountedCalls(
                start_bytes=self.start_bytes,
                peak_bytes=self.peak_bytes,
                end_bytes=_figures(library)[0],
                calls=calls,
                is_exact=bool(library.tbm_is_exact()),
                since_first=_since_first,
            )
            self.close()
            return counted

    def close(self) -> None:
        """End the window without a result."""
        with _lock:
            if self in _windows:
                _windows.remove(self)
                if not _windows:
                    _library().tbm_end_calls()


def _keep_peaks(library: ctypes.CDLL) -> None:
    """Save the peak for each open window, before a new one resets it."""
    highest = _figures(library)[1]
    for window in _windows:
        window.peak_bytes = max(window.peak_bytes, highest)


def _figures(library: ctypes.CDLL) -> list[int]:
    """Return what is counted since counting began, as `tbm_figures` of the library orders it."""
    values = (ctypes.c_int64 * 6)()
    library.tbm_figures(values)
    return list(values)


def _blocks(library: ctypes.CDLL, *, begin: bool = False) -> tuple[UInt64, Int64, list[int]]:
    """Return the addresses and bytes of all live blocks of one moment, with the figures of that moment."""
    values = (ctypes.c_int64 * 6)()
    capacity = 0
    while True:
        count = _figures(library)[2]
        capacity = max(count + count // 4 + 64, 2 * capacity)
        address, size = np.empty(capacity, np.uint64), np.empty(capacity, np.int64)
        count = library.tbm_blocks(address.ctypes.data, size.ctypes.data, capacity, values, int(begin))
        if count <= capacity:
            return address[:count].copy(), size[:count].copy(), list(values)


def _call_count(library: ctypes.CDLL) -> tuple[int, int, int]:
    """Return how many calls were made since they began to be written, how many fit, and where they are."""
    rows, capacity = ctypes.c_void_p(), ctypes.c_size_t()
    count = library.tbm_calls(ctypes.byref(rows), ctypes.byref(capacity))
    return int(count), int(capacity.value), rows.value or 0


def _calls_from(library: ctypes.CDLL, first: int) -> npt.NDArray[np.void] | None:
    count, capacity, rows = _call_count(library)
    if count > capacity or not rows:
        return None
    raw = ctypes.string_at(rows + first * CALL.itemsize, (count - first) * CALL.itemsize)
    calls = np.frombuffer(raw, CALL)
    return calls[calls["time_ns"] > 0]


@cache
def _library() -> ctypes.CDLL:
    path = _compiled()
    try:
        library = ctypes.CDLL(os.fspath(path))
    except OSError as error:
        raise MemPluginError(
            f"The library that counts the calls of the CPU's allocator cannot be loaded: {error}.",
            where=os.fspath(path),
            fix="Delete that file; it is then compiled again.",
        ) from error
    address = ctypes.c_void_p
    library.tbm_figures.argtypes = [address]
    library.tbm_adopt.argtypes = [ctypes.c_uint64, ctypes.c_int64]
    library.tbm_blocks.argtypes = [address, address, ctypes.c_int64, address, ctypes.c_int]
    library.tbm_blocks.restype = ctypes.c_int64
    library.tbm_calls.argtypes = [address, address]
    library.tbm_calls.restype = ctypes.c_size_t
    return library


def _compiled() -> Path:
    """Return the path of the compiled library; compile it if it is not in the cache.

    Raises:
        MemPluginError: see `start_counting`.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _MACHINES:
        raise MemPluginError(
            "The calls of the CPU's allocator can be counted on Linux with x86-64 or aarch64 only.",
            where=f"{sys.platform}, {machine}",
            fix="Record without exact_cpu.",
        )
    parts = (SOURCE.read_bytes(), machine.encode(), "-".join(platform.libc_ver()).encode())
    path = cache_folder() / f"allocator_calls-{hashlib.sha256(bytes(0).join(parts)).hexdigest()[:16]}.so"
    if not path.is_file():
        compiler = installed_compiler("CC", _COMPILERS)
        if compiler is None:
            raise MemPluginError(
                "exact_cpu compiles a small C library once, and no C compiler was found.",
                where=os.environ.get("CC", "PATH"),
                fix=_FIX,
            )
        options = ("-O2", "-shared", "-fPIC", "-std=gnu11", "-Wl,-z,nodelete")
        compile_library(
            path,
            [compiler, *options, os.fspath(SOURCE), "-ldl", "-lpthread"],
            purpose="counts the calls of the CPU's allocator",
            fix=_FIX,
        )
    return path
