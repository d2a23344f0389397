"""Assign categories to blocks: by identity where that is known, else by lifetime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tb_memplugin.read.cublas import (
    LARGE_WORKSPACE,
    LT_WORKSPACE,
    WORKSPACE,
    LtWorkspace,
    keeps_workspaces,
    lt_workspace,
)
from tb_memplugin.read.phases import phase_at
from tb_memplugin.trace import Category, Phase, Reason, Spans
from tb_memplugin.trace.tables import Bool, Int32, Int64, Rows, UInt8

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


class Judged(NamedTuple):
    """The category of each block, and why: a `Category` and a `Reason`, columns of equal length."""

    category: UInt8
    reason: UInt8


CATEGORY_OF = {
    Reason.NO_RULE: Category.UNKNOWN,
    Reason.FREED_IN_OPERATOR: Category.TEMPORARY,
    Reason.IN_FORWARD: Category.ACTIVATION,
    Reason.IN_RECOMPUTATION: Category.RECOMPUTED,
    Reason.FREED_IN_BACKWARD: Category.AUTOGRAD_DETAIL,
    Reason.OUTLIVES_BACKWARD: Category.GRADIENT,
    Reason.FREED_IN_STEP: Category.TEMPORARY,
    Reason.OUTLIVES_STEP: Category.OPTIMIZER_STATE,
    Reason.NOT_IN_STATE: Category.UNKNOWN,
    Reason.FREED_BEFORE_PHASE: Category.TEMPORARY,
    Reason.ALIVE_IN_FORWARD: Category.INPUT,
    Reason.KEPT: Category.UNKNOWN,
    Reason.COMMUNICATION_OPERATOR: Category.COMMUNICATION,
}
"""The category that follows from each rule of `by_lifetime`."""

_CATEGORY_OF = np.full(len(Reason), Category.UNKNOWN, np.uint8)
_CATEGORY_OF[list(CATEGORY_OF)] = list(CATEGORY_OF.values())


def category_of(reason: UInt8) -> UInt8:
    """Return the categories that follow from the rules of `by_lifetime`."""
    return _CATEGORY_OF[reason]


MOST_STEPS = 2
"""How many more steps a block may see that was allocated between phases, and still be data of one step."""


def by_lifetime(born: Born, phases: Spans, operators: Sequence[str], *, knows_optimizer: bool) -> Judged:
    """Return the category of each block, from the times of its allocation and free, and the rule.

    The first rule that applies decides:

    - freed before its operator ended: temporary;
    - allocated by an operator of communication: communication;
    - allocated in forward: activation; in a module call during backward: recomputed;
    - allocated in backward: autograd detail if it is freed in this backward or in a later one (as with
      `create_graph`), else gradient;
    - allocated in an optimizer step: temporary if it is freed by the end of the step, including closures
      that the step calls; else optimizer state, or unknown if optimizer state is identified by pointer;
    - allocated elsewhere: temporary if it is freed before the next phase; input if it is alive when a
      forward of the same step begins, and freed at most `MOST_STEPS` steps later; else unknown. What is never
      freed is as others of its operator and size were. Here a step ends with an optimizer's step or, if there
      is none in the window, with a forward.

    Args:
        phases: the time ranges of the phases, in time order.
        knows_optimizer: whether optimizer state has been identified by pointer.
    """
    reason = np.full(len(born.time_ns), Reason.NO_RULE, np.uint8)
    here = _stretch_end(born, phases)
    outlives = born.freed_ns > here
    forward, backward = born.phase == Phase.FORWARD, born.phase == Phase.BACKWARD
    reason[forward] = Reason.IN_FORWARD
    kept = outlives[backward] & (phase_at(phases, born.freed_ns[backward]) != Phase.BACKWARD)
    reason[backward] = np.where(kept, Reason.OUTLIVES_BACKWARD, Reason.FREED_IN_BACKWARD)
    reason[backward & born.recomputing] = Reason.IN_RECOMPUTATION
    optimizer = born.phase == Phase.OPTIMIZER
    left = Reason.NOT_IN_STATE if knows_optimizer else Reason.OUTLIVES_STEP
    reason[optimizer] = np.where(outlives[optimizer], left, Reason.FREED_IN_STEP)
    other = np.flatnonzero(born.phase == Phase.OTHER)
    kind = numbered(born.device[other], born.bytes[other], born.operator[other])
    starts, ends = phases.start_ns[phases.phase == Phase.FORWARD], _step_ends(phases)
    reason[other] = between_phases(
        born.time_ns[other], born.freed_ns[other], outlives[other], kind, starts, ends
    )
    communication = np.array([name.startswith(COMMUNICATION_PREFIXES) for name in (*operators, "")], bool)
    reason[communication[born.operator]] = Reason.COMMUNICATION_OPERATOR
    reason[(born.operator_end_ns > 0) & (born.freed_ns <= born.operator_end_ns)] = Reason.FREED_IN_OPERATOR
    return Judged(category_of(reason), reason)


def between_phases(
    born: Int64, freed: Int64, outlives: Bool, kind: Rows, forwards: Int64, step_ends: Int64
) -> UInt8:
    """Return the reasons for blocks that were allocated in no phase, by the last rules of `by_lifetime`.

    Args:
        born, freed: when they were: times in nanoseconds, or numbers of events.
        outlives: whether they are alive up to the next phase.
        kind: a number for each block, the same for blocks that come again, see `numbered`.
        forwards: when forwards begin, ascending.
        step_ends: when steps end, ascending.
    """
    reason = np.full(len(born), Reason.NO_RULE, np.uint8)
    never = np.iinfo(np.int64).max
    step = np.searchsorted(step_ends, born, side="right")
    upcoming = np.append(forwards, never)[np.searchsorted(forwards, born, side="right")]
    enters = (freed > upcoming) & (upcoming < np.append(step_ends, never)[step])
    later = np.searchsorted(step_ends, freed, side="right") - step
    reason[enters] = np.where(later[enters] <= MOST_STEPS, Reason.ALIVE_IN_FORWARD, Reason.KEPT)
    reason[~enters & (freed > upcoming)] = Reason.KEPT
    reason[~outlives] = Reason.FREED_BEFORE_PHASE
    is_data, is_freed = reason == Reason.ALIVE_IN_FORWARD, freed <= step_ends.max(initial=0)
    others_stay = np.isin(kind, kind[reason == Reason.KEPT])
    others_stay &= ~np.isin(kind, kind[is_data & is_freed])
    reason[is_data & ~is_freed & others_stay] = Reason.KEPT
    return reason


def numbered(*columns: npt.NDArray[np.integer[Any]]) -> Rows:
    """Return a number for each row of columns of shape (rows,), the same for rows with the same values."""
    number: Rows = np.zeros(len(columns[0]), np.intp)
    for column in columns:
        values, of_column = np.unique(column, return_inverse=True)
        number = np.unique(number * len(values) + of_column, return_inverse=True)[1]
    return number


def _step_ends(phases: Spans) -> Int64:
    """Return when the optimizer's steps end, including closures; without any, when the forwards end."""
    optimizer = phases.phase == Phase.OPTIMIZER
    if not optimizer.any():
        ends: Int64 = phases.end_ns[phases.phase == Phase.FORWARD]
        return ends
    gap_after = phases.end_ns[:-1] != phases.start_ns[1:]
    last = np.append(np.flatnonzero(gap_after), len(phases) - 1)
    ends = phases.end_ns[last[np.unique(np.searchsorted(last, np.flatnonzero(optimizer)))]]
    return ends


def of_known(category: UInt8) -> UInt8:
    """Return the reasons of blocks whose category a recorder knew from their tensor or their operator."""
    table = np.full(len(Category), Reason.HELD, np.uint8)
    table[Category.UNKNOWN], table[Category.INPUT] = Reason.NO_RULE, Reason.ENTERED
    table[Category.TEMPORARY], table[Category.WORKSPACE] = Reason.FREED_IN_OPERATOR, Reason.SIZE
    table[Category.COMMUNICATION] = Reason.COMMUNICATION_OPERATOR
    table[Category.PARAMETER_COPY] = Reason.COPY
    return table[category]


def workspaces(born: Born, devices: Sequence[str], operators: Sequence[str], window_end_ns: int) -> Bool:
    """Return a mask of cuBLAS workspaces: of their exact size, allocated in a matrix product.

    They are never freed, or freed before the product returns (`keeps_workspaces`). Tensors have the size on
    Hopper, too: it is a workspace only beside the product's result. Where cuBLASLt keeps its own, these are
    taken too, unless a device has more blocks of that size than workspaces of cuBLAS.
    """
    if not any(name.startswith("cuda") for name in devices):
        return np.zeros(len(born.device), bool)
    on_cuda = np.array([name.startswith("cuda") for name in devices], bool)[born.device]
    _, call, count = np.unique(born.operator_end_ns, return_inverse=True, return_counts=True)
    right_size = (born.bytes == WORKSPACE) | ((born.bytes == LARGE_WORKSPACE) & (count[call] > 1))
    kept, passing = born.freed_ns > window_end_ns, born.freed_ns <= born.operator_end_ns
    lives = kept if keeps_workspaces() else passing
    mask: Bool = _allocated_by(_MATMULS, born, operators) & right_size & on_cuda & lives
    if lt_workspace() is LtWorkspace.KEPT:
        of_lt = _allocated_by(_WITH_A_BIAS, born, operators) & (born.bytes == LT_WORKSPACE) & on_cuda & kept
        for device in np.unique(born.device[of_lt]).tolist():
            here = born.device == device
            if np.count_nonzero(of_lt & here) <= np.count_nonzero(mask & here & ~of_lt):
                mask |= of_lt & here
    return mask


def _allocated_by(names: Sequence[str], born: Born, operators: Sequence[str]) -> Bool:
    """Return a mask of the blocks that operators of these names allocated."""
    named = np.array([name.removeprefix("aten::") in names for name in (*operators, "")], bool)
    mask: Bool = named[born.operator]
    return mask


def _stretch_end(born: Born, phases: Spans) -> Int64:
    """Return when each allocation's phase ends; for phase `OTHER`, when the next phase begins.

    A closure splits an optimizer step into several time ranges without gaps; the step ends with the last.
    """
    forever = np.iinfo(np.int64).max - 1
    ends, starts = np.append(phases.end_ns, forever), np.append(phases.start_ns, forever)
    row = np.searchsorted(phases.start_ns, born.time_ns, side="right")
    lasts = np.flatnonzero(starts[1:] != ends[:-1])
    step_end = ends[np.append(lasts, len(ends) - 1)[np.searchsorted(lasts, row - 1)]]
    end = np.where(born.phase == Phase.OPTIMIZER, step_end, ends[row - 1])
    return np.where(born.phase == Phase.OTHER, starts[row], end)
