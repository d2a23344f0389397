"""A cache for what routes compute from a window, which lasts as long as the window is in memory."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from tb_memplugin.trace import MemoryTrace

Result = TypeVar("Result")


@dataclass
class _Slot:
    window: weakref.ref[MemoryTrace]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_computed: bool = False
    result: object = None


class WindowCache:
    """A cache of the last results, by window and by key. It keeps only weak references to windows.

    Args:
        most: how many results to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._slots: OrderedDict[tuple[int, Hashable], _Slot] = OrderedDict()

    def get(self, window: MemoryTrace, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the cached result of a window for a key, or compute it.

        Requests for the same result that come at the same time wait until the first of them has computed it.
        """
        slot = self._slot(window, (id(window), key))
        with slot.lock:
            if not slot.is_computed:
                slot.result = compute()
                slot.is_computed = True
            return cast(Result, slot.result)

    def _slot(self, window: MemoryTrace, slot_key: tuple[int, Hashable]) -> _Slot:
        with self._lock:
            slot = self._slots.get(slot_key)
            if slot is None or slot.window() is not window:
                forget = weakref.ref(window, lambda _: self._slots.pop(slot_key, None))
                slot = self._slots[slot_key] = _Slot(forget)
            self._slots.move_to_end(slot_key)
            while len(self._slots) > self._most:
                self._slots.popitem(last=False)
            return slot
