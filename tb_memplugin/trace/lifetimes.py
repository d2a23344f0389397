"""An index of lifetimes: the blocks that are alive at some moments, found without a look at all others.

It is an interval tree in columns. A block that lives within one run of `NEAR` moments is found among those
that were allocated in this run. Each longer one is filed once: at the moment with the most trailing zero bits
that it sees. All blocks filed there are alive at that moment, so they are at most as many as are alive at
once, and a search looks at one such moment for each bit of the number of events.
"""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace.tables import Int64, Rows, ranges

NEAR_BITS = 8
NEAR = 1 << NEAR_BITS

INDEXED = 1 << 16
"""From how many blocks on an index is worth building: a look at fewer takes less than building it."""


class Lifetimes:
    """The index of all blocks of a trace.

    Moment m is the one after m events: a block is alive from moment born + 1 to moment freed.

    Args:
        born: int64, shape (n,), ascending: the events that allocated the blocks, from -1.
        freed: int64, shape (n,): the events that freed them; blocks with freed <= born are never alive.
    """

    def __init__(self, born: Int64, freed: Int64) -> None:
        self._born, self._freed = born, freed
        is_long = freed >> NEAR_BITS > (born + 1) >> NEAR_BITS
        rows = np.flatnonzero(is_long)
        # The highest bit in which the first and the last moment differ; float64 has all bits of 2 ** 53.
        bits = np.frexp((freed[rows] ^ (born[rows] + 1)).astype(np.float64))[1].astype(np.uint8)
        order = np.argsort(bits, kind="stable")
        ends = np.cumsum(np.bincount(bits))
        self._filed = [
            (bit, rows[order[ends[bit - 1] : ends[bit]]])
            for bit in range(NEAR_BITS + 1, len(ends))
            if ends[bit] > ends[bit - 1]
        ]
        """Long blocks by that bit, in order of allocation and so of the moments at which they are filed."""

    @property
    def nbytes(self) -> int:
        """The bytes of the index, without the columns that it was made from."""
        return sum(rows.nbytes for _, rows in self._filed)

    def alive_at(self, moments: Int64) -> Rows:
        """Return the rows of all blocks that are alive at any of some moments, ascending.

        Args:
            moments: int64, shape (m,), ascending, from 0 to the number of events.
        """
        near = ranges(*self._born_between(_distinct(moments >> NEAR_BITS), NEAR_BITS))
        candidates = [near[self._freed[near] >> NEAR_BITS <= (self._born[near] + 1) >> NEAR_BITS]]
        for bit, filed in self._filed:
            first, end = self._born_between(_distinct(moments >> bit), bit)
            candidates.append(filed[ranges(np.searchsorted(filed, first), np.searchsorted(filed, end))])
        rows = np.concatenate(candidates)
        following = np.searchsorted(moments, self._born[rows], side="right")
        is_alive = np.append(moments, np.iinfo(np.int64).max)[following] <= self._freed[rows]
        return np.sort(rows[is_alive])

    def _born_between(self, run: Int64, bit: int) -> tuple[Rows, Rows]:
        """Return the first row allocated in each run of 2 ** bit moments, and the one after the last."""
        first = np.searchsorted(self._born, (run << bit) - 1)
        end = np.searchsorted(self._born, ((run + 1) << bit) - 1)
        return first, end


def _distinct(ascending: Int64) -> Int64:
    distinct: Int64 = ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]
    return distinct
