"""Exact sums by group."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace.tables import Int64


def sums(group: Int64, size: Int64, groups: int) -> Int64:
    """Return the exact integer sum of `size` in each group: int64, shape (groups,)."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, size)
    return total
