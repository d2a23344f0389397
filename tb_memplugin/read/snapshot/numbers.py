"""Convert the integers in a snapshot to arrays and table rows, safely for hostile values.

Python's dicts can be made very slow by numbers that were chosen for it (the numbers determine the order of
probing), and hashing nested tuples may take forever. So types are checked before anything is hashed, and
numbers from a file are compared as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64, UInt64

MOST_DISTINCT = 1 << 14
"""The largest number of streams, and of pools, in one snapshot; real ones have some dozens."""

FEW = 64
"""How many distinct values are looked up one by one, which is faster than sorting a million rows."""


def whole_numbers(values: Sequence[Any] | Int64, field: str) -> Int64:
    """Return Python integers as an array.

    Args:
        values: what a field contains, record by record; an array is returned as it is.

    Raises:
        TypeError: a value is anything else (float, str, bool).
        OverflowError: a value has more than 64 bits.
    """
    if isinstance(values, np.ndarray):
        return values
    wrong = set(map(type, values)) - {int}
    if wrong:
        raise TypeError(f"{field} is {sorted(kind.__name__ for kind in wrong)[0]}, not a whole number")
    try:
        return np.fromiter(values, np.int64, len(values))
    except OverflowError as error:
        raise OverflowError(f"{field} has more than 64 bits") from error


def count_none(written: Sequence[Any] | Int64) -> int:
    """Return how many values are None."""
    return 0 if isinstance(written, np.ndarray) else written.count(None)


def addresses(values: Sequence[Any] | Int64, field: str) -> UInt64:
    """Return addresses as uint64: the C++ pickler writes those from 2**63 as negative numbers.

    Args and exceptions are those of `whole_numbers`.
    """
    try:
        return whole_numbers(values, field).view(np.uint64)
    except OverflowError:
        if not all(-(1 << 63) <= value < 1 << 64 for value in values):
            raise
        return np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in values], np.uint64)


def rows_of_numbers(columns: Sequence[UInt64], row_of: Callable[..., int]) -> Int32:
    """Return a table row for each tuple of numbers: int32, shape (length of a column,).

    Args:
        columns: columns of equal length, one per element of the tuples.
        row_of: returns the row of a tuple; called once per distinct tuple, in order of first appearance.

    Raises:
        ValueError: there are too many distinct tuples (see `MOST_DISTINCT`).
    """
    rows = np.full(len(columns[0]), -1, np.int32)
    left = np.arange(len(rows))
    for _ in range(FEW):
        if not len(left):
            return rows
        same = np.ones(len(left), bool)
        for column in columns:
            same &= column[left] == column[left[0]]
        row = row_of(*(int(column[left[0]]) for column in columns))
        if len(left) == len(rows) and same.all():
            return np.broadcast_to(np.int32(row), len(rows))
        rows[left[same]] = row
        left = left[~same]
    lines = np.stack([column[left] for column in columns], axis=1)
    distinct, first, of_line = np.unique(lines, axis=0, return_index=True, return_inverse=True)
    if len(distinct) > MOST_DISTINCT:
        raise ValueError(f"{len(distinct):,} different streams or pools are more than any program has")
    distinct_rows = np.empty(len(distinct), np.int32)
    for index in np.argsort(first).tolist():
        distinct_rows[index] = row_of(*distinct[index].tolist())
    rows[left] = distinct_rows[of_line.reshape(-1)]
    return rows
