"""What is counted of a device at any moment: by torch's allocator, or by the system for the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tb_memplugin.sources.steps.shared_peaks import SharedPeaks

Stats = dict[str, Any]


class Reading(NamedTuple):
    """A device's counters now; bytes.

    Attributes:
        allocated, reserved: what there is.
        peak, peak_reserved: highest since the reading before.
        exact: whether `peak` is; else it may have been higher.
        reserved_exact: whether `peak_reserved` is.
        retries, ooms, allocations, allocated_bytes: counted since some moment before the first reading.
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


NOTHING = Reading(0, 0)


class Counters(Protocol):
    """The counters of one device.

    Attributes:
        name: as torch spells the device; "process" for the memory of the process.
        kind: "allocator" or "process". Only the first has a reserve, and counts allocations.
        product, capacity: the device's product name and its bytes, None where not known.
        in_use: False as long as the process has not used the device: its name may change until then.
    """

    name: str
    kind: str
    product: str
    capacity: int | None
    in_use: bool

    def read(self) -> Reading:
        """The counters now. Raises what torch or the system raises."""

    def close(self) -> None:
        """Nothing is read any more."""


class DeviceHandle(Protocol):
    """A device of torch that may not be in use yet: looking at it must not bring it into use."""

    def in_use(self) -> bool:
        """Whether the process uses devices of this type."""

    def resolve(self) -> tuple[int, str, str, int | None]:
        """Once in use: its index, name, product, and capacity in bytes."""

    name: str


class AllocatorCounters:
    """The counters of torch's allocator on a device. Its peaks are reset with each reading.

    Args:
        device: which one.
        peaks: gives the way to its counters, once it is in use.
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

    def read(self) -> Reading:
        """The counters now; zeros as long as the device is not in use."""
        if self._peaks is None:
            if not self._device.in_use():
                return NOTHING
            self._index, self.name, self.product, self.capacity = self._device.resolve()
            self._peaks = self._open_peaks()
            self._mine = self._peaks.open(self._index)
            self.in_use = True
        stats, peak, reserved = self._peaks.take(self._index, self._mine)
        return _reading(stats, peak, reserved)

    def close(self) -> None:
        """No peak is reset any more."""
        if self._peaks is not None:
            self._peaks.close(self._index, self._mine)


class UntouchedCounters:
    """The same without resetting a peak: it is exact where the counter rose, else a lower bound.

    Args:
        device: which one.
        stats: gives the nested counters of a device by its index.
    """

    kind = "allocator"

    def __init__(self, device: DeviceHandle, stats: Callable[[int], Stats]) -> None:
        self.name, self.product = device.name, ""
        self.capacity: int | None = None
        self.in_use = False
        self._device, self._stats = device, stats
        self._index = 0
        self._allocated, self._reserved = HighWater(), HighWater()

    def read(self) -> Reading:
        """The counters now; zeros as long as the device is not in use."""
        if not self.in_use:
            if not self._device.in_use():
                return NOTHING
            self._index, self.name, self.product, self.capacity = self._device.resolve()
            self.in_use = True
        stats = self._stats(self._index)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        peak, exact = self._allocated.since(allocated["current"], allocated["peak"])
        peak_reserved, known = self._reserved.since(reserved["current"], reserved["peak"])
        return _reading(stats, peak, peak_reserved, exact=exact, reserved_exact=known)

    def close(self) -> None:
        """Nothing was changed."""


class ProcessCounters:
    """The resident memory of this process, whatever in it took it. The system's peak is not reset.

    Args:
        resident: gives resident bytes now, and the highest there ever were.
    """

    name = kind = "process"
    product = ""
    capacity: int | None = None
    in_use = True

    def __init__(self, resident: Callable[[], tuple[int, int]]) -> None:
        self._resident, self._high = resident, HighWater()

    def read(self) -> Reading:
        """The memory now."""
        now, top = self._resident()
        return Reading(now, *self._high.since(now, top))

    def close(self) -> None:
        """Nothing was changed."""


class HighWater:
    """What a counter of the highest ever tells about the time between two looks at it."""

    def __init__(self) -> None:
        self._level = self._top = 0

    def since(self, level: int, top: int) -> tuple[int, bool]:
        """The highest since the last look, and whether it is known: else it may have been higher.

        Args:
            level: what there is now.
            top: the highest there ever was.
        """
        peak = top if top > self._top else max(level, self._level)
        exact = peak >= top >= self._top  # it falls where somebody set it back: then nothing is known
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
    )
