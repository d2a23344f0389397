"""Advice: several forwards, each with a loss of its own, before one backward."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from tb_memplugin.analysis.autograd_graphs import Backwards, waiting_forwards
from tb_memplugin.analysis.block_origins import Judged, Origin, StepBlocks
from tb_memplugin.analysis.findings import Fine, NotJudged, Result
from tb_memplugin.analysis.lines import line_evidence
from tb_memplugin.analysis.subcategories import is_loss
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the earlier forwards for a finding."""

SCALAR = 8
"""The bytes of a loss, at most."""

FEWEST, ALIKE = 2, 0.5
"""Fewest blocks that a forward keeps; how alike the last one it must be, in lines and in what is freed."""


SMALL = 0.01
"""Blocks of at most this share of the largest that a forward keeps do not count."""

MOST_JOINED = 2
"""Most scalars, beside one for each forward, that a sum of losses takes: with more, it is no sum."""

MOST_UNNAMED = 1
"""Most scalars that join two forwards, if it is not known what computes them: a sum takes one."""

_NO_SUM = re.compile(r"log|exp|sigmoid|soft|relu|clamp|pow|square|sqrt|abs|tanh|max|min|norm|loss")
"""Operators of losses that need the results of all forwards, as of preferences."""


def summed_losses(judged: Judged) -> Result:
    """Find forwards before one backward that end in a scalar each: outside of modules, or by a cross-entropy.

    The finding's bytes are by how much the highest step's peak falls if what each forward but the last keeps
    is freed when the next one begins, and the gradients of all parameters are there from then on.
    """
    trace, blocks, step = judged.trace, judged.blocks, judged.step
    if not any(_is_inside(trace, origin) for origin in blocks.origins):
        return NotJudged("The recording contains neither modules nor their calls.")
    summed = [each for each in _forwards(judged) if not _are_chained(judged, *each)]
    if not summed or judged.result(waiting_forwards)[1]:
        return Fine("No backward runs over several forwards, each with a loss of its own.")
    earlier, gone, size, back = list[Int64](), list[Int64](), list[Int64](), list[Int64]()
    for begin, end, calls in summed:
        begins = blocks.born[[call[0] for call in calls]]
        earlier += calls[:-1]
        gone += [np.repeat(begins[1:], [len(call) for call in calls[:-1]]), begins[1:2]]
        size += [*(blocks.bytes[call] for call in calls[:-1]), -_gradients(judged, begin, end)]
        back += [*(blocks.freed[call] for call in calls[:-1]), np.array([begin])]
    saved = step.saved(np.concatenate(size), np.concatenate(gone) + 1, np.concatenate(back))
    if saved < LEAST_SHARE * step.peak_bytes:
        return Fine(f"Forwards before the last one of a backward raise the peak by only {size_text(saved)}.")
    rows = np.concatenate(earlier)
    return judged.finding(
        "summed_losses",
        "problem",
        f"{max(len(calls) for *_, calls in summed)} forwards, each with a loss of its own, keep their "
        "activations for one backward.",
        saved,
        (
            *line_evidence(trace, blocks.rows[rows[blocks.at_peak[rows]]], "of the earlier forwards"),
            judged.without("all but one", saved),
        ),
        "Call backward() on each loss as soon as it is computed, divided by their number for a mean: the "
        "gradients add up to the same. Detach what one forward hands to the next. "
        "Run forwards that are not trained in torch.no_grad().",
        view="stacks",
        state=judged.at_peak,
    )


def _is_inside(trace: MemoryTrace, origin: Origin) -> bool:
    """Return whether a module's call allocated: by its stack or, without one, by its module."""
    of_module = origin.module >= 0 and trace.modules[origin.module].is_module
    return origin.in_call or (not origin.frames and of_module)


def _losses(trace: MemoryTrace, blocks: StepBlocks) -> Bool:
    """Return the mask of the scalars outside of modules, and of the last loss of each call of the model.

    Something outside of modules is born between two such calls: an input, a sum.
    """
    forward = ~blocks.of(lambda origin: origin.is_backward) & (blocks.born >= 0)
    inside = blocks.of(lambda origin: _is_inside(trace, origin))
    calls = np.cumsum(forward & ~inside)
    losses: Bool = forward & (~inside | blocks.of(is_loss)) & (blocks.bytes <= SCALAR)
    in_call = np.flatnonzero(losses & inside)
    losses[in_call[:-1][np.diff(calls[in_call]) == 0]] = False
    return losses


def _gradients(judged: Judged, begin: int, end: int) -> Int64:
    """Return the bytes of the gradients that a backward allocates and that outlive it; int64, shape (1,)."""
    blocks = judged.blocks
    category = judged.trace.allocations.category[blocks.rows]
    new = (blocks.born >= begin) & (blocks.born <= end) & (blocks.freed > end)
    return np.array([blocks.bytes[new & (category == Category.GRADIENT)].sum()], np.int64)


def _forwards(judged: Judged) -> Iterator[tuple[int, int, list[Int64]]]:
    """Yield the first and the last birth of each backward, and what each forward keeps for it (indices).

    The forwards are the last ones that are alike, the earliest first. A failed request stands for a backward.
    """
    trace, blocks = judged.trace, judged.blocks
    scalar = _losses(trace, blocks)
    ends = blocks.born[scalar]
    category, phase = (
        column[blocks.rows] for column in (trace.allocations.category, trace.allocations.phase)
    )
    forward = (phase == Phase.FORWARD) & ~np.isin(category, NOT_DATA) & (blocks.born >= 0)
    passes = judged.result(Backwards.of)
    failed = [judged.failed] if judged.failed > passes.last.max(initial=-1) else []
    begins, last = [*passes.first.tolist(), *failed], [*passes.last.tolist(), *failed]
    for before, begin, end, following in zip(
        (-1, *last), begins, last, (*begins[1:], len(trace.events)), strict=False
    ):
        kept = forward & (blocks.born > before) & (blocks.born < begin) & (blocks.freed > begin)
        rows = np.flatnonzero(kept).astype(np.int64)
        calls = np.split(rows, np.flatnonzero(np.diff(np.searchsorted(ends, blocks.born[rows]))) + 1)
        calls = [call for call in calls if len(call) >= FEWEST]
        freed = [_freed(blocks, call, following) for call in calls]
        alike: list[Int64] = []
        for call, share in zip(reversed(calls), reversed(freed), strict=True):
            if share < ALIKE * max(freed):  # the backward does not run over this forward
                continue
            same = np.isin(blocks.sites[call], blocks.sites[(alike or [call])[0]])
            if blocks.bytes[call[same]].sum() < ALIKE * blocks.bytes[call].sum():
                break
            alike.insert(0, call)
        if _are_summed(blocks, scalar & (blocks.born < begin), alike):
            yield begin, end, alike


def _are_summed(blocks: StepBlocks, scalar: Bool, calls: list[Int64]) -> bool:
    """Return whether hardly any scalars are computed after several forwards but as after each of them.

    Losses of pairs, as of preferences, are computed of what two forwards returned.
    """
    if len(calls) < 2:
        return False
    last = blocks.born[calls[-1][blocks.bytes[calls[-1]] > SCALAR]].max(initial=-1)
    after, since = scalar & (blocks.born > last), blocks.born > blocks.born[calls[0][0]]
    joined = after & ~np.isin(blocks.kinds, blocks.kinds[scalar & since & ~after])
    if (joined & blocks.of(_is_no_sum)).any():
        return False
    if len(calls) == 2 and (joined & blocks.of(lambda origin: not origin.names)).sum() > MOST_UNNAMED:
        return False
    return bool(joined.sum() <= len(calls) + MOST_JOINED)


def _is_no_sum(origin: Origin) -> bool:
    return any(_NO_SUM.search(name) for name in origin.names)


def _are_chained(judged: Judged, begin: int, end: int, calls: list[Int64]) -> bool:
    """Return whether a forward was given what the one before returned, or all the same: they have one graph.

    The last one's backward frees what another kept. Or gradients of what they were given are allocated after
    all that the last one kept is freed: so another's backward allocates more blocks than that of the last,
    and more than follow the backward of all.
    """
    blocks = judged.blocks
    category, phase = (
        column[blocks.rows] for column in (judged.trace.allocations.category, judged.trace.allocations.phase)
    )
    least = SMALL * blocks.bytes[np.concatenate(calls)].max()
    of_parameters = blocks.bytes[np.isin(category, (Category.PARAMETER, Category.GRADIENT))]
    counts = (phase == Phase.BACKWARD) & (blocks.bytes > least) & ~np.isin(blocks.bytes, of_parameters)
    freed = [blocks.freed[call] for call in reversed(calls)]
    ends = np.array([begin - 1, *(each[each <= end].max(initial=begin) for each in freed), end])
    others = np.concatenate(calls[:-1])
    frees = blocks.freed[others[blocks.bytes[others] > least]]
    if ((frees > begin) & (frees < ends[1])).any() and begin != judged.failed:
        return True
    last, *earlier, after = np.diff(
        np.searchsorted(blocks.born[counts], np.maximum.accumulate(ends), side="right")
    ).tolist()
    return bool(max(earlier) - last > after)


def _freed(blocks: StepBlocks, call: Int64, following: int) -> float:
    """Return the share of what a forward kept that is freed before the following backward, from 0 to 1."""
    return float(blocks.bytes[call[blocks.freed[call] < following]].sum() / blocks.bytes[call].sum())
