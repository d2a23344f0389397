"""Owners of an optimizer's temporaries: they come in the order of its parameters.

Single-tensor AdamW makes two per parameter and foreach AdamW one per parameter, in order. The rule
is used only where the sizes prove it: an operator's allocations within one optimizer step must be
the parameters' own sizes, in their order. Scalars (hyperparameters that became tensors) prove nothing
and are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64

SCALAR_BYTES = 8
"""Allocations up to this size are taken for scalars."""


def temporaries_in_order(size: Int64, operator: Int32, parameters: Sequence[tuple[int, str, int]]) -> Int64:
    """The module's row of each allocation of one optimizer step: int64, -1 where nothing is proven.

    Args:
        size: bytes, shape (n,), in order of birth.
        operator: the operator of each, shape (n,).
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
