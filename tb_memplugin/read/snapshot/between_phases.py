"""What lines outside of every phase allocate in a snapshot: data that enters a forward, and temporaries."""

from __future__ import annotations

import re

import numpy as np

from tb_memplugin.read.categories import between_phases, numbered
from tb_memplugin.read.snapshot.phases import next_event, on_threads_without_forward
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase, Reason
from tb_memplugin.trace.tables import Bool, Rows, UInt8

_TRANSFORM = re.compile(r"[/\\]_functorch[/\\](vmap|eager_transforms|apis)\.py:")
"""Frames of `torch.func`, whose functions have forward and backward without modules and autograd's thread."""


def reasons_between_phases(
    trace: MemoryTrace, is_candidate: Bool, born_phase: UInt8, phase: UInt8, category: UInt8
) -> tuple[Rows, UInt8]:
    """Return the blocks that lines outside of every phase allocated, and their reasons, see `between_phases`.

    A step ends with a backward or, where there is none, with a forward. Nothing tells parameters or state
    from data where no block of their size and stack was ever freed, nor new weights, as of an average or of
    meta-learning, where one line allocates several blocks that all have sizes of parameters. Nor from results
    what is allocated while a forward waits for its backward. Lines under a transformation of `torch.func` are
    not known to be outside of every phase.

    Args:
        is_candidate: whether frames say nothing of a block, shape (allocations,).
        born_phase: the phase of each allocation.
        phase: the phase of each event.
        category: the category of each allocation, `UNKNOWN` if not known.
    """
    blocks, events = trace.allocations, trace.events
    is_own = is_candidate & (category == Category.UNKNOWN) & (born_phase == Phase.OTHER)
    is_own &= (blocks.born >= 0) & (blocks.stack >= 0)
    stacks = np.unique(blocks.stack[is_own]).tolist()
    transformed = [row for row in stacks if any(map(_TRANSFORM.search, trace.stacks[row]))]
    is_own &= ~np.isin(blocks.stack, transformed)
    weights = category == (Category.PARAMETER if Category.PARAMETER in category else Category.GRADIENT)
    is_weight = np.isin(blocks.bytes, blocks.bytes[weights])
    elsewhere = on_threads_without_forward(trace, phase)
    reason = np.full(len(blocks), Reason.NO_RULE, np.uint8)
    for device in range(len(trace.devices)):
        at = np.flatnonzero((events.kind == Kind.ALLOC) & (events.device == device))
        rows, forwards = np.flatnonzero(is_own & (blocks.device == device)), at[phase[at] == Phase.FORWARD]
        if not len(rows) or not len(forwards):
            continue
        start, end, stack = blocks.born[rows], blocks.freed[rows], blocks.stack[rows]
        decided = at[(phase[at] != Phase.OTHER) & ~elsewhere[at]]
        last = Phase.BACKWARD if (phase[decided] == Phase.BACKWARD).any() else Phase.FORWARD
        order = decided if last == Phase.BACKWARD else at
        step_ends = order[(phase[order] == last) & (np.append(phase[order[1:]], Phase.OTHER) != last)] + 1
        outlives = end > next_event(decided, start, len(events))
        kind, is_freed = numbered(blocks.bytes[rows], stack), end < len(events)
        mine = between_phases(start, end, outlives, kind, forwards, step_ends)
        mine[~is_freed & ~np.isin(kind, kind[is_freed])] = Reason.NO_RULE
        line = numbered(np.searchsorted(decided, start), stack)
        several = np.bincount(line)[line] > 1
        mine[several & ~np.isin(line, line[~is_weight[rows]])] = Reason.NO_RULE
        backwards = decided[phase[decided] == Phase.BACKWARD]
        saved = np.flatnonzero((blocks.device == device) & (born_phase == Phase.FORWARD) & (blocks.born >= 0))
        backward = next_event(backwards, blocks.born[saved], len(events))
        over = next_event(decided[phase[decided] != Phase.BACKWARD], backward, len(events))
        waiting = blocks.born[saved[(blocks.freed[saved] > backward) & (blocks.freed[saved] < over)]]
        since = np.append(backwards, -1)[np.searchsorted(backwards, start) - 1]
        in_forward = np.searchsorted(waiting, start) > np.searchsorted(waiting, since)
        mine[in_forward & (mine == Reason.ALIVE_IN_FORWARD)] = Reason.NO_RULE
        reason[rows] = mine
    rows = np.flatnonzero(reason != Reason.NO_RULE)
    return rows, reason[rows]
