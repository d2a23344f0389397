"""A cache for what routes compute from a window, which lasts as long as the window is in memory."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from tb_memplugin.trace import MemoryTrace

T = TypeVar("T")


class Kept:
    """A cache of the last results, by window and by key. It keeps only weak references to windows.

    Args:
        most: how many results to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, tuple[weakref.ref[MemoryTrace], object]] = OrderedDict()

    def of(self, trace: MemoryTrace, asked: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result of this window for the key `asked`, or compute it with `make`."""
        key = (id(trace), asked)
        with self._lock:
            found = self._found.get(key)
            if found is not None and found[0]() is trace:
                self._found.move_to_end(key)
                return cast(T, found[1])
        made = make()
        with self._lock:
            self._found[key] = (weakref.ref(trace), made)
            gone = [old for old, (window, _) in self._found.items() if window() is None]
            for old in gone:
                del self._found[old]
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        return made
