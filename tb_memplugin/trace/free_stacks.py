"""Where frees happened, as far as a snapshot tells."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Int32, code_mask

_FREES = code_mask((Kind.FREE_REQUESTED, Kind.FREE_COMPLETED))


def stacks_where_they_happened(trace: MemoryTrace) -> Int32:
    """Return the row of the stack of each event; -1 for frees if theirs are those of their allocations.

    Without `context="all"`, PyTorch writes the stack of the allocation for the free
    (CUDACachingAllocator.cpp, `free`).
    """
    blocks, stack = trace.allocations, trace.events.stack
    both = (blocks.born >= 0) & (blocks.freed < len(stack))
    if not both.any() or (stack[blocks.born[both]] != stack[blocks.freed[both]]).any():
        return stack
    return np.where(_FREES[trace.events.kind], np.int32(-1), stack)
