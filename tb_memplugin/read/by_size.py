"""Made-up addresses for blocks that are known only by size."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace.tables import Int64, UInt64


def addresses_by_size(group: Int64, signed: Int64) -> UInt64:
    """Return a made-up address for each alloc and free, so that a free ends the newest block of its size.

    It is not known which of several blocks of the same size a free ends, and no sum depends on it. At each
    address, allocs and frees alternate. A free that is the first row at its address ends a block that was
    alive before the first row; the number of such frees is the smallest possible.

    Args:
        group: the group of each row, at least 0, shape (n,). Blocks of different groups (devices,
            categories) are never matched.
        signed: bytes in time order, negative for frees; shape (n,).

    Returns:
        Addresses from 1, without gaps; shape (n,).
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
    # A block's depth is the number of live blocks after its alloc and before its free.
    depth = np.where(turn > 0, level, level + 1)
    kind = np.cumsum(new) - 1
    _, address = np.unique(np.stack((kind, depth)), axis=1, return_inverse=True)
    addresses = np.empty(len(order), np.uint64)
    addresses[order] = address.reshape(-1) + 1
    return addresses
