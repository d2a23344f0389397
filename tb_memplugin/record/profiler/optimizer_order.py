"""Find the owners of an optimizer's temporaries, which are allocated in the order of its parameters.

An optimizer that goes from one parameter to the next calls the same operators for each: its step is one
sequence of operators, repeated. A foreach optimizer makes the temporaries of all parameters within one
operator. Either rule is applied only if sizes confirm it. If all parameters have the same owner, it owns all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64

SCALAR_BYTES = 8
"""Allocations up to this size are taken for scalars: hyperparameters that became tensors."""


def temporaries_in_order(
    size: Int64, operator: Int32, operator_end_ns: Int64, parameters: Sequence[tuple[int, int]]
) -> Int64:
    """Return the module's row of each allocation in one optimizer step: int64, -1 where it is not certain.

    Args:
        size: the bytes of each allocation, shape (n,), in time order.
        operator: the operator of each allocation, shape (n,).
        operator_end_ns: when that call of the operator ended, shape (n,).
        parameters: (module row, bytes) of the parameters that the step changes, in its order.
    """
    owner, wanted = np.array(parameters, np.int64).reshape(-1, 2).T
    if not len(wanted) or not len(size):
        return np.full(len(size), -1, np.int64)
    if np.all(owner == owner[0]):
        return np.full(len(size), owner[0], np.int64)
    repeated = _repeated(size, operator, operator_end_ns, wanted)
    if repeated is not None:
        owners: Int64 = owner[repeated]
        return owners
    large = wanted > SCALAR_BYTES
    return _by_operator(size, operator, owner[large], wanted[large])


def _repeated(size: Int64, operator: Int32, operator_end_ns: Int64, wanted: Int64) -> Int64 | None:
    """Return the parameter of each allocation if the calls of operators repeat for each parameter.

    They do if they are the same operators in the same order for each, one of which allocates as many bytes
    as the parameter has, and nothing else.
    """
    first = np.flatnonzero(
        np.append(True, (operator[1:] != operator[:-1]) | (operator_end_ns[1:] != operator_end_ns[:-1]))
    )
    length, rest = divmod(len(first), len(wanted))
    if rest:
        return None
    count = np.diff(np.append(first, len(size)))
    called, allocated = operator[first].reshape(-1, length), size[first].reshape(-1, length)
    alone = (count == 1).reshape(-1, length)
    if np.any(called != called[0]) or not np.any(np.all(alone & (allocated == wanted[:, None]), axis=0)):
        return None
    return np.repeat(np.repeat(np.arange(len(wanted)), length), count)


def _by_operator(size: Int64, operator: Int32, owner: Int64, wanted: Int64) -> Int64:
    """Return the owner of each allocation of the operators whose sizes are the parameters', in order."""
    module = np.full(len(size), -1, np.int64)
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
