"""Advice: gradients that no optimizer uses: of frozen layers, of a generator not detached, of activations."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import or_

import numpy as np

from tb_memplugin.analysis.autograd_graphs import NO_MORE, Backwards
from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import Category, Phase
from tb_memplugin.trace.frames import MODULE_CALL, read_frame
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Int64, module_text

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the gradients for a finding."""

SOON = 16
"""What a node needs is freed within so many events of its own blocks."""

BEHIND = 2
"""Without a graph, an activation counts as freed when so many further ones have been allocated."""


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
    other &= judged.result(Backwards.of).outlived(judged)
    chosen = np.flatnonzero(other).astype(np.int64)
    born = np.append(blocks.born[in_backward], np.full(BEHIND, NO_MORE))
    needed = born[np.searchsorted(born, blocks.born[chosen]) + BEHIND]
    return judged.avoidable(
        "unused_gradients",
        "problem",
        chosen,
        "Gradients of tensors that are no parameters outlive their backward: of {name}.",
        "No gradients of activations are kept",
        "Call backward() without create_graph=True, unless its gradients are differentiated, call "
        "retain_grad() or requires_grad_() only on tensors whose gradients are read, and delete what "
        "torch.autograd.grad() returned once it is used.",
        gone=np.minimum(needed, blocks.freed[chosen]),
    )


def _of_parameters(judged: Judged) -> Result:
    """Find gradients that no optimizer uses: never freed while others are, or freed without a step of theirs.

    The finding's bytes are by how much the highest step's peak falls without these gradients, what backward
    allocates after the last gradient that is used, and what forward keeps for that.
    """
    trace, step = judged.trace, judged.step
    blocks = trace.allocations
    backwards = judged.result(Backwards.of)
    gradient = np.flatnonzero((blocks.category == Category.GRADIENT) & (blocks.device == judged.device))
    gap = backwards.between(blocks.freed[gradient])
    if (blocks.freed[gradient] < len(trace.events)).all() and not (gap >= 0).any():
        return Fine("Every gradient is freed.")
    if len(backwards.first) < 2 or not (gap >= 0).any():
        return NotJudged("This rule needs gradients that are freed between two backwards.")
    resets = np.unique(gap[gap >= 0])
    key = judged.result(_keys)[gradient]
    of_key = np.unique(key, return_inverse=True)[1]
    reset = np.full(len(gradient), NO_MORE)
    np.minimum.at(reset, of_key[gap >= 0], blocks.freed[gradient[gap >= 0]])
    is_used = reset[of_key] < blocks.born[gradient]  # one of its parameter, or of another like it
    made_in = np.searchsorted(backwards.first, blocks.born[gradient], side="right") - 1
    outlives = (blocks.born[gradient] <= backwards.last[resets[-1]]) & (
        blocks.freed[gradient] > backwards.last[-1]
    )
    outlives &= made_in <= made_in[gap >= 0].max()  # frees of older ones may be another model's turn
    is_kept = ~is_used & outlives
    used_until = np.where(is_kept, -1, _used_until(judged, backwards, gradient, made_in))
    alive_until = np.searchsorted(backwards.last, blocks.freed[gradient]) - 1
    unused = gradient[is_kept | ((gap >= 0) & (used_until < gap))]
    size = int(blocks.bytes[unused].sum())
    if not len(unused):
        return Fine("Every module's gradients are freed between two backwards, after an optimizer step.")
    earlier = gradient[is_kept & (made_in < 0)]
    rows, gone = [earlier], [blocks.born[earlier]]
    kept = gradient[is_kept][np.unique(key[is_kept], return_index=True)[1]]  # only what they are like counts
    lasting = np.flatnonzero(made_in <= alive_until)
    since, alive_until, used_until = made_in[lasting], alive_until[lasting], used_until[lasting]
    for number in range(len(backwards.first)):
        is_alive = (since <= number) & (number <= alive_until)
        is_needed = is_alive & (number <= used_until)
        used, needed_by_none = (gradient[lasting[mask]] for mask in (is_needed, is_alive & ~is_needed))
        needless = _needless(judged, backwards, number, used, needed_by_none, kept)
        rows.append(needless[0])
        gone.append(needless[1])
    needless_rows = np.concatenate(rows)
    saved = step.saved(blocks.bytes[needless_rows], np.concatenate(gone) + 1, blocks.freed[needless_rows])
    if saved < LEAST_SHARE * step.peak_bytes:
        return Fine(f"Gradients that no optimizer uses raise the peak by only {size_text(saved)}.")
    modules = np.unique(blocks.module[unused])
    folded = folds([module.key for module in trace.modules])
    names = list(dict.fromkeys(module_text(folded[trace.modules[row].key]) for row in modules.tolist()))
    how = "while others are" if is_kept.any() else "without a step of their optimizer"
    return judged.finding(
        "unused_gradients",
        "problem",
        f"Backward computes gradients that no optimizer step uses: of {names[0]}"
        + (f" and {counted(len(names) - 1, 'other module')}." if len(names) > 1 else "."),
        saved,
        (
            Evidence(
                f"gradients that are {'never freed' if is_kept.any() else 'freed unused'}",
                size,
                f"{counted(len(unused), 'block')}, {how}",
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


def _keys(judged: Judged) -> Int64:
    """Return a number for each allocation of the trace, the same for those of one module and size."""
    blocks = judged.trace.allocations
    key: Int64 = blocks.module.astype(np.int64) * (int(blocks.bytes.max()) + 1) + blocks.bytes
    return key


def _calls(judged: Judged) -> Int64:
    """Return a number for each allocation of the trace, the same for those of one line that calls a model.

    0 stands for no such line, and for other devices.
    """
    window = judged.window
    numbers: dict[tuple[str, ...], int] = {(): 0}
    of_origin = [
        numbers.setdefault(_root_call(judged.trace.stack(origin.stack)), len(numbers))
        for origin in window.origins
    ]
    calls = np.zeros(len(judged.trace.allocations.born), np.int64)
    calls[window.rows] = np.array(of_origin, np.int64)[window.origin]
    return calls


def _kinds(judged: Judged) -> Int64:
    """Return a number for each allocation of the trace, the same for those of one size, site and call.

    Two models of one class have the same sites; the lines that call them differ. Other devices have -1.
    """
    window, calls = judged.window, judged.result(_calls)
    kinds = np.full(len(calls), -1)
    kinds[window.rows] = window.kinds * (int(calls.max(initial=0)) + 1) + calls[window.rows]
    return kinds


def _apart(judged: Judged, rows: Int64, behind: Int64, kept: Int64, begin: int) -> tuple[Int64, Int64]:
    """Return blocks (rows) of models whose backward ends before that of a trained one begins, since when.

    Such a model, as the reference of a preference loss, has gradients of `kept`'s sizes, and hands none on:
    once its last block is freed, nothing that its backward allocated is alive, or was added to an older block
    that is needed next.

    Args:
        rows, behind, kept: what forward keeps and backward frees, what backward allocates, unused gradients.
        begin: the birth of the first gradient that is used.
    """
    blocks, calls = judged.trace.allocations, judged.result(_calls)[rows]
    born, freed, size = blocks.born[behind], blocks.freed[behind], blocks.bytes[behind]
    passes_by = freed <= blocks.freed[rows].max(initial=-1) + SOON  # no workspace, no gradient of a parameter
    is_late = blocks.freed[rows] >= begin
    chosen, gone = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for call in np.setdiff1d(calls, [0, *calls[is_late]]).tolist():
        own, others = rows[calls == call], blocks.freed[rows[(calls != call) & (calls > 0)]]
        since, until = int(blocks.freed[own].min()), int(blocks.freed[own].max())
        end = int(others[others > until].min(initial=begin))
        in_own = (born >= since) & (born < end)
        is_gradient = np.isin(size, blocks.bytes[kept])  # it may wait for those of other calls of the model
        flows = in_own & ~is_gradient & (freed > until) & passes_by
        ends = np.sort(np.append(freed[flows & (freed < end)], until))
        quiet = ends[[not (flows & (born <= event) & (freed > event)).any() for event in ends.tolist()]]
        if not len(quiet) or not (in_own & is_gradient).any():
            continue
        older = (born < since) & (freed > quiet[0]) & (freed <= end + SOON)
        if np.isin(size[flows & (born < quiet[0])], size[older]).any():
            continue
        used_up = (in_own & (born < quiet[0])) | ((born < since) & (freed > since) & (freed <= quiet[0]))
        used_up &= passes_by
        behind_it = np.append(blocks.born[own[BEHIND:]], blocks.born[own[-1:]])
        chosen += [own[:-1], behind[used_up]]
        gone += [behind_it[: len(own) - 1], born[used_up]]
    return np.concatenate(chosen), np.concatenate(gone)


def _root_call(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return the Python frames that called the outermost module, () without one."""
    last = max(
        (number for number, text in enumerate(stack) if text.startswith(MODULE_CALL)), default=len(stack)
    )
    return tuple(text for text in stack[last + 1 :] if read_frame(text).is_python)


def _used_until(judged: Judged, backwards: Backwards, gradient: Int64, made_in: Int64) -> Int64:
    """Return the last backward of which an optimizer uses what it added to each gradient (rows).

    It is the last one with a step before the gap in which the gradient is freed, `NO_MORE` if unknown.
    Optimizers are the lines that allocate state, and something after at least two backwards. One is that of
    gradients freed together if it has state of all their sizes, and no other has.
    """
    trace, category, phase = judged.trace, judged.trace.allocations.category, judged.trace.allocations.phase
    gap = backwards.between(trace.allocations.freed[gradient])
    window = judged.window
    in_step = phase[window.rows] == Phase.OPTIMIZER
    optimizers = list[tuple[Int64, Counter[int]]]()
    for line in {window.origins[row].line for row in np.unique(window.origin[in_step]).tolist()} - {""}:
        own = in_step & np.array([origin.line == line for origin in window.origins], bool)[window.origin]
        state = own & (category[window.rows] == Category.OPTIMIZER_STATE)
        stacks = np.unique(window.origin[state]).tolist()
        of_stack = [Counter(window.bytes[state & (window.origin == row)].tolist()) for row in stacks]
        steps = np.unique(np.searchsorted(backwards.last, window.born[own])) - 1
        if of_stack and len(steps) > 1:
            optimizers.append((steps, reduce(or_, of_stack)))
    until = np.full(len(gradient), NO_MORE)
    freed, size = trace.allocations.freed[gradient], trace.allocations.bytes[gradient]
    together = np.append(trace.own_stacks, -1)[freed]
    for number, stack in {*zip(gap.tolist(), together.tolist(), strict=True)} if len(optimizers) > 1 else ():
        rows = np.flatnonzero((gap == number) & (together == stack))
        fits = [steps for steps, sizes in optimizers if Counter(size[rows].tolist()) <= sizes]
        if number >= 0 and len(fits) == 1:
            last = int(fits[0][fits[0] <= number].max(initial=-1))
            until[rows] = np.maximum(last, made_in[rows] - 1)
    return until


def _needless(
    judged: Judged, backwards: Backwards, number: int, used: Int64, unused: Int64, kept: Int64
) -> tuple[Int64, Int64]:
    """Return the blocks (rows) that unused gradients cost in a backward, and from which event on.

    Args:
        used, unused: the gradients (rows) that are alive in it and that an optimizer uses, or that none does.
        kept: one gradient of each module and size of which no optimizer uses any.
    """
    blocks, key = judged.trace.allocations, judged.result(_keys)
    first, last = int(backwards.first[number]), int(backwards.last[number])
    before = int(backwards.last[number - 1]) if number else -1
    start, turn, end = np.searchsorted(blocks.born, (before, first - 1, last), side="right").tolist()
    own = (blocks.device[start:end] == judged.device) & (blocks.born[start:end] >= 0)
    behind = np.flatnonzero(own[turn - start :] & (blocks.phase[turn:end] == Phase.BACKWARD)) + turn
    is_earlier = blocks.born[used] < first
    sums = behind[np.isin(key[behind], key[used[is_earlier]])]
    until = int(blocks.born[np.append(sums, used[~is_earlier])].max(initial=first - 1))
    is_data = ~np.isin(blocks.category[start:turn], NOT_DATA) & own[: turn - start]
    rows = np.flatnonzero(is_data & (blocks.phase[start:turn] == Phase.FORWARD)) + start
    is_freed = (blocks.freed[rows] >= first) & (blocks.freed[rows] <= last)
    kind = judged.result(_kinds)[rows]
    is_needed = is_freed & np.isin(kind, kind[is_freed & (blocks.freed[rows] < until)])
    until = int(blocks.freed[rows[is_needed]].max(initial=until))
    after = behind[blocks.born[behind] > until]
    repeated = np.setdiff1d(behind[np.isin(key[behind], key[kept])], used)
    needless = np.union1d(repeated, unused[np.isin(unused, behind)])
    if not is_earlier.any() and len(used):
        apart, gone = _apart(judged, rows[is_freed], behind, kept, int(blocks.born[used].min()))
        if len(apart):
            new = ~np.isin(apart, needless)
            return np.append(needless, apart[new]), np.append(blocks.born[needless], gone[new])
    is_run = np.isin(blocks.module[rows], blocks.module[kept]).any() or len(needless)
    if not is_run and not np.isin(blocks.bytes[unused], blocks.bytes[after]).all():
        return needless, blocks.born[needless]
    needless = np.union1d(needless, after)
    trained = np.setdiff1d(blocks.module[used], [-1, *blocks.module[kept]]).tolist()
    is_needed |= np.isin(blocks.module[rows], [row for row in trained if judged.trace.modules[row].is_module])
    begin = int(blocks.born[rows[is_needed]].min(initial=first))
    rows = rows[blocks.born[rows] < begin]
    if not (blocks.freed[rows] > until).any():
        return needless, blocks.born[needless]
    gone = np.append(blocks.born[rows[BEHIND:]], np.full(BEHIND, begin))[: len(rows) - 1]
    rows = rows[:-1]  # the last is the input of the modules that are trained
    following = int(np.append(backwards.first, NO_MORE)[number + 1])
    is_kept = blocks.freed[rows] < following  # else a retained graph serves that backward, too
    return np.append(needless, rows[is_kept]), np.append(blocks.born[needless], gone[is_kept])
