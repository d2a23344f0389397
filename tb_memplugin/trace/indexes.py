"""Indexes of a long trace, which answer without a look at all blocks, events or values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace.tables import Bool, Int32, Int64, Rows, pieces_of, ranges

NEAR_BITS = 8
NEAR = 1 << NEAR_BITS

_NO_ROWS = np.zeros(0, np.intp)

INDEXED = 1 << 16
"""From how many blocks on an index is worth building: a look at fewer takes less than building it."""


class Lifetimes:
    """The index of all blocks of a trace: which are alive at some moments.

    It is an interval tree in columns. A block that lives within one run of `NEAR` moments is found among
    those that were allocated in this run. Each longer one is filed once: under the smallest run, of a power
    of two, that contains its first and its last moment. All blocks filed under a run are alive in its middle,
    so they are at most as many as are alive at once, and a search looks at one run for each bit of the
    number of events.

    Moment m is the one after m events: a block is alive from moment born + 1 to moment freed.

    Args:
        born: int64, shape (n,), ascending: the events that allocated the blocks, from -1.
        freed: int64, shape (n,): the events that freed them; blocks with freed <= born are never alive.
    """

    def __init__(self, born: Int64, freed: Int64) -> None:
        self._born, self._freed = born, freed
        of_pieces, bits_of_pieces = [_NO_ROWS], [np.zeros(0, np.uint8)]
        for piece in pieces_of(len(born)):
            first, last = born[piece] + 1, freed[piece]
            differ = first ^ last
            is_long = np.flatnonzero((last > first) & (differ >= NEAR))
            of_pieces.append(is_long + piece.start)
            # The highest bit in which the first and the last moment differ; float64 has all bits of 2 ** 53.
            bits_of_pieces.append(np.frexp(differ[is_long].astype(np.float64))[1].astype(np.uint8))
        rows, bits = np.concatenate(of_pieces), np.concatenate(bits_of_pieces)
        order = np.argsort(bits, kind="stable")
        ends = np.cumsum(np.bincount(bits))
        self._near = _begins(born, NEAR_BITS)
        self._filed = [
            (bit, filed.astype(np.int32), freed[filed].astype(np.int32), _begins(born[filed], bit))
            for bit in range(NEAR_BITS + 1, len(ends))
            if len(filed := rows[order[ends[bit - 1] : ends[bit]]])
        ]
        """Long blocks by that bit, in order of allocation and so of their runs, and where each run begins."""

    def alive_at(self, moments: Int64) -> Alive:
        """Return all blocks that are alive at any of some moments, in no order.

        Args:
            moments: int64, shape (m,), ascending, from 0 to the number of events.
        """
        row = np.searchsorted(self._born, moments)  # those before it are allocated by then
        columns = np.arange(len(moments), dtype=np.int32)

        def newer(begins: Rows, bit: int, end: Rows) -> tuple[Rows, Int32]:
            """Return what was filed under each moment's run after the moment before it, and its column.

            A block that is alive at a moment of its run is alive at the first one after its allocation.
            """
            run = np.minimum(moments >> bit, len(begins) - 1)
            first = np.maximum(begins[run], np.append(0, end[:-1]))
            return ranges(first, end), np.repeat(columns, end - first)

        near, column = newer(self._near, NEAR_BITS, row)
        moment, last = moments[column], self._freed[near]
        is_alive = (last >= moment) & (last >> NEAR_BITS <= moment >> NEAR_BITS)
        found = [_chosen(is_alive, near, column, last)]
        for bit, filed, freed, begins in self._filed:
            index, column = newer(begins, bit, np.searchsorted(filed, row.astype(np.int32)))
            ends = freed[index]
            found.append(_chosen(ends >= moments[column], filed[index], column, ends))
        rows, first, last = map(np.concatenate, zip(*found, strict=True))
        return Alive(rows, first, left(last, first, moments))


def _chosen(is_alive: Bool, *columns: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    rows = np.flatnonzero(is_alive)
    return [column[rows] for column in columns]


class Alive(NamedTuple):
    """Blocks that are alive at any of some moments, each at those from `first` to before `end`.

    `rows`: of all blocks. `first`, `end`: indices of moments, int32. All shape (n,).
    """

    rows: Rows
    first: Int32
    end: Int32

    def of(self, chosen: Bool | Rows) -> Alive:
        """Return some of them: by a mask, or by their indices."""
        return Alive(self.rows[chosen], self.first[chosen], self.end[chosen])


def left(freed: Int64, first: Int32, moments: Int64) -> Int32:
    """Return `np.searchsorted(moments, freed, side="right")`: the first moment at which each is not alive.

    Args:
        freed: int64, shape (n,): the event that freed each block.
        first: int32, shape (n,): the first moment at which it is alive. Most are alive at few.
        moments: int64, shape (m,), ascending.
    """
    end: Int32 = first + np.int32(1)
    later = np.flatnonzero(np.append(moments, np.iinfo(np.int64).max)[end] <= freed)
    end[later] = np.searchsorted(moments, freed[later], side="right")
    return end


def _begins(born: Int64, bit: int) -> Rows:
    """Return how many of some blocks were allocated before each run of `2 ** bit` moments, and in all."""
    runs = (int(born[-1]) + 1 >> bit) + 2 if len(born) else 1
    return np.searchsorted(born, (np.arange(runs) << bit) - 1)


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


Number = TypeVar("Number", np.int64, np.float64)

RUN = 64
"""How many values a run has."""


@dataclass(frozen=True, slots=True)
class Runs(Generic[Number]):
    """The lowest and highest of each `RUN` values of a level: shape (n // RUN,), dtype of the level."""

    low: npt.NDArray[Number]
    high: npt.NDArray[Number]


def runs_of(level: npt.NDArray[Number]) -> Runs[Number]:
    """Return the runs of a level, shape (n,); the last values that fill no run are in none."""
    full_runs = level[: len(level) // RUN * RUN].reshape(-1, RUN)
    return Runs(full_runs.min(axis=1), full_runs.max(axis=1))
