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
from contextlib import suppress
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
