"""Advice: a forward that keeps its activations for a backward that never runs, or that ran already."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from tb_memplugin.analysis.autograd_graphs import (
    Backwards,
    is_mixed,
    is_outside,
    trains,
    waiting_forwards,
    without_backward,
)
from tb_memplugin.analysis.block_origins import (
    UNKNOWN_ORIGINS,
    Judged,
    StepBlocks,
    freed_by_python,
)
from tb_memplugin.analysis.findings import Fine, NotJudged, Result
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase
from tb_memplugin.trace.tables import Bool, Int64

FEWEST = 8
"""Fewest blocks that are freed together."""

BEHIND = 3
"""Without a graph, a block counts as freed when so many further ones of them have been allocated."""

SMALL = 0.01
"""Blocks of at most this share of the largest of a graph may be those of losses."""

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
    if len(graph) < FEWEST or not is_mixed(blocks, graph):
        return Fine("No activations of a forward were kept until all of them were freed at once.")
    ran = _ran(judged, graph)
    key = blocks.kinds if trains(trace, blocks) else blocks.sites  # prompts that grow have other sizes
    graph = np.flatnonzero(np.isin(key, key[graph]) & (blocks.born >= 0) & unused).astype(np.int64)
    needed_until = _needed_by_backward(judged, blocks.born[graph]) if ran else _behind(blocks, graph)
    is_read = _read_outside(trace, blocks, graph)
    needed_until[is_read] = blocks.freed[graph[is_read]]
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


def _behind(blocks: StepBlocks, graph: Int64) -> Int64:
    """Return the event from which each of some blocks (indices) is not needed: `BEHIND` others are there."""
    return np.append(blocks.born[graph[BEHIND:]], blocks.freed[graph[-BEHIND:]])


def _read_outside(trace: MemoryTrace, blocks: StepBlocks, graph: Int64) -> Bool:
    """Return the mask of a graph's blocks (indices) that a loss outside of modules reads, as of features.

    What that allocates in forward while they are alive stands for the last one of its size each.
    """
    forward = (trace.allocations.phase[blocks.rows] == Phase.FORWARD) & (blocks.born >= 0)
    forward[graph] = False
    is_read = np.zeros(len(graph), bool)
    forward &= np.isin(blocks.bytes, blocks.bytes[graph])
    for reader in np.flatnonzero(forward & blocks.of(is_outside)).tolist():
        born = blocks.born[reader]
        fits = (
            (blocks.bytes[graph] == blocks.bytes[reader])
            & (blocks.born[graph] < born)
            & (blocks.freed[graph] > born)
        )
        is_read[np.flatnonzero(fits & ~is_read)[-1:]] = True
    return is_read


def _needed_by_backward(judged: Judged, born: Int64) -> Int64:
    """Return the event until which the next backward needs blocks of a graph, by their births, ascending."""
    backwards, last = judged.result(Backwards.of), len(judged.trace.events)
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
