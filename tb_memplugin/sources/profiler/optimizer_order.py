"""Find the owners of an optimizer's temporaries, which are allocated in the order of its parameters.

Single-tensor AdamW makes two per parameter and foreach AdamW one per parameter, in order. The rule
is applied only if the sizes confirm it: an operator's allocations within one optimizer step must have
the sizes of the parameters, in their order. Scalars (hyperparameters that became tensors) are ignored
on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64

SCALAR_BYTES = 8
"""Allocations up to this size are taken for scalars."""


def temporaries_in_order(size: Int64, operator: Int32, parameters: Sequence[tuple[int, str, int]]) -> Int64:
    """Return the module's row of each allocation in one optimizer step: int64, -1 where it is not certain.

    Args:
        size: the bytes of each allocation, shape (n,), in time order.
        operator: the operator of each allocation, shape (n,).
        parameters: (module row, label, bytes) of the optimizer's parameters, in its order.
    """
    module = np.full(len(size), -1, np.int64)
    owner = np.array([row for row, _, count in parameters if count > SCALAR_BYTES], np.int64)
    wanted = np.array([count for _, _, count in parameters if count > SCALAR_BYTES], np.int64)
    if not len(wanted):
        return module
    for name in np.unique(operator):
        mine = np.flatnonzero((operator == name) & (size > SCALAR_BYTES))
        times, rest = divmod(len(mine), len(wanted))
        if rest or not times:
            continue
        for order in (np.tile(np.arange(len(wanted)), times), np.repeat(np.arange(len(wanted)), times)):
            if np.array_equal(size[mine], wanted[order]):
                module[mine] = owner[order]
                break
    return module
