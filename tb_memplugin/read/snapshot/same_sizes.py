"""Identify blocks by size: cuBLAS workspaces, parameters by their gradients, old optimizer state by the new.

A snapshot rarely shows how a parameter was allocated: that was long before its first entry. But if the
gradients of a model are known, its parameters are the blocks of exactly the same sizes. The rule applies only
if sizes and counts agree without exception: a single extra block leaves all of them unknown.
"""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.cublas import MOST_WORKSPACES, WORKSPACE
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Bool, Int64, UInt8

FEWEST = 8
"""The smallest number of blocks that must agree. Fewer could agree by accident."""


def by_sizes(trace: MemoryTrace, category: UInt8, certain: Bool, phase: UInt8, ends_step: Bool) -> UInt8:
    """Return the categories of allocations, including those that follow from the sizes of other blocks.

    Args:
        trace: a trace.
        category: the category of each allocation, `UNKNOWN` if not known.
        certain: which of them a label or a frame names.
        phase: the phase of each event.
        ends_step: mask of events at which no optimizer step runs.
    """
    categories: UInt8 = category.copy()
    blocks = trace.allocations
    categories[_workspaces(trace, certain)] = Category.WORKSPACE
    for device in range(len(trace.devices)):
        rows = np.flatnonzero((categories == Category.UNKNOWN) & (blocks.device == device))
        categories[_replaced_state(trace, categories, phase, rows, ends_step)] = Category.OPTIMIZER_STATE
        rows = rows[categories[rows] == Category.UNKNOWN]
        categories[_with_gradients(trace, categories, phase, rows, device)] = Category.PARAMETER
    return categories


def _workspaces(trace: MemoryTrace, certain: Bool) -> Int64:
    """Return the blocks of the size of a cuBLAS workspace that nothing else explains.

    PyTorch allocates a workspace in the first product of a thread on a stream and keeps it, so with Python's
    frames alone it looks like a result of that product. Frames of C++ would name it. Of a tensor's size, some
    blocks would be freed, or there would be many.
    """
    blocks = trace.allocations
    right_size = blocks.bytes == WORKSPACE
    kept = right_size & (blocks.freed == len(trace.events))
    found = []
    for device in np.unique(blocks.device[kept]).tolist():
        here = right_size & (blocks.device == device)
        if not (here & ~kept).any() and np.count_nonzero(here) <= MOST_WORKSPACES[WORKSPACE]:
            found += np.flatnonzero(here & ~certain).tolist()
    return np.array([row for row in found if not _has_native_frames(trace, row)], np.int64)


def _has_native_frames(trace: MemoryTrace, row: int) -> bool:
    return any(not read_frame(text).is_python for text in trace.stack(int(trace.allocations.stack[row])))


def _replaced_state(trace: MemoryTrace, category: UInt8, phase: UInt8, rows: Int64, ends_step: Bool) -> Int64:
    """Return those of the unknown blocks that an optimizer step freed and replaced by new state."""
    blocks = trace.allocations
    old: Int64 = rows[(blocks.born[rows] < 0) & (blocks.freed[rows] < len(phase))]
    old = old[phase[blocks.freed[old]] == Phase.OPTIMIZER]
    if not len(old):
        return old
    device, first = blocks.device[old[0]], int(blocks.freed[old].min())
    step_ends = np.flatnonzero(ends_step & (trace.events.device == device))
    limits = np.concatenate(([-1], step_ends, [len(phase)]))
    after = int(np.searchsorted(limits, first, side="right"))
    begin, end = limits[after - 1], limits[after]
    new = np.flatnonzero(
        (category == Category.OPTIMIZER_STATE)
        & (blocks.device == device)
        & (blocks.born > begin)
        & (blocks.born < end)
    )
    same: Int64 = old if _same_sizes(blocks.bytes[old], blocks.bytes[new]) else old[:0]
    return same


def _with_gradients(trace: MemoryTrace, category: UInt8, phase: UInt8, rows: Int64, device: int) -> Int64:
    """Return those of the unknown blocks that were alive before backward and have one gradient each.

    Blocks already known as parameters are counted, too; otherwise momentum could be taken for parameters.
    """
    blocks = trace.allocations
    gradients = np.flatnonzero((category == Category.GRADIENT) & (blocks.device == device))
    if len(gradients) < FEWEST or not len(rows):
        return rows[:0]
    moment = _most_alive(blocks.born[gradients], blocks.freed[gradients], len(phase))
    gradients = gradients[(blocks.born[gradients] <= moment) & (blocks.freed[gradients] > moment)]
    begun = np.flatnonzero((phase == Phase.BACKWARD) & (trace.events.device == device))
    backward = int(begun[0]) if len(begun) else 0
    parameters = np.flatnonzero((category == Category.PARAMETER) & (blocks.device == device))
    both = np.concatenate((rows, parameters))
    both = both[(blocks.born[both] < backward) & (blocks.freed[both] > moment)]
    both = both[np.isin(blocks.bytes[both], blocks.bytes[gradients])]
    if not _same_sizes(blocks.bytes[both], blocks.bytes[gradients]):
        return rows[:0]
    unknown: Int64 = both[category[both] == Category.UNKNOWN]
    return unknown


def _most_alive(born: Int64, freed: Int64, events: int) -> int:
    """Return the event after which the largest number of the blocks are alive."""
    change = np.bincount(born + 1, minlength=events + 2) - np.bincount(freed + 1, minlength=events + 2)
    return int(np.argmax(np.cumsum(change))) - 1


def _same_sizes(a: Int64, b: Int64) -> bool:
    """Whether two sets of blocks have the same sizes, each equally often."""
    return len(a) == len(b) >= FEWEST and bool(np.array_equal(np.sort(a), np.sort(b)))
