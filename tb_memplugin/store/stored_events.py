"""The events of a large side file, whose columns are unpacked when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tb_memplugin.store.scratch import joined
from tb_memplugin.trace.tables import EVENT_DTYPES, Array, Events

UnpackColumn = Callable[[str], np.ndarray]


class StoredEvents(Events):
    """Events that unpack a column when it is first read. Equal to `Events` in all else."""

    __slots__: tuple[str, ...] = ("_unpack",)
    _unpack: UnpackColumn

    @classmethod
    def of(cls, unpack: UnpackColumn) -> StoredEvents:
        """Return events whose column `name` is the result of `unpack(name)`, which may raise any error."""
        events = object.__new__(cls)
        object.__setattr__(events, "_unpack", unpack)
        return events

    def __getattr__(self, name: str) -> Any:
        """Unpack a column; Python asks this only for those that are not set yet."""
        if name not in EVENT_DTYPES:
            raise AttributeError(name)
        column = self._unpack(name)
        object.__setattr__(self, name, column)
        return column

    def kept(self, pieces: Callable[[], Iterable[Array]]) -> Array:
        """Return the pieces of a column that is computed from these events as one: on disk if it is large."""
        return joined(pieces)


StoredEvents.__slots__ = Events.__slots__  # by which others name the columns
