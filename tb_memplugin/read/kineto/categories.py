"""Assign categories to the blocks of a Kineto trace, by when they were allocated and freed."""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.categories import Born, Judged, by_lifetime
from tb_memplugin.read.kineto.events import MemoryRows
from tb_memplugin.read.kineto.owners import Owned
from tb_memplugin.trace import Allocations, Category, Reason


def judged(memory: MemoryRows, owners: Owned, blocks: Allocations) -> Judged:
    """Return the category of each memory row, and why. Rows that are no allocations have none.

    Args:
        memory: the memory rows.
        owners: what they were in.
        blocks: the blocks that the rows allocate and free.
    """
    count = len(memory.bytes)
    fresh = np.flatnonzero(blocks.born >= 0)
    born, freed = blocks.born[fresh], blocks.freed[fresh]
    thread = np.append(memory.thread, -1)
    forever = np.iinfo(np.int64).max
    by_lifetimes = by_lifetime(
        Born(
            time_ns=memory.time_ns[born],
            freed_ns=np.append(memory.time_ns, forever)[freed],
            device=memory.device[born],
            bytes=memory.bytes[born],
            phase=owners.phase[born],
            operator=owners.operator[born],
            operator_end_ns=np.where(thread[born] == thread[freed], owners.operator_end_ns[born], 0),
            recomputing=owners.recomputing[born],
        ),
        owners.phases,
        owners.operators,
        knows_optimizer=False,
    )
    category = np.full(count, Category.UNKNOWN, np.uint8)
    reason = np.full(count, Reason.NOT_RECORDED, np.uint8)
    category[born], reason[born] = by_lifetimes
    return Judged(category, reason)
