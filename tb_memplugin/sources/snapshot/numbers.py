"""The whole numbers in a snapshot as arrays, and their rows in tables, whatever a stranger chose for them.

Python's dicts are quick for all numbers but those that somebody picked to be slow (they probe a table in
an order that the numbers tell), and hashing a tuple of tuples may take for ever. So types are checked
before anything is hashed, and numbers of a file are compared as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tb_memplugin.trace.tables import Int32, UInt64

MOST_DISTINCT = 1 << 14
"""Streams, and pools, of one snapshot; real ones have some dozens."""

FEW = 64
"""So many distinct values are looked for one by one, which is quicker than sorting a million of them."""


def whole_numbers(values: Sequence[Any], dtype: type[np.generic] = np.int64) -> np.ndarray:
    """Python integers as an array; anything else (a float, a text, a bool) is a TypeError."""
    wrong = set(map(type, values)) - {int}
    if wrong:
        raise TypeError(f"a whole number is {sorted(kind.__name__ for kind in wrong)}")
    return np.fromiter(values, dtype, len(values))


def addresses(values: Sequence[Any]) -> UInt64:
    """Addresses as unsigned numbers: the C++ pickler writes those above 2**63 as negative ones."""
    try:
        return whole_numbers(values).view(np.uint64)
    except OverflowError:
        if not all(-(1 << 63) <= value < 1 << 64 for value in values):
            raise
        return np.array([value & 0xFFFF_FFFF_FFFF_FFFF for value in values], np.uint64)


def rows_of_numbers(columns: Sequence[UInt64], row_of: Callable[..., int]) -> Int32:
    """A row for each line of some columns, asked for once a distinct line, by first appearance: int32.

    Args:
        columns: of one length.
        row_of: the row of a line's numbers.

    Raises:
        ValueError: there are more than `MOST_DISTINCT` distinct lines.
    """
    rows = np.full(len(columns[0]), -1, np.int32)
    left = np.arange(len(rows))
    for _ in range(FEW):
        if not len(left):
            return rows
        same = np.ones(len(left), bool)
        for column in columns:
            same &= column[left] == column[left[0]]
        rows[left[same]] = row_of(*(int(column[left[0]]) for column in columns))
        left = left[~same]
    lines = np.stack([column[left] for column in columns], axis=1)
    found, first, of_line = np.unique(lines, axis=0, return_index=True, return_inverse=True)
    if len(found) > MOST_DISTINCT:
        raise ValueError(f"{len(found):,} different streams or pools are more than any program has")
    made = np.empty(len(found), np.int32)
    for place in np.argsort(first).tolist():
        made[place] = row_of(*found[place].tolist())
    rows[left] = made[of_line.reshape(-1)]
    return rows
