"""Identify blocks by size: cuBLAS workspaces, parameters by their gradients, old optimizer state by the new.

A snapshot rarely shows how a parameter was allocated: that was long before its first entry. But if the
gradients of a model are known, its parameters are the blocks of exactly the same sizes. The rule applies only
if sizes and counts agree without exception: a single extra block leaves all of them unknown.
"""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.cublas import LARGE_WORKSPACE, LT_WORKSPACE, MOST_WORKSPACES, WORKSPACE
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Bool, Int64, UInt8

FEWEST = 8
"""The smallest number of blocks that must agree. Fewer could agree by accident."""


def by_sizes(trace: MemoryTrace, category: UInt8, certain: Bool, phase: UInt8, ends_step: Bool) -> UInt8:
    """Return the categories of allocations, including those that follow from the sizes of other blocks.

    Args:
        category: the category of each allocation, `UNKNOWN` if not known.
        certain: which of them a label or a frame names.
        phase: the phase of each event.
        ends_step: mask of events at which no optimizer step runs.
    """
    categories: UInt8 = category.copy()
    blocks = trace.allocations
    categories[_workspaces(trace, certain)] = Category.WORKSPACE
    categories[_large_workspaces(trace, certain)] = Category.WORKSPACE
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
    rows = []
    for device in np.unique(blocks.device[kept]).tolist():
        here = right_size & (blocks.device == device)
        if not (here & ~kept).any() and np.count_nonzero(here) <= MOST_WORKSPACES[WORKSPACE]:
            rows += np.flatnonzero(here & ~certain).tolist()
    return np.array([row for row in rows if not _has_native_frames(trace, row)], np.int64)


def _large_workspaces(trace: MemoryTrace, certain: Bool) -> Int64:
    """Return the blocks of the size of a cuBLAS workspace on Hopper, which tensors have, too, that are one.

    A product allocates it once, next to its result, and cuBLASLt's with it. So they are workspaces if they
    stay, and each other call of their stack allocated all but them. Autograd's thread has its own, without
    Python's frames: the only other block of this size that stays.
    """
    blocks = trace.allocations
    kept = (blocks.freed == len(trace.events)) & (blocks.born >= 0) & ~certain
    large = blocks.bytes == LARGE_WORKSPACE
    workspaces: list[int] = []
    for device in np.unique(blocks.device[kept & large]).tolist():
        here = blocks.device == device
        once = _allocated_once(trace, np.flatnonzero(here & (blocks.born >= 0)), kept)
        stays = here & large & (blocks.freed == len(trace.events))
        silent = np.flatnonzero(stays & kept & (blocks.stack < 0)).tolist()
        if np.count_nonzero(stays[once]) == len(silent) == 1 and np.count_nonzero(stays) == 2:
            once += silent
        workspaces += once if np.count_nonzero(stays) <= MOST_WORKSPACES[LARGE_WORKSPACE] else []
    return np.array(workspaces, np.int64)


def _allocated_once(trace: MemoryTrace, rows: Int64, kept: Bool) -> list[int]:
    """Return the kept blocks of workspaces that one call of a stack in Python allocated, and no other.

    Args:
        rows: the allocations of a device, in order.
        kept: which of all allocations may be workspaces.
    """
    stack, size = trace.allocations.stack[rows], trace.allocations.bytes[rows]
    fits = kept[rows] & (stack >= 0)
    first = np.flatnonzero(np.diff(stack, prepend=-2))
    length = np.diff(np.append(first, len(rows)))
    once: list[int] = []
    for at in np.flatnonzero(fits & (size == LARGE_WORKSPACE)).tolist():
        call = int(np.searchsorted(first, at, side="right")) - 1
        within = np.arange(first[call], first[call] + length[call])
        extra = within[fits[within] & np.isin(size[within], (LARGE_WORKSPACE, LT_WORKSPACE))]
        same = stack[first] == stack[at]
        same[call] = False
        is_once = same.any() and length[call] == length[same].max() + len(extra)
        if is_once and not _has_native_frames(trace, int(rows[at])):
            once += rows[extra].tolist()
    return once


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
