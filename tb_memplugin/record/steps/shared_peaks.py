"""Share an allocator's peak counters between readers, so that a reset by one does not affect the others.

An allocator keeps one peak per counter since the last reset, for all readers. A reset to measure the peak of
a step would destroy the peak of the training for the user. So torch's functions that read and reset these
counters are wrapped: before the monitor's resets, the peaks are saved; the user's reads return the higher of
the saved and the current peak; and the user's resets clear the saved peaks, after passing the current ones on
to the monitor's readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

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

    The functions stay wrapped, so that the user's reads are correct also after the last reader has ended.
    A read takes some microseconds longer.

    Args:
        doors: the functions that read and reset the counters.
    """

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._lock = threading.RLock()
        self._shared: dict[int, _Shared] = {}
        module = doors.module
        self._read: Callable[[int], Stats] = getattr(module, doors.readers[0])
        self._reset: Callable[[int], None] = getattr(module, doors.resetters[0])
        for name in doors.readers:
            if hasattr(module, name):
                setattr(module, name, self._reading(getattr(module, name)))
        for name in doors.resetters:
            if hasattr(module, name):
                setattr(module, name, self._resetting(getattr(module, name)))

    def open(self, index: int) -> list[int]:
        """Begin a reader of a device and return it: its peaks [allocated, reserved] since its last `take`."""
        with self._lock:
            mine = [0, 0]
            self._shared.setdefault(index, _Shared()).ours.append(mine)
            return mine

    def close(self, index: int, mine: list[int]) -> None:
        """End a reader."""
        with self._lock:
            ours = self._shared[index].ours
            ours[:] = [peaks for peaks in ours if peaks is not mine]

    def take(self, index: int, mine: list[int]) -> tuple[Stats, int, int]:
        """Return the counters, and the peak allocated and reserved bytes since this reader's last `take`.

        Memory that another thread allocates and frees during this call may be missed.
        """
        with self._lock:
            stats = self._read(index)
            self._keep(index, stats)
            self._reset(index)
            peaks = mine[0], mine[1]
            mine[:] = [0, 0]
            return stats, *peaks

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
                shared = self._shared.get(index)
                for key, counter in _counters(stats) if shared is not None else ():
                    assert shared is not None
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
