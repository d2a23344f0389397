"""Live bytes by part at every 2 ** k-th moment, from which those at any moment follow in a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64, Rows, pieces_of, ranges

LEAST_BITS = 6
MOST_CELLS = 1 << 22
"""Of a table: with more parts or events, fewer moments are in it."""


class PartSums:
    """The live bytes of each part, of the blocks of one device.

    Moment m is the one after m events: a block is alive from moment born + 1 to moment freed.

    Args:
        born: int64, shape (n,), ascending: the events that allocated the blocks, from -1.
        freed: int64, shape (n,): the events that freed them; blocks with freed < 0 are never alive.
        freed_by: int32, shape (events,): the row of the block that each event freed, -1 if none.
        size: int64, shape (n,): the bytes of each block, 0 on other devices.
        part: int32, shape (n,): the part of each block.
    """

    def __init__(
        self,
        born: Int64,
        freed: Int64,
        freed_by: Int32,
        size: Int64,
        part: Int32,
        parts: int,
        kept: Callable[[Callable[[], Iterable[Int64]]], Int64],
    ) -> None:
        self._born, self._freed_by, self._size, self._part, self._parts = born, freed_by, size, part, parts
        self.bits = LEAST_BITS
        while (len(freed_by) >> self.bits) * parts > MOST_CELLS:
            self.bits += 1
        change = np.zeros(((len(freed_by) >> self.bits) + 2) * parts, np.int64)
        for rows in pieces_of(len(born)):
            # A block enters at the table's first moment that it sees, and leaves at the first after its free.
            enter, leave = (born[rows] >> self.bits) + 1, (freed[rows] >> self.bits) + 1
            stays = enter < leave
            own, bytes_ = part[rows][stays], size[rows][stays]
            np.add.at(change, enter[stays] * parts + own, bytes_)
            np.subtract.at(change, leave[stays] * parts + own, bytes_)
        table = change.reshape(-1, parts)
        np.cumsum(table, axis=0, out=table)
        self._table = kept(lambda: (table,))

    def at(self, moments: Int64) -> Int64:
        """Return the live bytes of each part at some moments: int64, shape (parts, m).

        Args:
            moments: int64, shape (m,), ascending, from 0 to the number of events.
        """
        coarse = moments >> self.bits
        begin, column = coarse << self.bits, np.arange(len(moments))
        total = self._table[coarse]
        first, end = np.searchsorted(self._born, (begin, moments))
        freed, column_freed = self._freed_by[ranges(begin, moments)], np.repeat(column, moments - begin)
        is_free = freed >= 0
        self._add(total, np.repeat(column, end - first), ranges(first, end), 1)
        self._add(total, column_freed[is_free], freed[is_free], -1)
        by_part: Int64 = total.T
        return by_part

    def _add(self, total: Int64, column: Int64, rows: Rows | Int32, sign: int) -> None:
        np.add.at(total.reshape(-1), column * self._parts + self._part[rows], sign * self._size[rows])
