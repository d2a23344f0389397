"""Advice: what a forward returned is kept until the next forward has returned."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tb_memplugin.analysis.autograd_graphs import (
    FEWEST_SITES,
    LEAST_KEPT,
    MOST_OF_TWO,
    NO_MORE,
    Backwards,
    is_outside,
    without_backward,
)
from tb_memplugin.analysis.block_origins import (
    UNKNOWN_ORIGINS,
    Judged,
    StepBlocks,
    freed_by_program,
    freed_by_python,
)
from tb_memplugin.analysis.findings import Result
from tb_memplugin.analysis.steps import highest_step
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import CERTAIN, Bool, Int64

SOON = 16
"""A variable was bound again if its old block is freed within so many events of the new one's birth."""

FEWEST, LEAST_OF_KIND = 3, 0.01
"""Fewest results of one line that pile up, and the least share of the peak that those of a size have."""

MOST_FORWARDS = 2
"""A cache serves more than so many times what runs between the births of two results."""

BEHIND = 3
"""Without a hook that keeps it, an output counts as freed when so many further ones have been allocated."""

AS_HIGH = 0.99
"""A later step is judged in the place of the first if its peak is at least this share of the highest."""

MOST_TRIED = 2_000
"""So many blocks of forward after a birth are searched for one that repeats."""


def previous_result(judged: Judged) -> Result:
    """Find blocks that are freed just after the same line allocated their like again, a forward later.

    That is what `output = model(batch)` in a loop does. The next forward begins where a line of forward
    that ran before the block's birth runs again. The finding's bytes are by how much the highest step's
    peak falls if each block is freed there. Or results pile up, see `_piled_up`, if that costs more.
    """
    judged = _with_known_results(judged)
    trace, blocks, step = judged.trace, judged.blocks, judged.step
    if not blocks.are_known:
        return UNKNOWN_ORIGINS
    forward = trace.allocations.phase[blocks.rows] == Phase.FORWARD
    module = np.where(trace.allocations.module_confidence == CERTAIN, trace.allocations.module + 1, 0)
    recorded = (
        np.unique(blocks.kinds, return_inverse=True)[1] * (len(trace.modules) + 1) + module[blocks.rows]
    )
    bound = _bound_again(trace, blocks, recorded)
    freed_outside = freed_by_python(trace, blocks, in_calls=False)
    may_be_result = freed_outside | ~freed_by_python(trace, blocks)  # modules free what they keep themselves
    bound = bound[(_once_a_forward(recorded, forward) & may_be_result)[bound]]
    tried = (
        (bound, _next_forwards(blocks, recorded, np.flatnonzero(forward).astype(np.int64), bound)),
        *_piled_up(judged, forward, may_be_result, freed_outside),
        _overwritten(judged),
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
        "next forward. If only the last token's logits are used, compute no others, and return no hidden "
        "states that nobody uses. Remove forward hooks that store outputs once these are read.",
        gone=begun - 1,
    )


def _with_known_results(judged: Judged) -> Judged:
    """Return the device in a step of which the recording tells what the step before it left.

    What was alive as the recording began has no line. If the highest step is the first and frees such data,
    this may be a result, too: then it is the highest of the later steps, if that is as high.
    """
    trace, blocks, step = judged.trace, judged.blocks, judged.step
    if step.row or len(trace.steps) == 1:
        return judged
    is_earlier = (blocks.born < 0) & (blocks.freed < step.end)
    is_earlier &= ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA)
    later = highest_step(trace, judged.device, range(1, len(trace.steps)))
    is_as_high = later.peak_bytes >= AS_HIGH * step.peak_bytes
    return judged.in_step(later.row) if is_as_high and is_earlier.any() else judged


def _bound_again(trace: MemoryTrace, blocks: StepBlocks, kind: Int64) -> Int64:
    """Return the blocks (indices) that are freed soon after the next block of their kind."""
    data = np.flatnonzero((blocks.born >= 0) & ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA))
    order = data[np.lexsort((blocks.born[data], kind[data]))]
    first, second = order[:-1], order[1:]
    late = blocks.freed[first] - blocks.born[second]
    again = (kind[first] == kind[second]) & (late > 0) & (late <= SOON)
    again &= freed_by_program(trace, blocks)[first]
    third = np.append(second[1:], second[-1:])
    again &= (kind[third] != kind[second]) | (third == second) | (blocks.freed[first] < blocks.born[third])
    return np.sort(first[again]).astype(np.int64)


def _overwritten(judged: Judged) -> tuple[Int64, Int64]:
    """Return what modules keep until they run again (indices), and the event until which it is needed.

    Hooks that store outputs by the module's name do that: each is freed soon after so many more of its kind
    are born as a forward has. One more is what a loop over layers keeps in a variable, so most must outlive
    several, or the step before. Of few sites they are states, which the next forward reads. Without hooks
    they are needed until their backward ends or, without one, until `BEHIND` others are born.
    """
    trace, blocks, window = judged.trace, judged.blocks, judged.window
    kept = np.isin(blocks.rows, window.rows[_is_overwritten(trace, window)])
    born, size = (
        np.append(blocks.born[kept], np.full(BEHIND, NO_MORE)),
        np.append(blocks.bytes[kept], [0] * BEHIND),
    )
    earlier = (blocks.born < 0) & (trace.allocations.category[blocks.rows] == Category.UNKNOWN) & kept.any()
    last = np.searchsorted(born, blocks.freed[earlier, None]) - np.arange(1, SOON + 1)
    is_soon = (last >= 0) & (blocks.freed[earlier, None] - born[last] <= SOON)
    kept[earlier] = (is_soon & (size[last] == blocks.bytes[earlier, None])).any(1)
    chosen = np.flatnonzero(kept).astype(np.int64)
    passes = judged.result(Backwards.of)
    ends = np.append(passes.last, NO_MORE)[np.searchsorted(passes.first, blocks.born[chosen])]
    behind = born[np.searchsorted(born, blocks.born[chosen]) + BEHIND]
    needed = np.where(blocks.born[chosen] < 0, -1, np.where(ends < NO_MORE, ends, behind))
    return chosen, np.minimum(needed, blocks.freed[chosen]) + 1


def _is_overwritten(trace: MemoryTrace, window: StepBlocks) -> Bool:
    """Return the mask of the blocks of a window that hooks keep until their module runs again."""
    category, phase = (
        column[window.rows] for column in (trace.allocations.category, trace.allocations.phase)
    )
    data = (phase == Phase.FORWARD) & (window.born >= 0) & ~np.isin(category, NOT_DATA)
    steps = np.array([trace.step_events(row)[0] for row in range(len(trace.steps))])
    rows = np.flatnonzero(data)
    rows = rows[np.argsort(window.kinds[rows], kind="stable")]
    begins = np.flatnonzero(np.append(True, np.diff(window.kinds[rows]) != 0)[: len(rows)])
    sizes = np.diff(begins, append=len(rows))
    kind = np.repeat(np.arange(len(begins)), sizes)
    in_first = window.born[rows] < window.freed[rows[begins]][kind]
    laters = np.bincount(kind, in_first, len(begins)).astype(np.int64) - 1
    kept, outlives = np.zeros(len(data), bool), np.zeros(len(data), bool)
    for number in np.flatnonzero((laters > 0) & (laters < sizes)).tolist():
        alike, later = rows[begins[number] : begins[number] + sizes[number]], int(laters[number])
        born, freed = window.born[alike], window.freed[alike]
        late = freed - np.append(born[later:], np.full(later, born[-1]))
        if late.min() > 0 and late[: len(born) - later].max() <= SOON:
            kept[alike] = True
            in_step, freed_in = (np.searchsorted(steps, events, "right") for events in (born, freed))
            outlives[alike] = (later > 1) | (in_step < freed_in)
    is_hook = len(np.unique(window.sites[kept])) >= FEWEST_SITES
    is_hook &= bool(window.bytes[outlives].sum() > window.bytes[kept].sum() / 2)
    is_hook &= bool(window.bytes[kept].sum() >= LEAST_KEPT * window.bytes[data].sum())
    return kept & is_hook


def _piled_up(
    judged: Judged, forward: Bool, may_be_result: Bool, freed_outside: Bool
) -> Iterator[tuple[Int64, Int64]]:
    """Yield blocks (indices) that outlive the birth of their like, and the event after that birth.

    They are what a list keeps, without a backward or after it: results of a module, what is allocated for
    each forward outside of modules, or the outputs of all layers of a forward. Calls of layers without a
    name could be those of one forward; so an output is only what is freed outside of all modules.
    """
    trace, blocks = judged.trace, judged.blocks
    is_module = np.array([*(module.is_module for module in trace.modules), False])
    module = trace.allocations.module[blocks.rows].astype(np.int64)
    phase = trace.allocations.phase[blocks.rows]
    unused = without_backward(trace, blocks) | judged.result(Backwards.of).outlived(judged)
    unused &= (blocks.born >= 0) & ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA)
    unused &= ~np.isin(phase, (Phase.BACKWARD, Phase.OPTIMIZER)) & may_be_result
    outside = blocks.of(is_outside)
    of_module = np.unique(blocks.kinds, return_inverse=True)[1] * len(is_module) + module + 1
    window = judged.window
    runs = (trace.allocations.phase[window.rows] == Phase.FORWARD) & (window.born >= 0)
    calls = runs & ~window.of(is_outside)
    yield _pile(blocks, unused & forward & (is_module[module] | outside), of_module, window, runs)
    yield _pile(blocks, unused & outside, blocks.kinds, window, calls)
    outputs = unused & forward & ~outside & freed_outside
    yield _pile(blocks, outputs, blocks.kinds, window, calls, of_layers=True)


def _pile(
    blocks: StepBlocks,
    can_pile: Bool,
    kind: Int64,
    window: StepBlocks,
    runs: Bool,
    *,
    of_layers: bool = False,
) -> tuple[Int64, Int64]:
    """Return the blocks (indices) of kinds that pile up, and the event after the next birth of each kind.

    At the peak at least `FEWEST` are alive, with births of forward (`runs`, of the window) between them, but
    hardly between their frees, as in a queue, or in caches that grow. What is allocated once for many
    forwards is a cache, too: far more of forward follows its last birth than lies between the last two. So is
    what layers keep if their lines run again, or if anything is born between its frees, as copies in another
    order. Of the blocks of forward that outlive the next one of their kind, or the last of all, two sites
    have most of the bytes. Two births are of one forward if only `_brief` blocks are born between them: those
    that wrap a number for the second of `(x * 2, x * 3)`.
    """
    calls = window.born[runs]
    at_peak = can_pile & blocks.at_peak
    outlives = blocks.freed > calls.max(initial=-1)
    order = np.lexsort((blocks.born, kind))
    first, second = order[:-1], order[1:]
    outlives[first] |= (kind[first] == kind[second]) & (blocks.freed[first] > blocks.born[second])
    used, number, count = np.unique(kind[at_peak], return_inverse=True, return_counts=True)
    size = np.bincount(number, blocks.bytes[at_peak], len(used))
    is_large = (count >= FEWEST) & (size >= LEAST_OF_KIND * blocks.step.peak_bytes)
    before = np.searchsorted(calls, blocks.born)
    is_call = np.isin(blocks.born, calls)
    rows, gone = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for key in used[is_large].tolist():
        own = np.flatnonzero(can_pile & (kind == key)).astype(np.int64)
        alive = own[at_peak[own]]
        end = blocks.freed[alive].min()
        frees = np.searchsorted(blocks.born if of_layers else calls, np.sort(blocks.freed[alive]))
        is_queue = np.count_nonzero(np.diff(frees)) >= FEWEST - 1
        between = before[own[1:]] - (before + is_call)[own[:-1]]
        begins = np.append(own[0], own[1:][between > 0])
        inside = begins[(begins >= alive[0]) & (blocks.born[begins] < end)]
        if is_queue or len(inside) < FEWEST:
            continue
        since, until = inside[-2], inside[-1]
        if of_layers:
            after = slice(until + 1, int(np.searchsorted(blocks.born, end)))
            again = np.isin(blocks.sites[after], blocks.sites[since : until + 1]).sum()
            is_cache = again > until - since  # the last layer may return another state
        else:
            served = int(np.searchsorted(calls, end)) - before[until]
            is_cache = served > MOST_FORWARDS * (before[until] - before[since])
        if not is_cache:
            between -= np.diff(np.searchsorted(_brief(blocks, own, window, runs), blocks.born[own]))
            begins = np.append(own[0], own[1:][between > 0])
            following = np.append(blocks.born[begins], NO_MORE)[np.searchsorted(begins, own, side="right")]
            rows.append(own)
            gone.append(np.minimum(following, blocks.freed[own]))
    piled = np.concatenate(rows)
    of_site = np.sort(np.bincount(blocks.sites[piled], blocks.bytes[piled] * at_peak[piled]))
    if of_site[-2:].sum() < MOST_OF_TWO * blocks.bytes[at_peak & is_call & outlives].sum():
        return rows[0], gone[0]
    return piled, np.concatenate(gone) + 1


def _brief(blocks: StepBlocks, own: Int64, window: StepBlocks, runs: Bool) -> Int64:
    """Return the births of what the line of some blocks (indices) allocates too, and soon frees.

    Of two such blocks that follow it, it is freed before the second.

    Args:
        runs: the mask of the blocks of the window among which they are.
    """
    line = blocks.origins[blocks.origin[own[0]]].line
    alike = runs & window.of(lambda origin: origin.line == line != "")
    second = np.append(blocks.born[own[1:]], (NO_MORE, NO_MORE))
    births: Int64 = window.born[alike]
    return births[window.freed[alike] < second[np.searchsorted(blocks.born[own], births)]]


def _once_a_forward(kind: Int64, forward: Bool) -> Bool:
    """Return the mask of the blocks of forward whose kind repeats as seldom as any: not once a layer."""
    _, number, count = np.unique(kind, return_inverse=True, return_counts=True)
    times = count[number]
    least = int(times[forward & (times > 1)].min(initial=len(times)))
    once: Bool = forward & (times <= least + 1)
    return once


def _next_forwards(blocks: StepBlocks, kinds: Int64, forward: Int64, rows: Int64) -> Int64:
    """Return the first event after each birth at which a kind of forward repeats, else one after the free."""
    _, first_of_kind, kind = np.unique(kinds[forward], return_index=True, return_inverse=True)
    born, first = blocks.born[forward], blocks.born[forward][first_of_kind][kind]
    begun: Int64 = blocks.freed[rows] + 1
    for number, birth in enumerate(blocks.born[rows].tolist()):
        after = int(np.searchsorted(born, birth, side="right"))
        same = np.flatnonzero(first[after : after + MOST_TRIED] < birth)
        if len(same):
            begun[number] = born[after + same[0]]
    return begun
