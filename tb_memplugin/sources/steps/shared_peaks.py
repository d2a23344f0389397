"""One allocator's peak counters, shared: each reader resets them for itself alone.

An allocator keeps one highest value of each counter since the last reset, for everyone. Who resets it to know
the peak of a step takes it from who wants the peak of the training. So the functions of torch through which
Python reads and resets these counters are wrapped: before a reset of ours, what was highest is kept; the
user's reads get the higher of both, the user's resets drop what was kept, and ours is told of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

Stats = dict[str, Any]
Name = tuple[Any, ...]
"""Of a counter: the keys that lead to it."""
Highest = TypeVar("Highest")

_LEVELS = ("allocated_bytes", "reserved_bytes")


@dataclass(frozen=True, slots=True)
class Doors:
    """The functions of a module through which the counters of a device are read and reset, by name.

    The first of each is the one that we use; the others lead to the same counters.
    """

    module: Any
    readers: Sequence[str]
    resetters: Sequence[str]

    def present(self) -> bool:
        """Whether the module has the first of each."""
        return hasattr(self.module, self.readers[0]) and hasattr(self.module, self.resetters[0])


@dataclass(slots=True)
class _Shared:
    """What was highest on one device since the user's last reset, and since each of ours."""

    user: dict[Name, int] = field(default_factory=dict)
    ours: list[list[int]] = field(default_factory=list)


class SharedPeaks:
    """The counters behind some doors, of all devices that they lead to.

    Once the doors are wrapped they stay so: what the user reads after our last reset is right, too. A read
    costs the user some microseconds more.

    Args:
        doors: how to get at the counters.
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
        """Begin a reader of a device: [highest allocated, highest reserved] since its last `take`."""
        with self._lock:
            mine = [0, 0]
            self._shared.setdefault(index, _Shared()).ours.append(mine)
            return mine

    def close(self, index: int, mine: list[int]) -> None:
        """End a reader."""
        with self._lock:
            ours = self._shared[index].ours
            ours[:] = [one for one in ours if one is not mine]

    def take(self, index: int, mine: list[int]) -> tuple[Stats, int, int]:
        """The counters, and the highest allocated and reserved bytes since this reader's last take.

        What another thread allocates and frees within the call itself may be missed.
        """
        with self._lock:
            stats = self._read(index)
            self._keep(index, stats)
            self._reset(index)
            peaks = mine[0], mine[1]
            mine[:] = [0, 0]
            return stats, *peaks

    def _keep(self, index: int, stats: Stats) -> None:
        """Note what is highest before it is reset."""
        shared = self._shared[index]
        highest = [int(stats[name]["all"]["peak"]) for name in _LEVELS]
        for one in shared.ours:
            one[:] = map(max, one, highest)
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
    """Every counter that has a peak: of a name and pool, of a name alone, of a private pool (2.13)."""
    for name, pools in stats.items():
        if isinstance(pools, dict):
            for pool, counter in pools.items():
                if isinstance(counter, dict) and "peak" in counter:
                    yield (name, pool), counter
                elif isinstance(counter, dict):
                    yield from (((name, pool, part), one) for part, one in counter.items() if "peak" in one)
            if "peak" in pools:
                yield (name,), pools
