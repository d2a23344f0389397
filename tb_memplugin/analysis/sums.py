"""Exact sums and levels by group, and the groups of many keys."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64, Rows


def sums(group: Int64, size: Int64, groups: int) -> Int64:
    """Return the exact integer sum of `size` in each group: int64, shape (groups,)."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, size)
    return total


def levels_of_groups(
    group: Int64, size: Int64, first: Int64 | Int32, end: Int64 | Int32, shape: tuple[int, int]
) -> Int64:
    """Return the bytes that each group has at each moment: int64, of this shape.

    Each has `size` bytes in its group at the moments from `first` to before `end`, which may be the number of
    moments.
    """
    groups, width = shape[0], shape[1] + 1
    change = sums(group * width + first, size, groups * width)
    change -= sums(group * width + end, size, groups * width)
    levels: Int64 = np.cumsum(change.reshape(groups, width), axis=1)[:, :-1]
    return levels


MOST_COUNTED = 1 << 22
"""Keys below this are counted in a table, which takes a tenth of the time that sorting them takes."""


def groups(key: Int64, end: int) -> tuple[Rows, Int64]:
    """Return the groups of equal keys, in order of their keys.

    Args:
        key: int64, shape (n,), from 0.
        end: more than the highest key.

    Returns:
        The index of the first of each group; and the group of each, int64, shape (n,).
    """
    if end > max(MOST_COUNTED, len(key)):
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        return first, group.astype(np.int64)
    first = np.full(end, -1, np.intp)
    first[key[::-1]] = np.arange(len(key))[::-1]  # of several, the last that is written stays
    used = np.flatnonzero(first >= 0)
    number = np.empty(end, np.int64)
    number[used] = np.arange(len(used))
    return first[used], number[key]
