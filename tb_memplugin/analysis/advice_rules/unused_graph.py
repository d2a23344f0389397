"""Advice: a forward that keeps its activations for a backward that never runs, or that ran already."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from tb_memplugin.analysis.advice_rules.unused_gradients import Backwards
from tb_memplugin.analysis.block_origins import (
    UNKNOWN_ORIGINS,
    Judged,
    Origin,
    StepBlocks,
    freed_by_python,
)
from tb_memplugin.analysis.findings import Fine, NotJudged, Result
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64

FEWEST, FEWEST_SITES = 8, 4
"""Fewest blocks that are freed together, and different sites among them: outputs in a list have one."""

MOST_OF_TWO = 0.8
"""If two kinds, or a site, have more of the bytes than this, they are a cache or a list, not a graph."""

BEHIND = 3
"""Without a graph, a block counts as freed when so many further ones of them have been allocated."""

SMALL = 0.01
"""Blocks of at most this share of the largest of a graph may be those of losses."""

FEWEST_FORWARDS = 3
"""Fewest forwards that wait for a backward: a loss may compare two."""

LEAST_KEPT = 0.4
"""Least share of what forwards allocate that they keep with a graph: more than caches of several requests."""

DATA = (Category.ACTIVATION, Category.AUTOGRAD_DETAIL, Category.UNKNOWN)


_NODE = re.compile(r"Backward\d*$")


def unused_graph(judged: Judged) -> Result:
    """Find activations of a forward that are freed all at once, and not by a backward.

    If the recording has a backward at all, only what is freed outside of module calls counts, by the stacks
    of the frees: a function of a model may end and free what it kept for itself. The finding's bytes are by
    how much the highest step's peak falls if each block is freed when `BEHIND` further ones have been
    allocated; if their backward ran (see `_ran`), evenly while it runs, the last one first.
    """
    trace, blocks = judged.trace, judged.blocks
    if not blocks.are_known:
        return UNKNOWN_ORIGINS
    waiting, forwards = judged.result(waiting_forwards)
    if forwards:
        return judged.avoidable(
            "unused_graph",
            "problem",
            waiting,
            f"{forwards} forwards keep their activations, and no backward has run since: of {{name}}.",
            "No forwards keep their activations for a later backward",
            "If they are not trained, run them in torch.no_grad() and keep loss.item() or output.detach(). "
            "If they are, call backward() for each.",
            gone=_behind(blocks, waiting),
            without="their graphs",
        )
    unused = without_backward(trace, blocks) | freed_by_python(trace, blocks, in_calls=False)
    if not (unused & blocks.at_peak).any():
        return Fine("The recording has a backward or an optimizer step, or memory of one.")
    if trace.ooms:
        return NotJudged("A request failed: what ended the forward was perhaps the error.")
    graph = _freed_together(trace, blocks, unused)
    if len(graph) < FEWEST or not _is_mixed(blocks, graph):
        return Fine("No activations of a forward were kept until all of them were freed at once.")
    ran = _ran(judged, graph)
    key = blocks.kinds if trains(trace, blocks) else blocks.sites  # prompts that grow have other sizes
    graph = np.flatnonzero(np.isin(key, key[graph]) & (blocks.born >= 0) & unused).astype(np.int64)
    needed_until = _needed_by_backward(judged, blocks.born[graph]) if ran else _behind(blocks, graph)
    when = "after their backward" if ran else "for a backward that never runs"
    return judged.avoidable(
        "unused_graph",
        "problem",
        graph,
        f"A forward keeps its activations {when}: of {{name}}.",
        "No forward keeps its activations longer than needed",
        "Call the last backward() of a loss without retain_graph=True, and detach() what it does not train."
        if ran
        else "Run it in torch.inference_mode() or torch.no_grad(): there, nothing is kept.",
        gone=needed_until,
        without="a graph",
    )


def waiting_forwards(judged: Judged) -> tuple[Int64, int]:
    """Return what forwards keep that no backward followed up to a failed request, or the end; their number.

    The blocks (indices) are alive then and at the peak, without the last one of each forward, its result. A
    forward begins where the first line of a module allocates again, after something outside of modules did:
    an input, a loss. If an earlier backward ran over several, these may wait for one: none, 0.
    """
    trace, blocks = judged.trace, judged.blocks
    end = judged.failed if judged.failed >= 0 else len(trace.events) - 1
    passes = Backwards.of(trace, judged.device)
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
    return (graph, len(begins)) if is_graph and _is_mixed(blocks, graph) else none


def _behind(blocks: StepBlocks, graph: Int64) -> Int64:
    """Return the event from which each of some blocks (indices) is not needed: `BEHIND` others are there."""
    return np.append(blocks.born[graph[BEHIND:]], blocks.freed[graph[-BEHIND:]])


def is_outside(origin: Origin) -> bool:
    """Return whether Python code outside of all module calls allocated."""
    return bool(origin.frames) and not origin.in_call


def _needed_by_backward(judged: Judged, born: Int64) -> Int64:
    """Return the event until which the next backward needs blocks of a graph, by their births, ascending."""
    backwards, last = Backwards.of(judged.trace, judged.device), len(judged.trace.events)
    own = np.searchsorted(backwards.first, born)
    until = np.full(len(born), last)
    for number in np.unique(own[own < len(backwards.first)]).tolist():
        first, last = int(backwards.first[number]), int(backwards.last[number])
        until[own == number] = np.linspace(last, first, int((own == number).sum()))
    return until


def _ran(judged: Judged, graph: Int64) -> bool:
    """Return whether a backward ran and allocated more than for the graphs that it freed, if that is known.

    Of each operator in the graph, but for losses, the blocks of its node count: of AddmmBackward0 for addmm.
    """
    blocks = judged.blocks
    during = (blocks.born >= blocks.born[graph[0]]) & (blocks.born < blocks.freed[graph].max())
    during[graph] = False
    backward = during & (judged.trace.allocations.phase[blocks.rows] == Phase.BACKWARD)
    during &= blocks.born <= blocks.born[backward].max(initial=-1)  # a later forward waits for its own
    others = Counter(name for row in blocks.origin[during].tolist() for name in blocks.origins[row].names)
    nodes = {_NODE.sub("", name).lower(): count for name, count in others.items() if _NODE.search(name)}
    large = np.unique(blocks.origin[graph[blocks.bytes[graph] > SMALL * blocks.bytes[graph].max()]]).tolist()
    own = {name for row in large for name in blocks.origins[row].names}
    counts = [(nodes.get(name.replace("_", ""), 0), others[name]) for name in own]
    return bool(backward.any()) and all(of_node > of_operator for of_node, of_operator in counts if of_node)


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


def _freed_together(trace: MemoryTrace, blocks: StepBlocks, unused: Bool) -> Int64:
    """Return the blocks (indices) of forwards at the peak that were freed with no allocation in between."""
    data = np.isin(trace.allocations.category[blocks.rows], DATA) & blocks.at_peak & (blocks.born >= 0)
    data &= (trace.allocations.phase[blocks.rows] == Phase.FORWARD) | blocks.of(
        lambda origin: bool(origin.names)
    )
    chosen = np.flatnonzero(unused & data & (blocks.freed < len(trace.events)))
    allocs = np.cumsum(
        (trace.events.kind == Kind.ALLOC) & (trace.events.device == trace.allocations.device[blocks.rows[0]])
    )
    runs, run = np.unique(allocs[blocks.freed[chosen]], return_inverse=True)
    if not len(runs):
        return chosen.astype(np.int64)
    size = np.bincount(run, blocks.bytes[chosen])
    together: Int64 = chosen[run == int(np.argmax(size))].astype(np.int64)
    return together


def _is_mixed(blocks: StepBlocks, graph: Int64) -> bool:
    """Return whether the blocks are of several sites: no two kinds, and no site, have most of the bytes."""
    of_site = np.bincount(blocks.sites[graph], blocks.bytes[graph])
    of_kind = np.sort(
        np.bincount(np.unique(blocks.kinds[graph], return_inverse=True)[1], blocks.bytes[graph])
    )
    most = max(of_site.max(), of_kind[-2:].sum())
    return bool((of_site > 0).sum() >= FEWEST_SITES and most <= MOST_OF_TWO * of_site.sum())
