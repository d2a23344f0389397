"""Assign categories to blocks: by identity where that is known, else by lifetime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.sources.cublas import (
    LARGE_WORKSPACE,
    LT_WORKSPACE,
    WORKSPACE,
    LtWorkspace,
    keeps_workspaces,
    lt_workspace,
)
from tb_memplugin.sources.phases import phase_at
from tb_memplugin.sources.storages import Sighting
from tb_memplugin.trace import Allocations, Category, Phase, Spans
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8

COMMUNICATION_PREFIXES = ("c10d::", "_c10d_functional::", "nccl:", "gloo:", "fsdp::", "record_param_comms")
WORKSPACE_BYTES = frozenset({WORKSPACE, LARGE_WORKSPACE})
_MATMULS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "matmul",
    "MmBackward0",
    "AddmmBackward0",
    "BmmBackward0",
)
_WITH_A_BIAS = ("addmm", "linear", "_addmm_activation")
"""Operators in which cuBLASLt can compute the product."""


@dataclass(frozen=True, slots=True)
class Born:
    """The allocations made in the window: columns of equal length, in the order of allocation.

    `operator_end_ns` is when the operator (or autograd node) around the allocation ended, 0 for none;
    `recomputing` marks allocations inside a module call that ran during backward.
    """

    time_ns: Int64
    freed_ns: Int64
    device: UInt8
    bytes: Int64
    phase: UInt8
    operator: Int32
    operator_end_ns: Int64
    recomputing: Bool


def by_lifetime(born: Born, phases: Spans, operators: Sequence[str], *, knows_optimizer: bool) -> UInt8:
    """Return the category of each block, from the times of its allocation and free.

    The first rule that applies decides:

    - freed before its operator ended: temporary;
    - allocated by an operator of communication: communication;
    - allocated in forward: activation; in a module call during backward: recomputed;
    - allocated in backward: autograd detail if it is freed in this backward or in a later one (as with
      `create_graph`), else gradient;
    - allocated in an optimizer step: temporary if it is freed by the end of the step, including closures
      that the step calls; else optimizer state, or unknown if optimizer state is identified by pointer;
    - allocated elsewhere: input if it is alive when a forward begins, temporary if it is freed before the
      next phase, else unknown.

    Args:
        born: the allocations.
        phases: the time ranges of the phases, in time order.
        operators: names of operators, to find communication.
        knows_optimizer: whether optimizer state has been identified by pointer.
    """
    category = np.full(len(born.time_ns), Category.UNKNOWN, np.uint8)
    here, following = _stretch_end(born, phases), _next_forward(born, phases)
    outlives = born.freed_ns > here
    forward, backward = born.phase == Phase.FORWARD, born.phase == Phase.BACKWARD
    category[forward] = Category.ACTIVATION
    kept = outlives[backward] & (phase_at(phases, born.freed_ns[backward]) != Phase.BACKWARD)
    category[backward] = np.where(kept, Category.GRADIENT, Category.AUTOGRAD_DETAIL)
    category[backward & born.recomputing] = Category.RECOMPUTED
    optimizer = born.phase == Phase.OPTIMIZER
    left = Category.UNKNOWN if knows_optimizer else Category.OPTIMIZER_STATE
    category[optimizer] = np.where(outlives[optimizer], left, Category.TEMPORARY)
    other = born.phase == Phase.OTHER
    category[other & ~outlives] = Category.TEMPORARY
    category[other & (born.freed_ns > following)] = Category.INPUT
    communication = np.array([name.startswith(COMMUNICATION_PREFIXES) for name in (*operators, "")], bool)
    category[communication[born.operator]] = Category.COMMUNICATION
    category[(born.operator_end_ns > 0) & (born.freed_ns <= born.operator_end_ns)] = Category.TEMPORARY
    return category


def workspaces(born: Born, devices: Sequence[str], operators: Sequence[str], window_end_ns: int) -> Bool:
    """Return a mask of cuBLAS workspaces: of their exact size, allocated in a matrix product.

    They are never freed, or freed before the product returns (`keeps_workspaces`). Where cuBLASLt keeps its
    own, these are taken too, unless a device has more blocks of that size than workspaces of cuBLAS.
    """
    on_cuda = np.array([name.startswith("cuda") for name in devices] or [False], bool)[born.device]
    right_size = np.isin(born.bytes, list(WORKSPACE_BYTES))
    kept, passing = born.freed_ns > window_end_ns, born.freed_ns <= born.operator_end_ns
    lives = kept if keeps_workspaces() else passing
    mask: Bool = _made_by(_MATMULS, born, operators) & right_size & on_cuda & lives
    if lt_workspace() is LtWorkspace.KEPT:
        of_lt = _made_by(_WITH_A_BIAS, born, operators) & (born.bytes == LT_WORKSPACE) & on_cuda & kept
        for device in np.unique(born.device[of_lt]).tolist():
            here = born.device == device
            if np.count_nonzero(of_lt & here) <= np.count_nonzero(mask & here & ~of_lt):
                mask |= of_lt & here
    return mask


def _made_by(names: Sequence[str], born: Born, operators: Sequence[str]) -> Bool:
    """Return a mask of the blocks that operators of these names allocated."""
    known = np.array([name.removeprefix("aten::") in names for name in (*operators, "")], bool)
    mask: Bool = known[born.operator]
    return mask


def match_sightings(
    sightings: Sequence[Sighting], devices: Sequence[str], blocks: Allocations, time_ns: Int64
) -> Int64:
    """Return the row of the block that was alive at each sighting's time and address, -1 for none.

    Args:
        sightings: sightings at any time within the window.
        devices: device names; values of `blocks.device` are rows of them.
        blocks: the paired allocations.
        time_ns: the times of the events.
    """
    if not sightings:
        return np.empty(0, np.int64)
    wanted = np.array([seen.address for seen in sightings], np.uint64)
    seen_at = (
        np.searchsorted(time_ns, np.array([seen.time_ns for seen in sightings], np.int64), side="right") - 1
    )
    place = {name: row for row, name in enumerate(devices)}
    device = np.array([place.get(seen.device, -1) for seen in sightings])
    addresses = np.unique(wanted)
    code = np.searchsorted(addresses, blocks.address).clip(max=len(addresses) - 1)
    candidates = np.flatnonzero(addresses[code] == blocks.address)
    width = len(time_ns) + 2
    keys = code[candidates] * width + blocks.born[candidates] + 1
    order = np.argsort(keys, kind="stable")
    candidates, keys = candidates[order], keys[order]
    last = np.searchsorted(keys, np.searchsorted(addresses, wanted) * width + seen_at + 1, side="right") - 1
    row = np.append(candidates, -1)[last]
    found = (
        (last >= 0)
        & (blocks.address[row] == wanted)
        & (blocks.device[row] == device)
        & (blocks.freed[row] > seen_at)
    )
    return np.where(found, row, -1).astype(np.int64)


def _stretch_end(born: Born, phases: Spans) -> Int64:
    """Return when each allocation's phase ends; for phase `OTHER`, when the next phase begins.

    A closure splits an optimizer step into several time ranges without gaps; the step ends with the last.
    """
    forever = np.iinfo(np.int64).max - 1
    ends, starts = np.append(phases.end_ns, forever), np.append(phases.start_ns, forever)
    row = np.searchsorted(phases.start_ns, born.time_ns, side="right")
    lasts = np.flatnonzero(starts[1:] != ends[:-1])
    whole = ends[np.append(lasts, len(ends) - 1)[np.searchsorted(lasts, row - 1)]]
    end = np.where(born.phase == Phase.OPTIMIZER, whole, ends[row - 1])
    return np.where(born.phase == Phase.OTHER, starts[row], end)


def _next_forward(born: Born, phases: Spans) -> Int64:
    forever = np.iinfo(np.int64).max
    starts = np.append(phases.start_ns[phases.phase == Phase.FORWARD], forever)
    row = np.searchsorted(starts, born.time_ns, side="right").clip(max=len(starts) - 1)
    following: Int64 = starts[row]
    return following
