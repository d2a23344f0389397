"""Find caches that grow, such as the keys and values of attention, by their stacks and lifetimes.

In each call of a model the same stack allocates a block, larger than that of the call before by the same
bytes, and that one is freed: `keys = torch.cat([keys, new_keys])`, once for each layer.
"""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Bool, Int64, Rows

FEWEST_CALLS = 3
"""How many blocks, one in the place of the other, are a chain."""


def caches(trace: MemoryTrace, is_candidate: Bool) -> Bool:
    """Return which blocks are parts of caches that grow.

    What a model allocates for the new tokens alone is as large as what they add to the cache. So chains count
    only if as many other blocks have just that size: without a cache, all that a model allocates grows.

    Args:
        trace: a trace with stacks.
        is_candidate: shape (allocations,), whether nothing shows that a block is something else.
    """
    blocks = trace.allocations
    result = np.zeros(len(blocks), bool)
    rows = np.flatnonzero(is_candidate & (blocks.stack >= 0) & (blocks.born >= 0))
    rows = rows[np.argsort(blocks.stack[rows], kind="stable")]
    bounds = np.flatnonzero(np.diff(blocks.stack[rows])) + 1
    sizes: Int64 = blocks.bytes[rows]
    for of_stack in np.split(rows, bounds):
        if len(of_stack) < FEWEST_CALLS or blocks.bytes[of_stack[0]] >= blocks.bytes[of_stack[-1]]:
            continue
        members, growth = _chains(blocks.born[of_stack], blocks.freed[of_stack], blocks.bytes[of_stack])
        for each in np.unique(growth).tolist():
            of_growth = members[growth == each]
            if np.count_nonzero(sizes == each) >= len(of_growth):
                result[of_stack[of_growth]] = True
    return result


def _chains(born: Int64, freed: Int64, size: Int64) -> tuple[Rows, Int64]:
    """Return the blocks of one stack that are in chains of three and more, and by how much each chain grows.

    Layers follow one another: in one call, their blocks have one size. A block is freed after that of its
    layer in the next call is allocated, and before the one after that is.
    """
    larger = np.flatnonzero(size != size[0])
    layers = int(larger[0]) if len(larger) else len(size)
    if len(born) < FEWEST_CALLS * layers:
        return np.empty(0, np.intp), np.empty(0, np.int64)
    growth = size[layers:] - size[:-layers]
    after_next = np.concatenate((born[2 * layers :], np.full(layers, np.iinfo(np.int64).max)))
    replaced = (freed[:-layers] > born[layers:]) & (freed[:-layers] < after_next)
    linked = (growth > 0) & replaced
    steady = np.flatnonzero(linked[:-layers] & linked[layers:] & (growth[:-layers] == growth[layers:]))
    members = np.concatenate((steady, steady + layers, steady + 2 * layers))
    members, first = np.unique(members, return_index=True)
    return members, np.tile(growth[steady], 3)[first]
