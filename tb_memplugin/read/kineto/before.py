"""Find what was alive before a Kineto trace, from the gradients and the optimizer in it.

A trace has no allocation of a parameter that was there before. But each gradient that a backward leaves for
the optimizer has the dtype and the shape of a parameter, and so its bytes, and optimizers keep a known number
of tensors of that size for each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tb_memplugin.read.cublas import LARGE_WORKSPACE, LT_WORKSPACE, WORKSPACE
from tb_memplugin.read.kineto.events import MemoryRows
from tb_memplugin.read.kineto.owners import Owned
from tb_memplugin.read.kineto.ranges import ACCUMULATE, NODE_PREFIX, OPTIMIZER_PREFIX, Ranges, innermost
from tb_memplugin.trace import Allocations, Category, Phase, Reason, StartState
from tb_memplugin.trace.tables import Bool, Int64, Rows, UInt8

STATE_TENSORS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "SGD": 0}
"""How many tensors of a parameter's bytes torch's optimizers keep for it, without options (torch/optim)."""

WORKSPACES = frozenset(
    2 * kept + passing * LT_WORKSPACE for kept in (WORKSPACE, LARGE_WORKSPACE) for passing in range(3)
)
"""Bytes that a training keeps for cuBLAS: workspaces of two threads, the program's and autograd's, and up to
two of cuBLASLt."""

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}

ONE_MORE = {
    "SGD": {"aten::_foreach_mul_", "aten::mul_"},
    "Adam": {"aten::_foreach_maximum_", "aten::maximum"},
    "AdamW": {"aten::_foreach_maximum_", "aten::maximum"},
}
"""Operators that a step calls only if it keeps one tensor more: for `momentum`, `amsgrad`."""


def with_categories(
    start: StartState,
    memory: MemoryRows,
    ranges: Ranges,
    owners: Owned,
    category: UInt8,
    blocks: Allocations,
    in_blocks: Bool,
) -> StartState:
    """Return the start state with categories; bytes without an address are split into parts of one each.

    What is not sure stays unknown: nothing is said of a backward that leaves another number of blocks than it
    accumulates gradients, nor of parameters that may have been allocated in the trace.

    Args:
        start: the blocks that the trace frees, then a row without an address for the rest of each device.
        memory: the memory rows.
        owners: what the memory rows were in.
        category: the category of each memory row.
        blocks: the start's blocks, then those of the rows.
        in_blocks: mask of the devices with a caching allocator. The counter of others counts only while a
            profiler is on, so it does not tell what was alive at the start.
    """
    gradients, are_added = _of_one_backward(memory, ranges, owners, category, blocks)
    categorised = replace(start, category=start.category.copy(), reason=start.reason.copy())
    for device in np.unique(blocks.device[gradients]).tolist():
        sizes = blocks.bytes[gradients[blocks.device[gradients] == device]]
        freed = np.flatnonzero((start.address != 0) & (start.device == device))
        freed = freed[owners.phase[blocks.freed[freed]] == Phase.OTHER]
        if np.array_equal(np.sort(start.bytes[freed]), np.sort(sizes)):
            categorised.category[freed], categorised.reason[freed] = Category.GRADIENT, Reason.SAME_SIZES
        parameters = int(sizes.sum())
        if in_blocks[device] and _kept(owners, category, blocks, device) < parameters:
            tensors = _state_tensors(ranges, category, blocks, device)
            with_parameters = _split(categorised, device, Category.PARAMETER, parameters)
            has_parameters = with_parameters is not categorised
            with_gradients = _split(with_parameters, device, Category.GRADIENT, are_added * parameters)
            categorised = _split(with_gradients, device, Category.OPTIMIZER_STATE, tensors * parameters)
            rest = categorised.bytes[(categorised.address == 0) & (categorised.device == device)][:1].sum()
            if has_parameters and int(rest) in WORKSPACES and PRODUCTS.intersection(ranges.name):
                categorised = _split(categorised, device, Category.WORKSPACE, int(rest), Reason.SIZE)
    return _rows(categorised, np.flatnonzero(categorised.bytes))


def _of_one_backward(
    memory: MemoryRows, ranges: Ranges, owners: Owned, category: UInt8, blocks: Allocations
) -> tuple[Int64, bool]:
    """Return the blocks of the gradients of the backward with the most, if it accumulated as many.

    Where a trace allocates no gradient that stays, they are what the nodes that accumulate gradients free:
    they add it to a gradient that was there before. The bool says that.
    """
    in_trace = blocks.born >= 0
    rows = np.flatnonzero(
        in_trace & (np.append(category, Category.UNKNOWN)[blocks.born] == Category.GRADIENT)
    )
    are_added = not len(rows)
    if are_added:
        adds = np.array([*(name == ACCUMULATE for name in owners.operators), False], bool)
        rows = np.flatnonzero(in_trace & adds[np.append(owners.operator, -1)[blocks.freed]])
    if not len(rows):
        return rows, are_added
    starts = owners.phases.start_ns
    stretch = np.searchsorted(starts, memory.time_ns[blocks.born[rows]], side="right")
    most = int(np.bincount(stretch).argmax())
    accumulates = np.array([name == NODE_PREFIX + ACCUMULATE for name in ranges.name], bool)
    began = np.searchsorted(starts, ranges.start_ns[accumulates], side="right")
    in_most: Int64 = rows[stretch == most]
    return in_most if len(in_most) == np.count_nonzero(began == most) else rows[:0], are_added


def _kept(owners: Owned, category: UInt8, blocks: Allocations, device: int) -> int:
    """Return the bytes that the trace allocates outside all phases and never frees: maybe parameters."""
    kept = (blocks.born >= 0) & (blocks.freed >= len(category)) & (blocks.device == device)
    outside = np.append(owners.phase, Phase.BEFORE)[blocks.born] == Phase.OTHER
    return int(blocks.bytes[kept & outside].sum())


def _state_tensors(ranges: Ranges, category: UInt8, blocks: Allocations, device: int) -> int:
    """Return how many tensors for each parameter the optimizer had before; 0 if that is not known."""
    names = {ranges.name[row] for row in np.flatnonzero(ranges.optimizer).tolist()}
    kinds = {name.removeprefix(OPTIMIZER_PREFIX).removesuffix(".step") for name in names}
    is_state = np.append(category, Category.UNKNOWN)[blocks.born] == Category.OPTIMIZER_STATE
    is_new = (blocks.born >= 0) & is_state & (blocks.device == device)
    if len(kinds) != 1 or not kinds <= STATE_TENSORS.keys() or is_new.any():
        return 0
    kind = kinds.pop()
    inside = np.flatnonzero(ranges.operator & (innermost(ranges.parent, ranges.optimizer) >= 0))
    called = {ranges.name[row] for row in inside.tolist()}
    return STATE_TENSORS[kind] + bool(called & ONE_MORE.get(kind, set()))


def _split(
    start: StartState, device: int, category: Category, size: int, reason: Reason = Reason.SAME_SIZES
) -> StartState:
    """Return the start state with bytes of a category taken from a device's row without an address.

    It is returned as it is if that row has less.
    """
    rest = np.flatnonzero((start.address == 0) & (start.device == device))
    if not size or not len(rest) or size > start.bytes[rest[0]]:
        return start
    split = _rows(start, np.append(np.arange(len(start)), rest[0]))
    split.bytes[rest[0]] -= size
    split.bytes[-1], split.category[-1], split.reason[-1] = size, category, reason
    split.rounded[:] = np.where(split.rounded >= 0, split.bytes, -1)
    return split


def _rows(start: StartState, rows: Rows) -> StartState:
    return StartState(**{name: getattr(start, name)[rows] for name in StartState.__slots__})
