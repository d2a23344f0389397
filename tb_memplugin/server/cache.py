"""A cache with a bound in bytes: results are computed once, also for requests side by side."""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from tb_memplugin.server.turns import holding
from tb_memplugin.store.scratch import is_mapped
from tb_memplugin.trace import MemoryTrace

MIB = 1 << 20
_SLOT_BYTES = 1_000
"""About how many bytes the cache itself needs for a result."""

_SAMPLES = 50
"""Of how many elements of a long sequence the size is measured."""

Result = TypeVar("Result")


@dataclass(eq=False)
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_computed: bool = False
    result: object = None
    bytes: int = 0
    window: weakref.ref[MemoryTrace] | None = None


class Cache:
    """Keeps results by key. If they have too many bytes together, the least recently used go.

    The last result is kept whatever its size.

    Args:
        most_bytes: how many bytes they may have together.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._bytes = 0
        self._gone: list[int] = []
        """Bytes of results that went with their windows, which `_bytes` still counts."""

    def get(
        self,
        key: Hashable,
        compute: Callable[[], Result],
        weigh: Callable[[Result], int] | None = None,
        window: MemoryTrace | None = None,
    ) -> Result:
        """Return the result of a key, or compute it. A failure is not kept.

        Requests for the same result that come at the same time wait until the first of them has computed it.

        Args:
            weigh: returns its bytes, `size_of` by default.
            window: with what the result is dropped.
        """
        slot = self._slot(key, window)
        with holding(slot.lock):
            if not slot.is_computed:
                self._compute(key, slot, compute, weigh or size_of)
            return cast(Result, slot.result)

    def of_window(self, window: MemoryTrace, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return `get`, for a result that is dropped with a window; the cache keeps no window in memory."""
        return self.get((id(window), key), compute, window=window)

    def kept(self, key: Hashable) -> object:
        """Return the result of a key if it is kept, else None. It counts as used."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                return None
            self._slots.move_to_end(key)
            return slot.result

    def forget(self, key: Hashable, result: object) -> None:
        """Drop the result of a key, unless another one is kept by now."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None and slot.is_computed and slot.result is result:
                self._drop(key)

    def bytes(self) -> int:
        """Return how many bytes all results have together."""
        with self._lock:
            return self._total()

    def _slot(self, key: Hashable, window: MemoryTrace | None) -> _Slot:
        with self._lock:
            slot = self._slots.get(key)
            if slot is None or (slot.window is not None and slot.window() is not window):
                self._drop(key)
                slot = self._slots[key] = _Slot()
                if window is not None:  # no lock: it is called at any time, also in this thread
                    slot.window = weakref.ref(window, lambda _: self._gone.append(self._popped(key)))
            self._slots.move_to_end(key)
            return slot

    def _compute(
        self, key: Hashable, slot: _Slot, compute: Callable[[], Result], weigh: Callable[[Result], int]
    ) -> None:
        try:
            result = slot.result = compute()
        except BaseException:
            with self._lock:
                if self._slots.get(key) is slot:
                    self._drop(key)
            raise
        size = _SLOT_BYTES + size_of(key) + weigh(result)
        with self._lock:
            slot.is_computed = True
            if slot.window is None or slot.window() is not None:
                self._drop(key)
                self._slots[key], slot.bytes = slot, size
                self._bytes += size
            self._shrink(slot)

    def _shrink(self, newest: _Slot) -> None:
        if self._total() <= self.most_bytes:
            return
        for key, slot in list(self._slots.items()):
            if slot.is_computed and slot is not newest:
                self._drop(key)
            if self._total() <= self.most_bytes:
                return

    def _total(self) -> int:
        while self._gone:
            self._bytes -= self._gone.pop()
        return self._bytes

    def _drop(self, key: Hashable) -> None:
        self._bytes -= self._popped(key)

    def _popped(self, key: Hashable) -> int:
        """Drop a result, if it is there, and return its bytes."""
        slot = self._slots.pop(key, None)
        return slot.bytes if slot is not None else 0


RESULTS = Cache(32 * MIB)
"""What routes compute once from a window: it lasts at most as long as the window is in memory."""

ZOOMS = Cache(16 * MIB)
"""What they compute of a stretch, which would push the others out."""


def size_of(value: object) -> int:
    """Return about how many bytes a result has: arrays exactly, long sequences from a sample."""
    match value:
        case np.ndarray():
            return 0 if is_mapped(value) or 0 in value.strides else value.nbytes
        case MemoryTrace():
            return 0  # it is counted among the windows
        case dict():
            return sys.getsizeof(value) + _sum(list(value)) + _sum(list(value.values()))
        case list() | tuple() | set() | frozenset():
            return sys.getsizeof(value) + _sum(list(value))
        case _ if dataclasses.is_dataclass(value):
            fields = (getattr(value, each.name) for each in dataclasses.fields(value))
            return sys.getsizeof(value) + _sum(list(fields))
        case _ if hasattr(value, "__dict__"):
            return sys.getsizeof(value) + _sum(list(vars(value).values()))
    return sys.getsizeof(value, 64)


def _sum(values: Sequence[object]) -> int:
    step = max(1, len(values) // _SAMPLES)
    sampled: Iterable[object] = values[::step]
    sizes = [size_of(value) for value in sampled]
    return sum(sizes) * len(values) // max(1, len(sizes))
