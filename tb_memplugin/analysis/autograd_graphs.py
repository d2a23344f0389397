"""What a backward needs: its passes, the blocks that no backward needs, and forwards that wait for one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.block_origins import Judged, Origin, StepBlocks, freed_by_python
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64

NO_MORE = np.iinfo(np.int64).max
"""An event after all others."""

FEWEST_SITES = 4
"""Fewest different sites among the blocks of a graph: outputs in a list have one."""

MOST_OF_TWO = 0.8
"""If two kinds, or a site, have more of the bytes than this, they are a cache or a list, not a graph."""

FEWEST_FORWARDS = 3
"""Fewest forwards that wait for a backward: a loss may compare two."""

LEAST_KEPT = 0.4
"""Least share of what forwards allocate that they keep with a graph: more than caches of several requests."""


@dataclass(frozen=True, slots=True)
class Backwards:
    """Backward passes: the births of the first and of the last block of each; int64, shape (n,)."""

    first: Int64
    last: Int64

    @classmethod
    def of(cls, judged: Judged) -> Backwards:
        """Return those of a device: blocks of backward with no block of forward between them."""
        blocks = judged.trace.allocations
        own = (blocks.device == judged.device) & (blocks.born >= 0)
        born = blocks.born[own & (blocks.phase == Phase.BACKWARD)]
        forward = blocks.born[own & (blocks.phase == Phase.FORWARD)]
        begins = np.flatnonzero(np.diff(np.searchsorted(forward, born), prepend=-1))
        return cls(born[begins], born[np.append(begins[1:], len(born))[: len(begins)] - 1])

    def outlived(self, judged: Judged) -> Bool:
        """Return the mask of `judged.blocks` that are freed outside of passes, after one since their birth.

        Autograd frees some blocks after the last birth of a pass: outside are those that Python code frees,
        or that are alive at the next event of another phase.
        """
        trace, blocks = judged.trace, judged.blocks
        others = blocks.born[trace.allocations.phase[blocks.rows] != Phase.BACKWARD]
        if len(trace.phases):
            others = np.union1d(others, np.flatnonzero(trace.events.phase != Phase.BACKWARD))
        others = np.append(others, NO_MORE)
        ended = np.append(self.last, -1)[np.searchsorted(self.first, blocks.freed) - 1]
        outside: Bool = blocks.freed >= others[np.searchsorted(others, ended)]
        outside |= (blocks.freed > ended) & freed_by_python(trace, blocks)
        return outside & (ended >= blocks.born)

    def between(self, event: Int64) -> Int64:
        """Return the pass after whose end and before whose successor's begin each event is, -1 if none."""
        ended = np.searchsorted(self.last, event) - 1
        is_between = (ended >= 0) & (np.append(self.first[1:], -1)[ended] > event)
        return np.where(is_between, ended, -1)


def trains(trace: MemoryTrace, blocks: StepBlocks) -> bool:
    """Return whether the recording has a backward or an optimizer step, or memory of one."""
    own = trace.allocations
    is_of_training = np.isin(own.phase, (Phase.BACKWARD, Phase.OPTIMIZER))
    is_of_training |= np.isin(own.category, (Category.GRADIENT, Category.OPTIMIZER_STATE))
    in_backward = blocks.of(lambda origin: origin.is_backward) & (blocks.born >= 0)
    return bool(is_of_training.any() or in_backward.any())


def without_backward(trace: MemoryTrace, blocks: StepBlocks) -> Bool:
    """Return the mask of the blocks that no backward needs.

    In a training these are the ones that were freed before any backward, and outside of module calls.
    """
    if not trains(trace, blocks):
        return np.ones(len(blocks.rows), bool)
    phase = trace.allocations.phase[blocks.rows]
    backward = np.isin(phase, (Phase.BACKWARD, Phase.OPTIMIZER)) & (blocks.born >= 0)
    backward |= blocks.of(lambda origin: origin.is_backward or not origin.is_known) & (blocks.born >= 0)
    count = np.searchsorted(np.sort(blocks.born[backward]), np.stack((blocks.born, blocks.freed)))
    unused: Bool = (count[0] == count[1]) & ~backward & freed_by_python(trace, blocks, in_calls=False)
    return unused


def waiting_forwards(judged: Judged) -> tuple[Int64, int]:
    """Return what forwards keep that no backward followed up to a failed request, or the end; their number.

    The blocks (indices) are alive then and at the peak, without the last one of each forward, its result. A
    forward begins where the first line of a module allocates again, after something outside of modules did:
    an input, a loss. If an earlier backward ran over several, these may wait for one: none, 0.
    """
    trace, blocks = judged.trace, judged.blocks
    end = judged.failed if judged.failed >= 0 else len(trace.events) - 1
    passes = judged.result(Backwards.of)
    since = int(passes.last[passes.last < end].max(initial=-1))
    module = trace.allocations.module[blocks.rows].astype(np.int64)
    is_module = np.array([*(row.is_module for row in trace.modules), False])[module]
    is_forward = (trace.allocations.phase[blocks.rows] == Phase.FORWARD) & (blocks.born >= 0)
    alive = blocks.at_peak & (blocks.born > since) & (blocks.freed > end)
    alive &= ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA)
    outside = blocks.born[blocks.of(is_outside) & (blocks.born >= 0)]
    gap = np.searchsorted(outside, blocks.born)
    site = blocks.sites * (len(trace.modules) + 1) + module
    of_module = np.flatnonzero(alive & is_forward & is_module)
    pairs = np.unique(site[of_module] * (len(outside) + 1) + gap[of_module], return_index=True)[1]
    calls = of_module[np.sort(pairs)]
    sites, first, count = np.unique(site[calls], return_index=True, return_counts=True)
    none = np.empty(0, np.int64), 0
    if count.max(initial=0) < FEWEST_FORWARDS:
        return none
    often = np.flatnonzero(count >= count.max() - 1)
    begin = sites[often[np.argmin(first[often])]]
    begins = blocks.born[calls[site[calls] == begin]]
    for before, ran in zip((-1, *passes.last.tolist()), passes.first.tolist(), strict=False):
        kept = (
            is_forward & (site == begin) & (blocks.born > before) & (blocks.born < ran) & (blocks.freed > ran)
        )
        if ran <= since and len(np.unique(gap[kept])) > 1:
            return none
    rows = np.flatnonzero(alive & (blocks.born >= begins[0])).astype(np.int64)
    forwards = rows[is_forward[rows]]
    number = np.searchsorted(begins, blocks.born[forwards], side="right")
    graph = np.setdiff1d(rows, forwards[np.append(np.diff(number) != 0, True)])
    allocated = blocks.bytes[is_forward & (blocks.born >= begins[0]) & (blocks.born <= end)].sum()
    is_graph = blocks.bytes[graph[is_forward[graph]]].sum() > LEAST_KEPT * allocated
    return (graph, len(begins)) if is_graph and is_mixed(blocks, graph) else none


def is_outside(origin: Origin) -> bool:
    """Return whether Python code outside of all module calls allocated."""
    return bool(origin.frames) and not origin.in_call


def is_mixed(blocks: StepBlocks, graph: Int64) -> bool:
    """Return whether the blocks are of several sites: no two kinds, and no site, have most of the bytes."""
    of_site = np.bincount(blocks.sites[graph], blocks.bytes[graph])
    of_kind = np.sort(
        np.bincount(np.unique(blocks.kinds[graph], return_inverse=True)[1], blocks.bytes[graph])
    )
    most = max(of_site.max(), of_kind[-2:].sum())
    return bool((of_site > 0).sum() >= FEWEST_SITES and most <= MOST_OF_TWO * of_site.sum())
