"""What the sizes of other blocks tell of a snapshot's: parameters, replaced state and cuBLAS workspaces."""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.cublas import LARGE_WORKSPACE, LT_WORKSPACE, MOST_WORKSPACES, WORKSPACE
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase
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
    categories[_large_workspaces(trace, certain, phase)] = Category.WORKSPACE
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


def _large_workspaces(trace: MemoryTrace, certain: Bool, phase: UInt8) -> Int64:
    """Return the blocks of the size of a cuBLAS workspace on Hopper, which tensors have, too, that are one.

    A product allocates it once, next to its result, and cuBLASLt's with it. So they are workspaces if they
    stay, and each other call of their stack allocated all but them. Autograd's thread has its own, without
    Python's frames: a later backward allocates all but it. Where only two blocks of this size stay, each
    tells what the other is.
    """
    blocks = trace.allocations
    stays = blocks.freed == len(trace.events)
    kept = stays & (blocks.born >= 0) & ~certain
    large = blocks.bytes == LARGE_WORKSPACE
    workspaces: list[int] = []
    for device in np.unique(blocks.device[kept & large]).tolist():
        here = blocks.device == device
        count = np.count_nonzero(here & large & stays)
        if count > MOST_WORKSPACES[LARGE_WORKSPACE]:
            continue
        of_device = _allocated_once(trace, np.flatnonzero(here & (blocks.born >= 0)), kept)
        of_device += _of_first_backward(trace, np.flatnonzero(here & kept & (blocks.stack < 0)), phase)
        candidates = np.flatnonzero(here & kept & large)
        is_silent = blocks.stack[candidates] < 0
        if (
            np.count_nonzero(is_silent) == np.isin(candidates, of_device).sum() == 1
            and len(candidates) == count == 2
        ):
            of_device += [row for row in candidates.tolist() if not _has_native_frames(trace, row)]
        workspaces += of_device
    return np.array(workspaces, np.int64)


def _of_first_backward(trace: MemoryTrace, rows: Int64, phase: UInt8) -> list[int]:
    """Return the workspaces of autograd's thread: a later backward allocates all but them, in the same order.

    Args:
        rows: the blocks of a device that stay and have no stack.
        phase: the phase of each event.
    """
    blocks, events = trace.allocations, trace.events
    born, size = blocks.born[rows], blocks.bytes[rows]
    large = np.flatnonzero(size == LARGE_WORKSPACE)
    if not len(large):
        return []
    is_own = (events.kind == Kind.ALLOC) & (events.device == blocks.device[rows[0]])
    at = np.flatnonzero(is_own & np.isin(phase, (Phase.FORWARD, Phase.BACKWARD)))
    passes = np.split(at, np.flatnonzero(np.diff(phase[at])) + 1)
    passes = [of_pass for of_pass in passes if len(of_pass) and phase[of_pass[0]] == Phase.BACKWARD]
    sizes = {tuple(events.bytes[of_pass].tolist()) for of_pass in passes}
    workspaces: list[int] = []
    for of_pass in passes:
        lt = np.flatnonzero((size == LT_WORKSPACE) & np.isin(born, of_pass))
        for row in large[np.isin(born[large], of_pass)].tolist():
            for left_out in ([row], [row, *lt.tolist()]):
                rest = of_pass[~np.isin(of_pass, born[left_out])]
                if tuple(events.bytes[rest].tolist()) in sizes:
                    workspaces += rows[left_out].tolist()
                    break
    return workspaces


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
    moment = most_alive(blocks.born[gradients], blocks.freed[gradients], len(phase))
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


def most_alive(born: Int64, freed: Int64, events: int) -> int:
    """Return the event after which the largest number of the blocks are alive."""
    change = np.bincount(born + 1, minlength=events + 2) - np.bincount(freed + 1, minlength=events + 2)
    return int(np.argmax(np.cumsum(change))) - 1


def _same_sizes(a: Int64, b: Int64) -> bool:
    """Whether two sets of blocks have the same sizes, each equally often."""
    return len(a) == len(b) >= FEWEST and bool(np.array_equal(np.sort(a), np.sort(b)))
