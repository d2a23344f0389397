"""Advice: gradients that no optimizer uses: of frozen layers, of a generator not detached, of activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.block_origins import Judged, freed_by_python
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64, module_text

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the gradients for a finding."""

NO_MORE = np.iinfo(np.int64).max
"""An event after all others."""

BEHIND = 2
"""Without a graph, an activation counts as freed when so many further ones have been allocated."""


@dataclass(frozen=True, slots=True)
class Backwards:
    """Backward passes: the births of the first and of the last block of each; int64, shape (n,)."""

    first: Int64
    last: Int64

    @classmethod
    def of(cls, trace: MemoryTrace, device: int) -> Backwards:
        """Return those of a device (its row): blocks of backward with no block of forward between them."""
        blocks = trace.allocations
        own = (blocks.device == device) & (blocks.born >= 0)
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
        is_outside: Bool = blocks.freed >= others[np.searchsorted(others, ended)]
        is_outside |= (blocks.freed > ended) & freed_by_python(trace, blocks)
        return is_outside & (ended >= blocks.born)

    def between(self, event: Int64) -> Int64:
        """Return the pass after whose end and before whose successor's begin each event is, -1 if none."""
        ended = np.searchsorted(self.last, event) - 1
        is_between = (ended >= 0) & (np.append(self.first[1:], -1)[ended] > event)
        return np.where(is_between, ended, -1)


def unused_gradients(judged: Judged) -> Result:
    """Find gradients of parameters that no optimizer changes, or of other tensors: what costs more."""
    results = _of_parameters(judged), _of_other_tensors(judged)
    findings = [result for result in results if isinstance(result, Finding)]
    return max(findings, key=lambda finding: finding.bytes, default=results[0])


def _of_other_tensors(judged: Judged) -> Result:
    """Find what a backward allocates that is no parameter's gradient, and that outlives it.

    Without the gradients' names, those of a parameter's size are a parameter's, if half of the parameters
    have such. The finding's bytes are by
    how much the highest step's peak falls if each is freed when `BEHIND` further blocks of its backward have
    been allocated.
    """
    trace, blocks = judged.trace, judged.blocks
    category = trace.allocations.category[blocks.rows]
    parameter = blocks.bytes[category == Category.PARAMETER]
    in_backward = (trace.allocations.phase[blocks.rows] == Phase.BACKWARD) & (blocks.born >= 0)
    of_parameters = (trace.allocations.label[blocks.rows] >= 0) & (category == Category.GRADIENT)
    if not of_parameters.any():
        of_parameters = np.isin(blocks.bytes, np.outer((0.5, 1, 2), parameter))
        if 2 * np.isin(parameter, blocks.bytes[in_backward]).sum() < max(len(parameter), 1):
            return NotJudged("The recording does not tell gradients of parameters from others.")
    other = in_backward & ~of_parameters
    other &= np.isin(category, (Category.GRADIENT, Category.AUTOGRAD_DETAIL, Category.UNKNOWN))
    other &= Backwards.of(trace, judged.device).outlived(judged)
    chosen = np.flatnonzero(other).astype(np.int64)
    born = np.append(blocks.born[in_backward], np.full(BEHIND, NO_MORE))
    needed = born[np.searchsorted(born, blocks.born[chosen]) + BEHIND]
    return judged.avoidable(
        "unused_gradients",
        "problem",
        chosen,
        "Gradients of tensors that are no parameters outlive their backward: of {name}.",
        "No gradients of activations are kept",
        "Call backward() without create_graph=True, unless its gradients are differentiated, and call "
        "retain_grad() or requires_grad_() only on tensors whose gradients are read.",
        gone=np.minimum(needed, blocks.freed[chosen]),
    )


def _of_parameters(judged: Judged) -> Result:
    """Find gradients that no gap between two backwards frees, while gaps free others that are no older.

    The finding's bytes are by how much the highest step's peak falls without these gradients. Where no
    module with other gradients ran before theirs, their backward and what it needs count, too.
    """
    trace, step = judged.trace, judged.step
    blocks = trace.allocations
    backwards = Backwards.of(trace, judged.device)
    gradient = np.flatnonzero((blocks.category == Category.GRADIENT) & (blocks.device == judged.device))
    gap = backwards.between(blocks.freed[gradient])
    if (blocks.freed[gradient] < len(trace.events)).all() and not (gap >= 0).any():
        return Fine("Every gradient is freed.")
    if len(backwards.first) < 2 or not (gap >= 0).any():
        return NotJudged("This rule needs gradients that are freed between two backwards.")
    resets = np.unique(gap[gap >= 0])
    key = blocks.module[gradient].astype(np.int64) * (int(blocks.bytes.max()) + 1) + blocks.bytes[gradient]
    is_used = np.isin(key, key[gap >= 0])
    made_in = np.searchsorted(backwards.first, blocks.born[gradient], side="right") - 1
    outlives = (blocks.born[gradient] <= backwards.last[resets[-1]]) & (
        blocks.freed[gradient] > backwards.last[-1]
    )
    outlives &= made_in <= made_in[gap >= 0].max()  # frees of older ones may be another model's turn
    unused = gradient[~is_used & outlives]
    size = int(blocks.bytes[unused].sum())
    if not len(unused):
        return Fine("Every module's gradients are freed between two backwards.")
    modules = np.unique(blocks.module[unused])
    used = np.unique(blocks.module[gradient[is_used]]).astype(np.int64)
    rows, gone = _needless(trace, judged.device, backwards, unused, used)
    saved = step.saved(blocks.bytes[rows], gone + 1, blocks.freed[rows])
    if saved < LEAST_SHARE * step.peak_bytes:
        return Fine(f"Gradients that are never freed raise the peak by only {size_text(saved)}.")
    folded = folds([module.key for module in trace.modules])
    names = list(dict.fromkeys(module_text(folded[trace.modules[row].key]) for row in modules.tolist()))
    return judged.finding(
        "unused_gradients",
        "problem",
        f"Backward computes gradients that no optimizer step uses and frees: of {names[0]}"
        + (f" and {counted(len(names) - 1, 'other module')}." if len(names) > 1 else "."),
        saved,
        (
            Evidence(
                "gradients that are never freed",
                size,
                f"{counted(len(unused), 'block')}, while others are",
                False,
            ),
            judged.without("them and their backward", saved),
        ),
        "Freeze what is not trained with requires_grad_(False), and detach() what a model returned if this "
        "loss does not train it.",
        view="allocations",
        state=[("search", "gradient"), ("listed", "lifetime")],
        subject=names[0],
    )


def _needless(
    trace: MemoryTrace, device: int, backwards: Backwards, gradient: Int64, used: Int64
) -> tuple[Int64, Int64]:
    """Return the blocks (rows) that unused gradients (rows) cost, and from which event on.

    Args:
        used: the modules (rows) that have other gradients.
    """
    blocks = trace.allocations
    own = (blocks.device == device) & (blocks.born >= 0)
    in_backward = own & (blocks.phase == Phase.BACKWARD)
    forward = own & (blocks.phase == Phase.FORWARD) & ~np.isin(blocks.category, NOT_DATA)
    unused = np.setdiff1d(blocks.module[gradient], used)
    of_used, of_unused = (
        np.isin(blocks.module, modules) & (blocks.module >= 0) for modules in (used, unused)
    )
    width = int(blocks.bytes.max()) + 1
    key = blocks.module.astype(np.int64) * width + blocks.bytes  # what is added to a gradient is as large
    needless = in_backward & np.isin(key, key[gradient])
    needless[gradient] = True
    gone = blocks.born.copy()
    before = np.append(-1, backwards.last[:-1])
    bounds = np.searchsorted(blocks.born, (before, backwards.first - 1, backwards.last), side="right")
    for first, start, turn, end in zip(backwards.first, *bounds.tolist(), strict=True):
        born, now = blocks.born[start:turn], forward[start:turn]
        begin = int(born[now & of_used[start:turn]].min(initial=first))
        rows = np.flatnonzero(now & (born < begin)) + start
        if not of_unused[rows].any():
            continue
        behind = np.flatnonzero(in_backward[turn:end]) + turn
        needless[behind[behind > behind[of_used[behind]].max(initial=-1)]] = True
        kept = rows[:-1]  # the last is the input of the modules that are trained
        needless[kept] = True
        gone[kept] = np.append(blocks.born[rows[BEHIND:]], np.full(BEHIND, begin))[: len(kept)]
    chosen = np.flatnonzero(needless)
    return chosen, gone[chosen]
