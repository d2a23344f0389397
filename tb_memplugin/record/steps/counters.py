"""Read memory counters: of a device from torch's allocator, or of the process from the operating system."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tb_memplugin.record.steps.process_memory import ResidentMemory
from tb_memplugin.record.steps.shared_peaks import SharedPeaks
from tb_memplugin.record.whole_device.host import host_free

logger = logging.getLogger("tb_memplugin")

Stats = dict[str, Any]


class Reading(NamedTuple):
    """A device's counters at one moment; bytes.

    Attributes:
        allocated, reserved: the current values.
        peak, peak_reserved: the highest values since the previous reading.
        exact: whether `peak` is exact; otherwise it is a lower bound.
        reserved_exact: whether `peak_reserved` is exact.
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


class DeviceHandle(Protocol):
    """A torch device that may not be in use yet. The methods must not initialize it."""

    def in_use(self) -> bool:
        """Return whether the process uses devices of this type."""

    def resolve(self) -> tuple[int, str, str, int | None]:
        """Return the index, name, product, and capacity in bytes of a device in use."""

    def free(self, index: int) -> tuple[int, int] | None:
        """Return the free and all bytes of a device in use, None if not known."""

    name: str


class AllocatorCounters:
    """The counters of torch's allocator on a device, whose peaks are reset at each reading.

    Args:
        device: the device.
        peaks: returns the shared peak counters; called once the device is in use.
    """

    kind = "allocator"

    def __init__(self, device: DeviceHandle, peaks: Callable[[], SharedPeaks]) -> None:
        self.name, self.product = device.name, ""
        self.capacity: int | None = None
        self.in_use = False
        self._device, self._open_peaks = device, peaks
        self._peaks: SharedPeaks | None = None
        self._index = 0
        self._mine: list[int] = []
        self._has_reserve = False

    def read(self) -> Reading:
        """Return the current counters; zeros while the device is not in use."""
        if self._peaks is None:
            if not self._device.in_use():
                return NOTHING
            self._index, self.name, self.product, self.capacity = self._device.resolve()
            self._peaks = self._open_peaks()
            self._mine = self._peaks.open(self._index)
            self.in_use = True
        stats, peak, reserved = self._peaks.take(self._index, self._mine)
        self._has_reserve = stats["reserved_bytes"]["all"]["current"] > 0
        return _reading(stats, peak, reserved)

    def free(self) -> tuple[int, int] | None:
        """Return the free and all bytes of the device; a device without a reserve may have no context."""
        return self._device.free(self._index) if self._has_reserve else None

    def close(self) -> None:
        """End this reader, so that peaks are no longer reset for it."""
        if self._peaks is not None:
            self._peaks.close(self._index, self._mine)


class UntouchedCounters:
    """The counters of torch's allocator without resetting peaks: a peak is exact only if it is a new maximum.

    Args:
        device: the device.
        stats: returns the nested counters of a device by its index.
    """

    kind = "allocator"

    def __init__(self, device: DeviceHandle, stats: Callable[[int], Stats]) -> None:
        self.name, self.product = device.name, ""
        self.capacity: int | None = None
        self.in_use = False
        self._device, self._stats = device, stats
        self._index = 0
        self._has_reserve = False
        self._allocated, self._reserved = HighWater(), HighWater()

    def read(self) -> Reading:
        """Return the current counters; zeros while the device is not in use."""
        if not self.in_use:
            if not self._device.in_use():
                return NOTHING
            self._index, self.name, self.product, self.capacity = self._device.resolve()
            self.in_use = True
        stats = self._stats(self._index)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        peak, exact = self._allocated.since(allocated["current"], allocated["peak"])
        peak_reserved, reserved_exact = self._reserved.since(reserved["current"], reserved["peak"])
        self._has_reserve = reserved["current"] > 0
        return _reading(stats, peak, peak_reserved, exact=exact, reserved_exact=reserved_exact)

    def free(self) -> tuple[int, int] | None:
        """Return the free and all bytes of the device; a device without a reserve may have no context."""
        return self._device.free(self._index) if self._has_reserve else None

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


class ProcessCounters:
    """The resident memory of this process, of all its libraries.

    Args:
        resident: the memory.
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
