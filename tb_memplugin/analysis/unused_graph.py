"""Advice: a forward that keeps its activations for a backward that never runs."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import UNKNOWN_ORIGINS, Judged, StepBlocks
from tb_memplugin.analysis.findings import Evidence, Fine, NotJudged, Result
from tb_memplugin.analysis.lines import line_evidence
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase
from tb_memplugin.trace.frames import MODULE_CALL, read_frame
from tb_memplugin.trace.tables import Bool, Int64

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the graph for a finding."""

FEWEST, FEWEST_SITES = 8, 4
"""Fewest blocks that are freed together, and different sites among them: outputs in a list have one."""

MOST_OF_TWO = 0.8
"""If two sites have more of the bytes than this, they are a cache or a list of results, not a graph."""

BEHIND = 3
"""Without a graph, a block counts as freed when so many further ones of them have been allocated."""

DATA = (Category.ACTIVATION, Category.AUTOGRAD_DETAIL, Category.UNKNOWN)


def unused_graph(judged: Judged) -> Result:
    """Find activations of a forward that are freed all at once, before any backward.

    If the recording has a backward at all, only what is freed outside of module calls counts, by the stacks
    of the frees: a function of a model may end and free what it kept for itself. The finding's bytes are by
    how much the highest step's peak falls if each block is freed when `BEHIND` further ones have been
    allocated.
    """
    trace, blocks, step = judged.trace, judged.blocks, judged.step
    if not blocks.are_known:
        return UNKNOWN_ORIGINS
    unused = without_backward(trace, blocks)
    if not (unused & blocks.at_peak).any():
        return Fine("The recording has a backward or an optimizer step, or memory of one.")
    if trace.ooms:
        return NotJudged("A request failed: what ended the forward was perhaps the error.")
    graph = _freed_together(trace, blocks, unused)
    if len(graph) < FEWEST or not _is_graph(trace, blocks, graph):
        return Fine("No activations of a forward were kept until all of them were freed at once.")
    graph = np.flatnonzero(blocks.alike(graph) & unused).astype(np.int64)
    needed_until = np.append(blocks.born[graph[BEHIND:]], blocks.freed[graph[-BEHIND:]])
    saved = step.saved(blocks.bytes[graph], needed_until + 1, blocks.freed[graph])
    if saved < LEAST_SHARE * step.peak_bytes:
        return Fine(f"Without what is kept for a backward, the peak would be only {size_text(saved)} lower.")
    freed = Evidence(
        "activations freed all at once", int(blocks.bytes[graph].sum()), counted(len(graph), "block"), False
    )
    return judged.finding(
        "unused_graph",
        "problem",
        "A forward keeps its activations for a backward that never runs.",
        saved,
        (
            freed,
            *line_evidence(trace, blocks.rows[graph], "of them"),
            judged.without("a graph", saved, "by replay"),
        ),
        "Run it in torch.inference_mode() or torch.no_grad(): there, nothing is kept.",
        view="allocations",
        state=judged.at_peak,
    )


def without_backward(trace: MemoryTrace, blocks: StepBlocks) -> Bool:
    """Return the mask of the blocks that no backward needs.

    In a training these are the ones that were freed before any backward, and outside of module calls.
    """
    rows, phase = blocks.rows, trace.allocations.phase
    trains = (phase == Phase.BACKWARD) | (phase == Phase.OPTIMIZER)
    trains |= np.isin(trace.allocations.category, (Category.GRADIENT, Category.OPTIMIZER_STATE))
    if not trains.any() and not blocks.of(lambda origin: origin.is_backward).any():
        return np.ones(len(rows), bool)
    backward = np.isin(phase[rows], (Phase.BACKWARD, Phase.OPTIMIZER)) & (blocks.born >= 0)
    backward |= blocks.of(lambda origin: origin.is_backward or not origin.is_known) & (blocks.born >= 0)
    count = np.searchsorted(np.sort(blocks.born[backward]), np.stack((blocks.born, blocks.freed)))
    unused: Bool = (count[0] == count[1]) & (blocks.freed < len(trace.events)) & ~backward
    stack = trace.events.stack[np.where(unused, blocks.freed, 0)]
    is_outside = {row: _is_outside_calls(trace.stack(row)) for row in np.unique(stack[unused]).tolist()}
    unused[unused] = [is_outside[row] for row in stack[unused].tolist()]
    return unused


def _is_outside_calls(stack: tuple[str, ...]) -> bool:
    """Return whether a stack has Python frames and none of `nn.Module`'s calls."""
    has_python = any(read_frame(text).is_python for text in stack)
    return has_python and not any(text.startswith(MODULE_CALL) for text in stack)


def _freed_together(trace: MemoryTrace, blocks: StepBlocks, unused: Bool) -> Int64:
    """Return the blocks (indices) alive at the peak that were freed with no allocation in between."""
    data = np.isin(trace.allocations.category[blocks.rows], DATA)
    chosen = np.flatnonzero(
        unused & blocks.at_peak & data & (blocks.born >= 0) & (blocks.freed < len(trace.events))
    )
    allocs = np.cumsum(
        (trace.events.kind == Kind.ALLOC) & (trace.events.device == trace.allocations.device[blocks.rows[0]])
    )
    runs, run = np.unique(allocs[blocks.freed[chosen]], return_inverse=True)
    if not len(runs):
        return chosen.astype(np.int64)
    size = np.bincount(run, blocks.bytes[chosen])
    together: Int64 = chosen[run == int(np.argmax(size))].astype(np.int64)
    return together


def _is_graph(trace: MemoryTrace, blocks: StepBlocks, graph: Int64) -> bool:
    in_forward = trace.allocations.phase[blocks.rows[graph]] == Phase.FORWARD
    computed = in_forward | blocks.of(lambda origin: bool(origin.names))[graph]
    size = np.sort(np.bincount(blocks.sites[graph], blocks.bytes[graph]))[::-1]
    is_mixed = int((size > 0).sum()) >= FEWEST_SITES and size[:2].sum() <= MOST_OF_TWO * size.sum()
    return bool(computed.all()) and is_mixed
