"""Blocks without an address: told apart by their size alone."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace.tables import Int64, UInt64


def addresses_by_size(group: Int64, signed: Int64) -> UInt64:
    """A made-up address for each alloc and free, so that the newest block of a size is freed first.

    Which of several blocks of one size a free ends cannot be known, and makes no difference to any sum.
    At one address allocs and frees take turns. A free that comes first at its address ended a block
    that was alive before the first row: there are as few of them as possible.

    Args:
        group: blocks of different groups (devices, categories) are never matched; shape (n,), 0 or more.
        signed: bytes in time order, negative for frees; shape (n,).

    Returns:
        Addresses from 1 on, without gaps.
    """
    size = np.abs(signed)
    order = np.lexsort((size, group))  # stable: in time order within a group and size
    new = np.ones(len(order), bool)
    new[1:] = (group[order][1:] != group[order][:-1]) | (size[order][1:] != size[order][:-1])
    turn = np.where(signed[order] < 0, -1, 1)
    level = np.cumsum(turn)
    first = np.flatnonzero(new)
    before = np.concatenate(([0], level))[first]
    level -= np.repeat(before, np.diff(np.append(first, len(order))))
    # A block's place is the level that its alloc rises to, and its free falls from.
    place = np.where(turn > 0, level, level + 1)
    kind = np.cumsum(new) - 1
    _, address = np.unique(np.stack((kind, place)), axis=1, return_inverse=True)
    found = np.empty(len(order), np.uint64)
    found[order] = address.reshape(-1) + 1
    return found
