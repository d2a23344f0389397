"""Read memory counters: of a device from torch's allocator, or of the process from the operating system.

No device is initialized for that.

Linux keeps the highest resident memory of a process (VmHWM) and sets it back to the current one when the
process writes 5 to /proc/self/clear_refs (proc(5), since Linux 4.0). Other values than 5 walk all page
tables; they are never written. The kernel derives `ru_maxrss` from the same mark, so `resource.getrusage` is
wrapped before the first reset, and still returns the highest value since the process began.

An allocator keeps one peak per counter since the last reset, for all readers. A reset to measure the peak of
a step would destroy the peak of the training for the user. So torch's functions that read and reset these
counters are wrapped: before the monitor's resets, the peaks are saved; the user's reads return the higher of
the saved and the current peak; and the user's resets clear the saved peaks, after passing the current ones on
to the monitor's readers.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tb_memplugin.errors import MemPluginError, is_of_signal
from tb_memplugin.record.arguments import refuse_absent
from tb_memplugin.record.torch_private.allocators import (
    ACCELERATOR_RESET,
    ACCELERATOR_STATS,
    BINDINGS,
    MEMORY_STATS,
    RESET_PEAKS,
    is_allocator_initialized,
)
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.whole_device.card import free_of
from tb_memplugin.record.whole_device.host import HeapFree, host_free

Stats = dict[str, Any]
Name = tuple[Any, ...]
"""The name of a counter: the keys that lead to it."""
Highest = TypeVar("Highest")

_LEVELS = ("allocated_bytes", "reserved_bytes")


@dataclass(frozen=True, slots=True)
class Doors:
    """The names of a module's functions that read and reset the counters of a device.

    The first of each is the one that `SharedPeaks` uses; the others access the same counters.
    """

    module: Any
    readers: Sequence[str]
    resetters: Sequence[str]

    def present(self) -> bool:
        """Return whether the module has the first function of each."""
        return hasattr(self.module, self.readers[0]) and hasattr(self.module, self.resetters[0])


@dataclass(slots=True)
class _Shared:
    """The peaks of one device since the user's last reset, and since the last `take` of each reader."""

    user: dict[Name, int] = field(default_factory=dict)
    ours: list[list[int]] = field(default_factory=list)


class SharedPeaks:
    """The counters of all devices that the wrapped functions access.

    The functions are wrapped from the first `open` on. After the last `close` they stay wrapped only while a
    saved peak is above the allocator's own: until the user's next reset, or a higher peak. A read takes some
    microseconds longer meanwhile.

    Args:
        doors: the functions that read and reset the counters.
    """

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._lock = threading.RLock()
        self._shared: dict[int, _Shared] = {}
        self._wrapped: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def open(self, index: int) -> list[int]:
        """Begin a reader of a device and return it: its peaks [allocated, reserved] since its last `take`."""
        with self._lock:
            self._wrap()
            mine = [0, 0]
            self._shared.setdefault(index, _Shared()).ours.append(mine)
            return mine

    def close(self, index: int, mine: list[int]) -> None:
        """End a reader."""
        with self._lock:
            shared = self._shared[index]
            shared.ours[:] = [peaks for peaks in shared.ours if peaks is not mine]
            if not shared.ours:
                with suppress(RuntimeError):  # a driver that is gone: what is saved stays
                    self._forget_lower(index, self._read(index))

    def take(self, index: int, mine: list[int]) -> tuple[Stats, int, int]:
        """Return the counters, and the peak allocated and reserved bytes since this reader's last `take`.

        Memory that another thread allocates and frees during this call may be missed.
        """
        with self._lock:
            stats = self._read(index)
            self._keep(index, stats)
            self._wrapped[self._doors.resetters[0]][0](index)
            peaks = mine[0], mine[1]
            mine[:] = [0, 0]
            return stats, *peaks

    def _read(self, index: int) -> Stats:
        original, _ = self._wrapped[self._doors.readers[0]]
        stats: Stats = original(index)
        return stats

    def _wrap(self) -> None:
        """Wrap each function that is not wrapped yet."""
        module = self._doors.module
        for names, wrap in ((self._doors.readers, self._reading), (self._doors.resetters, self._resetting)):
            for name in names:
                if hasattr(module, name) and name not in self._wrapped:
                    original = getattr(module, name)
                    self._wrapped[name] = original, wrap(original)
                    setattr(module, name, self._wrapped[name][1])

    def _unwrap(self) -> None:
        """Restore the functions if nothing is read or saved, except those that somebody has wrapped since."""
        if not any(shared.ours or shared.user for shared in self._shared.values()):
            for name, (original, wrapper) in list(self._wrapped.items()):
                if getattr(self._doors.module, name, None) is wrapper:
                    setattr(self._doors.module, name, original)
                    del self._wrapped[name]

    def _forget_lower(self, index: int, stats: Stats) -> None:
        """Forget the saved peaks that the allocator's own have reached, which are in `stats`."""
        saved = self._shared[index].user
        for key, counter in _counters(stats):
            if counter["peak"] >= saved.get(key, 0):
                saved.pop(key, None)
        self._unwrap()

    def _keep(self, index: int, stats: Stats) -> None:
        """Save the peaks before they are reset."""
        shared = self._shared[index]
        highest = [int(stats[name]["all"]["peak"]) for name in _LEVELS]
        for peaks in shared.ours:
            peaks[:] = map(max, peaks, highest)
        for key, counter in _counters(stats):
            if counter["peak"] > shared.user.get(key, 0):
                shared.user[key] = counter["peak"]

    def _reading(self, read: Callable[[int], Stats]) -> Callable[[int], Stats]:
        @wraps(read)
        def reading(index: int) -> Stats:
            with self._lock:
                stats = read(index)
                shared = self._shared.get(index, _Shared())
                if not shared.ours and shared.user:
                    self._forget_lower(index, stats)
                for key, counter in _counters(stats):
                    counter["peak"] = max(counter["peak"], shared.user.get(key, 0))
                return stats

        return reading

    def _resetting(self, reset: Callable[[int], None]) -> Callable[[int], None]:
        @wraps(reset)
        def resetting(index: int) -> None:
            with self._lock:
                shared = self._shared.get(index)
                if shared is not None:
                    if shared.ours:
                        self._keep(index, self._read(index))
                    shared.user.clear()
                    self._unwrap()
                return reset(index)

        return resetting


def _counters(stats: Stats) -> Iterator[tuple[Name, dict[str, int]]]:
    """Yield every counter with a peak, by (name, pool), by (name,), or in a private pool (torch 2.13)."""
    for name, pools in stats.items():
        if isinstance(pools, dict):
            for pool, counter in pools.items():
                if isinstance(counter, dict) and "peak" in counter:
                    yield (name, pool), counter
                elif isinstance(counter, dict):
                    yield from (
                        ((name, pool, part), inner) for part, inner in counter.items() if "peak" in inner
                    )
            if "peak" in pools:
                yield (name,), pools


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
    try:
        is_linux = len(_FIELDS.findall(_read(_STATUS))) == 2
    except Exception as error:  # of the system, or of what the program has put in place of `os.open`
        if is_of_signal(error):
            raise
        is_linux = not isinstance(error, FileNotFoundError)  # for the moment it cannot be read
    if is_linux:
        return ResidentMemory(_from_linux, _reset_on_linux)
    try:
        import psutil  # type: ignore[import-untyped,unused-ignore]  # optional

        process = psutil.Process()
    except Exception as error:  # one of psutil's, where Linux has no /proc
        if is_of_signal(error):
            raise
        raise MemPluginError(
            "The memory of the process cannot be read here.",
            where=sys.platform,
            fix="Install psutil (on Linux, mount /proc), or give a device that torch has counters for.",
        ) from error

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


logger = logging.getLogger("tb_memplugin")


class Reading(NamedTuple):
    """A device's counters at one moment; bytes.

    Attributes:
        allocated, reserved: the current values.
        peak, peak_reserved: the highest values since the previous reading.
        exact: whether `peak` is exact; otherwise it is a lower bound.
        requested: the current bytes as requested, None if not counted.
        retries, ooms, allocations, allocated_bytes: counts since some time before the first reading.
    """

    allocated: int
    peak: int
    exact: bool = True
    reserved: int = 0
    peak_reserved: int = 0
    retries: int = 0
    ooms: int = 0
    allocations: int = 0
    allocated_bytes: int = 0
    reserved_exact: bool = True
    requested: int | None = None


NOTHING = Reading(0, 0)


class Counters(Protocol):
    """The counters of one device.

    Attributes:
        name: the device as torch spells it; "process" for the memory of the process.
        kind: "allocator" or "process". Only the first has a reserve and counts allocations.
        product, capacity: the device's product name, and its memory in bytes, None if not known.
        in_use: False until the process has used the device; the name may change until then.
    """

    name: str
    kind: str
    product: str
    capacity: int | None
    in_use: bool

    def read(self) -> Reading:
        """Return the current counters. May raise any exception of torch or the system."""

    def free(self) -> tuple[int, int] | None:
        """Return the free and all bytes of the whole device, None if not known or if nothing is reserved."""

    def close(self) -> None:
        """Release the counters; they are not read again."""


class _TorchCounters:
    """A device with an allocator of torch: what it is, once it is in use."""

    kind = "allocator"

    def __init__(self, device: AcceleratorHandle) -> None:
        self.name, self.product = device.name, ""
        self.capacity: int | None = None
        self.in_use = False
        self._device = device
        self._index = 0
        self._has_reserve = False

    def _is_used(self) -> bool:
        if not self.in_use and self._device.in_use():
            self._index, self.name, self.product, self.capacity = self._device.resolve()
            self.in_use = True
        return self.in_use

    def free(self) -> tuple[int, int] | None:
        """Return the free and all bytes of the device; a device without a reserve may have no context."""
        return self._device.free(self._index) if self._has_reserve else None


class AllocatorCounters(_TorchCounters):
    """The counters of torch's allocator on a device, whose peaks are reset at each reading.

    Args:
        peaks: returns the shared peak counters; called once the device is in use.
    """

    def __init__(self, device: AcceleratorHandle, peaks: Callable[[], SharedPeaks]) -> None:
        super().__init__(device)
        self._open_peaks = peaks
        self._peaks: SharedPeaks | None = None
        self._mine: list[int] = []

    def read(self) -> Reading:
        """Return the current counters; zeros while the device is not in use."""
        if not self._is_used():
            return NOTHING
        if self._peaks is None:
            peaks = self._open_peaks()
            self._mine = peaks.open(self._index)
            self._peaks = peaks
        stats, peak, reserved = self._peaks.take(self._index, self._mine)
        self._has_reserve = stats["reserved_bytes"]["all"]["current"] > 0
        return _reading(stats, peak, reserved)

    def close(self) -> None:
        """End this reader, so that peaks are no longer reset for it."""
        if self._peaks is not None:
            self._peaks.close(self._index, self._mine)


class UntouchedCounters(_TorchCounters):
    """The counters of torch's allocator without resetting peaks: a peak is exact only if it is a new maximum.

    Args:
        stats: returns the nested counters of a device by its index.
    """

    def __init__(self, device: AcceleratorHandle, stats: Callable[[int], Stats]) -> None:
        super().__init__(device)
        self._stats = stats
        self._allocated, self._reserved = HighWater(), HighWater()

    def read(self) -> Reading:
        """Return the current counters; zeros while the device is not in use."""
        if not self._is_used():
            return NOTHING
        stats = self._stats(self._index)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        peak, exact = self._allocated.since(allocated["current"], allocated["peak"])
        peak_reserved, reserved_exact = self._reserved.since(reserved["current"], reserved["peak"])
        self._has_reserve = reserved["current"] > 0
        return _reading(stats, peak, peak_reserved, exact=exact, reserved_exact=reserved_exact)

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


class ProcessCounters:
    """The resident memory of this process, of all its libraries.

    Args:
        reset_peaks: whether the system's peak may be reset at each reading. If it may not, or cannot, a peak
            is exact only if it is a new maximum.
    """

    name = kind = "process"
    product = ""
    capacity: int | None = None
    in_use = True

    def __init__(self, resident: ResidentMemory, *, reset_peaks: bool) -> None:
        self._resident, self._high = resident, HighWater()
        self._peaks = resident.peaks if reset_peaks else None
        self._mine = self._peaks.open(0) if self._peaks is not None else []
        self._read = resident.since_start
        self._heap = HeapFree()
        self._level = 0

    def read(self) -> Reading:
        """Return the current memory."""
        if self._peaks is None:
            now, top = self._read()
            return Reading(now, *self._high.since(now, top))
        try:
            stats, peak, _ = self._peaks.take(0, self._mine)
        except OSError as error:
            return self._without_resets(error)
        before, self._level = self._level, stats["allocated_bytes"]["all"]["current"]
        return Reading(self._level, max(peak, before, self._level))

    def free(self) -> tuple[int, int] | None:
        """Return the free and all bytes of the host."""
        return host_free()

    def heap_free(self) -> int | None:
        """Return what the C library holds free in the process's heap; None if not known or not read now."""
        return self._heap.read()

    def _without_resets(self, error: OSError) -> Reading:
        """Return the last reading with an exact peak, and go on without resets."""
        logger.debug("the peak of the process cannot be reset: its peaks are lower bounds", exc_info=error)
        self.close()
        self._peaks, self._read = None, self._resident.read  # the mark goes on from the last reset
        now, top = self._read()
        self._high.since(now, top)
        peak = max(self._mine[0], self._level, now)
        return Reading(now, peak)

    def close(self) -> None:
        """End this reader, so that peaks are no longer reset for it."""
        if self._peaks is not None:
            self._peaks.close(0, self._mine)


class HighWater:
    """Derives the peak between two readings from a counter of the highest value ever."""

    def __init__(self) -> None:
        self._level = self._top = 0

    def since(self, level: int, top: int) -> tuple[int, bool]:
        """Return the peak since the last call, and whether it is exact; otherwise it is a lower bound.

        Args:
            level: the current value.
            top: the highest value ever.
        """
        peak = top if top > self._top else max(level, self._level)
        exact = peak >= top >= self._top  # it falls only if it was reset: then nothing is known
        self._level, self._top = level, top
        return peak, exact


def _reading(
    stats: Stats, peak: int, peak_reserved: int, *, exact: bool = True, reserved_exact: bool = True
) -> Reading:
    allocated = stats["allocated_bytes"]["all"]
    return Reading(
        allocated=allocated["current"],
        peak=peak,
        exact=exact,
        reserved=stats["reserved_bytes"]["all"]["current"],
        peak_reserved=peak_reserved,
        retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
        allocations=stats["allocation"]["all"]["allocated"] if "allocation" in stats else 0,
        allocated_bytes=allocated["allocated"],
        reserved_exact=reserved_exact,
        requested=stats["requested_bytes"]["all"]["current"] if "requested_bytes" in stats else None,
    )


PROCESS = "process"
Wanted = str | torch.device


def counters_of(device: Wanted | Sequence[Wanted] | None, *, reset_peaks: bool) -> list[Counters]:
    """Return the counters of the given devices, each once.

    Args:
        device: one or several devices; "cpu" and "process" mean the memory of the process. None: the
            current accelerator if its allocator has counters, else the process.
        reset_peaks: whether peaks may be reset.

    Raises:
        MemPluginError: this machine does not have the device, or its allocator has no counters.
    """
    if device is None:
        device = _default()
    if isinstance(device, str | torch.device) or not isinstance(device, Iterable):
        device = [device]
    several = list(device)
    if not several:
        raise MemPluginError("No device was given.", where="device", fix="Leave it out for the current one.")
    with without_torch_functions():  # a mode of the program would see `torch.device`
        return [_counters_named(name, reset_peaks) for name in dict.fromkeys(map(_name, several))]


def _default() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None and _counts(accelerator.type) else PROCESS


def _counts(device_type: str) -> bool:
    """Whether a device type's allocator has counters; those of some accelerators (MPS) do not."""
    doors = _doors(device_type)
    if device_type in ("cuda", "xpu") or not doors.present():
        return doors.present()
    try:
        return bool(getattr(doors.module, doors.readers[0])(0))
    except RuntimeError:
        return False


def _name(device: Wanted) -> str:
    name = str(device)
    try:
        return PROCESS if name == PROCESS or torch.device(name).type == "cpu" else name
    except RuntimeError as error:
        raise MemPluginError(
            f"{name!r:.80} is not a device.",
            where="MemoryMonitor",
            fix='Give a device as torch.device takes it, such as "cuda:0", or "process".',
        ) from error


def _counters_named(name: str, reset_peaks: bool) -> Counters:
    if name == PROCESS:
        return ProcessCounters(resident_memory(), reset_peaks=reset_peaks)
    handle = AcceleratorHandle(torch.device(name))
    doors = _doors(handle.type)
    refuse_absent(
        torch.device(name),
        where="MemoryMonitor",
        fix="Leave `device` out to watch the current device, or the process if there is none.",
    )
    if not hasattr(doors.module, doors.readers[0]):
        raise MemPluginError(
            f"This version of torch cannot read the allocator's counters of {name!r}.",
            where="MemoryMonitor",
            fix='Use device="process" for the memory of the process, or use a newer torch.',
        )
    if reset_peaks and doors.present():
        return AllocatorCounters(handle, lambda: _shared_peaks(handle.type))
    if reset_peaks:
        logger.warning(
            "This version of torch cannot reset peaks, so the peaks of steps are lower bounds "
            "unless they rise."
        )
    return UntouchedCounters(handle, getattr(doors.module, doors.readers[0]))


class AcceleratorHandle:
    """A torch device, given by its type and an index; without an index, the current device of the type.

    Args:
        device: "cuda", "cuda:1", "xpu", ...
    """

    def __init__(self, device: torch.device) -> None:
        self.type = device.type
        self._index: int | None = device.index
        self.name = f"{device.type}:{device.index or 0}"

    def in_use(self) -> bool:
        """Return whether the process uses devices of this type, without initializing them."""
        backend: Any = getattr(torch, self.type, None)
        if hasattr(backend, "is_initialized"):
            return bool(backend.is_initialized())
        return is_allocator_initialized()

    def resolve(self) -> tuple[int, str, str, int | None]:
        """Return the device's index, name, product, and capacity in bytes."""
        index = torch.accelerator.current_device_index() if self._index is None else self._index
        properties: Any = None
        backend: Any = getattr(torch, self.type, None)
        if hasattr(backend, "get_device_properties"):
            properties = backend.get_device_properties(index)
        return (
            index,
            f"{self.type}:{index}",
            str(getattr(properties, "name", "")),
            getattr(properties, "total_memory", None),
        )

    def free(self, index: int) -> tuple[int, int] | None:
        """Return the free and all bytes of the device."""
        return free_of(self.type, index)


@cache
def _shared_peaks(device_type: str) -> SharedPeaks:
    """Return the shared peaks of a device type, one per process, so that torch is wrapped only once."""
    return SharedPeaks(_doors(device_type))


def _doors(device_type: str) -> Doors:
    """Return torch's functions that read and reset an allocator's counters (torch 2.6 to 2.13)."""
    if device_type not in MEMORY_STATS:
        return Doors(BINDINGS, (ACCELERATOR_STATS,), (ACCELERATOR_RESET,))
    return Doors(
        BINDINGS,
        (MEMORY_STATS[device_type], ACCELERATOR_STATS),
        (RESET_PEAKS[device_type], ACCELERATOR_RESET),
    )
