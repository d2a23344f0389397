"""Advice: what a forward returned is kept until the next forward has returned."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.advice_rules.unused_gradients import Backwards
from tb_memplugin.analysis.advice_rules.unused_graph import MOST_OF_TWO, without_backward
from tb_memplugin.analysis.block_origins import UNKNOWN_ORIGINS, Judged, StepBlocks
from tb_memplugin.analysis.findings import Result
from tb_memplugin.trace import MemoryTrace, Phase
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64

SOON = 16
"""A variable was bound again if its old block is freed within so many events of the new one's birth."""

FEWEST = 3
"""Fewest results of one line in one module that pile up."""

MOST_TRIED = 2_000
"""So many blocks of forward after a birth are searched for one that repeats."""


def previous_result(judged: Judged) -> Result:
    """Find blocks that are freed just after the same line allocated their like again, a forward later.

    That is what `output = model(batch)` in a loop does. The next forward begins where a line of forward
    that ran before the block's birth runs again. The finding's bytes are by how much the highest step's
    peak falls if each block is freed there. Or results pile up, see `_piled_up`, if that costs more.
    """
    trace, blocks, step = judged.trace, judged.blocks, judged.step
    if not blocks.are_known:
        return UNKNOWN_ORIGINS
    forward = trace.allocations.phase[blocks.rows] == Phase.FORWARD
    bound = _bound_again(trace, blocks)
    bound = bound[_once_a_forward(blocks, forward)[bound]]
    tried = (
        (bound, _next_forwards(blocks, np.flatnonzero(forward).astype(np.int64), bound)),
        _piled_up(judged, forward),
    )
    kept, begun = max(
        tried, key=lambda both: step.saved(blocks.bytes[both[0]], both[1], blocks.freed[both[0]])
    )
    return judged.avoidable(
        "previous_result",
        "problem",
        kept,
        "What {name} returned is still alive while the next forward runs.",
        "No result of an earlier forward raises the peak",
        "Delete the result (del output), move it to the CPU, or leave the function that holds it before the "
        "next forward. If only the last token's logits are used, compute no others.",
        gone=begun - 1,
    )


def _bound_again(trace: MemoryTrace, blocks: StepBlocks) -> Int64:
    """Return the blocks (indices) that are freed soon after the next block of their origin and size."""
    data = np.flatnonzero((blocks.born >= 0) & ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA))
    order = data[np.lexsort((blocks.born[data], blocks.kinds[data]))]
    first, second = order[:-1], order[1:]
    late = blocks.freed[first] - blocks.born[second]
    again = (blocks.kinds[first] == blocks.kinds[second]) & (late > 0) & (late <= SOON)
    again &= blocks.freed[first] < len(trace.events)
    third = np.append(second[1:], second[-1:])
    again &= (
        (blocks.kinds[third] != blocks.kinds[second])
        | (third == second)
        | (blocks.freed[first] < blocks.born[third])
    )
    return np.sort(first[again]).astype(np.int64)


def _piled_up(judged: Judged, forward: Bool) -> tuple[Int64, Int64]:
    """Return blocks (indices) that outlive the birth of their like in the same module, and that birth.

    They are results that a list keeps, without a backward or after it: at the peak, at most two sites have
    most of the bytes, each with `FEWEST` blocks or more of one size. Calls of layers without a name could be
    those of one forward, and do not count.
    """
    trace, blocks = judged.trace, judged.blocks
    named = np.array([*(module.is_module for module in trace.modules), False])
    module = trace.allocations.module[blocks.rows].astype(np.int64)
    can_pile = named[module] | blocks.of(lambda origin: bool(origin.frames) and not origin.in_call)
    can_pile &= forward & (blocks.born >= 0) & ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA)
    can_pile &= without_backward(trace, blocks) | Backwards.of(trace, judged.device).outlived(judged)
    _, kind = np.unique(blocks.kinds, return_inverse=True)
    _, kind = np.unique(kind * len(named) + module + 1, return_inverse=True)
    at_peak = can_pile & blocks.at_peak
    piled = at_peak & (np.bincount(kind, at_peak)[kind] >= FEWEST)
    of_site = np.sort(np.bincount(blocks.sites[piled], blocks.bytes[piled]))
    if of_site[-2:].sum() < MOST_OF_TWO * blocks.bytes[at_peak].sum():
        piled[:] = False
    rows = np.flatnonzero(can_pile & np.isin(kind, kind[piled])).astype(np.int64)
    rows = rows[np.lexsort((blocks.born[rows], kind[rows]))]
    has_next = np.append(kind[rows][1:] == kind[rows][:-1], False)[: len(rows)]
    return rows[has_next], blocks.born[np.roll(rows, -1)[has_next]] + 1


def _once_a_forward(blocks: StepBlocks, forward: Bool) -> Bool:
    """Return the mask of the blocks of forward whose kind repeats as seldom as any: not once a layer."""
    _, kind, count = np.unique(blocks.kinds, return_inverse=True, return_counts=True)
    times = count[kind]
    least = int(times[forward & (times > 1)].min(initial=len(times)))
    once: Bool = forward & (times <= least + 1)
    return once


def _next_forwards(blocks: StepBlocks, forward: Int64, rows: Int64) -> Int64:
    """Return the first event after each birth at which forward repeats itself, else one after the free."""
    _, first_of_kind, kind = np.unique(blocks.kinds[forward], return_index=True, return_inverse=True)
    born, first = blocks.born[forward], blocks.born[forward][first_of_kind][kind]
    begun: Int64 = blocks.freed[rows] + 1
    for number, birth in enumerate(blocks.born[rows].tolist()):
        after = int(np.searchsorted(born, birth, side="right"))
        same = np.flatnonzero(first[after : after + MOST_TRIED] < birth)
        if len(same):
            begun[number] = born[after + same[0]]
    return begun
