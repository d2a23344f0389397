"""Assign categories and phases to the blocks of a snapshot.

Labels (`user_metadata`) come first, then frames that name a category, then the phase: from frames, else from
annotations such as `Optimizer.step#AdamW.step`. Within a phase or between two, a block's lifetime decides as
in `categories.by_lifetime`; last come comparisons with the sizes of other blocks. The rest stays unknown.

A cache grows as `keys = torch.cat([keys, new_keys])` does: in each call of a model the same stack allocates a
block, larger than that of the call before by the same bytes, and that one is freed, once for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tb_memplugin.read.categories import category_of
from tb_memplugin.read.snapshot.between_phases import reasons_between_phases
from tb_memplugin.read.snapshot.convolutions import freed_in_convolution
from tb_memplugin.read.snapshot.frame_marks import UNDECIDED, Mark, judged, mark_of
from tb_memplugin.read.snapshot.phases import EventPhases, event_phases, next_event
from tb_memplugin.read.snapshot.same_sizes import by_sizes
from tb_memplugin.read.snapshot.weight_copies import deep_copies, of_weights
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase, Reason
from tb_memplugin.trace.frames import distinct
from tb_memplugin.trace.labels import JOIN, fields_of
from tb_memplugin.trace.replay import attributed
from tb_memplugin.trace.tables import Bool, Int64, Rows, UInt8

_LABEL_WORDS = {
    "parameter": Category.PARAMETER,
    "parameters": Category.PARAMETER,
    "param": Category.PARAMETER,
    "params": Category.PARAMETER,
    "weight": Category.PARAMETER,
    "weights": Category.PARAMETER,
    "buffer": Category.BUFFER,
    "buffers": Category.BUFFER,
    "gradient": Category.GRADIENT,
    "gradients": Category.GRADIENT,
    "grad": Category.GRADIENT,
    "grads": Category.GRADIENT,
    "optimizer_state": Category.OPTIMIZER_STATE,
    "optimizer state": Category.OPTIMIZER_STATE,
    "optimizer states": Category.OPTIMIZER_STATE,
    "activation": Category.ACTIVATION,
    "activations": Category.ACTIVATION,
    "autograd_detail": Category.AUTOGRAD_DETAIL,
    "input": Category.INPUT,
    "inputs": Category.INPUT,
    "temporary": Category.TEMPORARY,
    "workspace": Category.WORKSPACE,
    "cache": Category.CACHE,
    "kv_cache": Category.CACHE,
    "kv cache": Category.CACHE,
    "communication": Category.COMMUNICATION,
}
"""Labels that name a category. Other labels have other meanings."""

_REASON_OF = np.full(len(Category), Reason.NO_RULE, np.uint8)
_REASON_OF[Category.ACTIVATION] = Reason.IN_FORWARD
_REASON_OF[Category.RECOMPUTED] = Reason.IN_RECOMPUTATION
_REASON_OF[Category.AUTOGRAD_DETAIL] = Reason.FREED_IN_BACKWARD
_REASON_OF[Category.GRADIENT] = Reason.OUTLIVES_BACKWARD
_REASON_OF[Category.TEMPORARY] = Reason.FREED_IN_STEP
_REASON_OF[Category.OPTIMIZER_STATE] = Reason.OUTLIVES_STEP


class Classified(NamedTuple):
    """`category`, its `reason`, and `phase` of every event; category and reason of the start state."""

    category: UInt8
    phase: UInt8
    start_category: UInt8
    reason: UInt8
    start_reason: UInt8


def categorised(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace with the columns that `classify` finds, without pairing its blocks again."""
    classified = classify(trace)
    events = replace(
        trace.events, category=classified.category, phase=classified.phase, reason=classified.reason
    )
    start = replace(trace.start, category=classified.start_category, reason=classified.start_reason)
    paired = attributed(trace.allocations, events, start)
    return replace(trace, events=events, start=start, paired=paired)


@dataclass(frozen=True, slots=True)
class _Judgement:
    """What the frames of each stack say; the last row is for "no stack"."""

    category: UInt8
    phase: UInt8
    mark: UInt8


def classify(trace: MemoryTrace) -> Classified:
    """Return category and phase of every event of a snapshot, from labels, annotations and frames.

    Only allocations have a category; those of frees have no meaning. Python code runs once per distinct
    frame and stack, not once per event.

    Args:
        trace: a trace read from a snapshot, without categories and phases.
    """
    by_stack, blocks = _judgement(trace), trace.allocations
    stack = trace.own_stacks
    mark, phase = by_stack.mark[stack], by_stack.phase[stack]
    phases = event_phases(trace, phase, mark)
    phase = phases.phase
    births = blocks.born[len(trace.start) :]
    born = _Judgement(
        category=by_stack.category[blocks.stack],
        phase=np.concatenate((by_stack.phase[trace.start.stack], phase[births])),
        mark=np.concatenate((by_stack.mark[trace.start.stack], mark[births])),
    )
    category = _by_phase(trace, born, phases)
    reason = _REASON_OF[category]
    saved = (category == Category.ACTIVATION) & (born.phase == Phase.OTHER)
    reason[saved] = Reason.FREED_BY_AUTOGRAD
    in_operator = freed_in_convolution(trace) & np.isin(category, (Category.ACTIVATION, Category.RECOMPUTED))
    category[in_operator], reason[in_operator] = Category.TEMPORARY, Reason.FREED_IN_OPERATOR
    certain = np.zeros(len(blocks), bool)
    trains = _has_backward(trace, phase)[blocks.device]
    of_frames = np.where((born.category == Category.CACHE) & trains, Category.UNKNOWN, born.category)
    in_forward = (category == Category.ACTIVATION) & (born.phase == Phase.FORWARD)
    has_grown = caches(trace, in_forward)
    category[has_grown], reason[has_grown] = Category.CACHE, Reason.GROWN
    for named, why in ((of_frames, Reason.FRAMES), (_named(trace.labels)[blocks.label], Reason.LABEL)):
        is_known = named != Category.UNKNOWN
        category[is_known], reason[is_known] = named[is_known], why
        certain |= is_known
    copies = deep_copies(trace, ~certain)
    weights = copies.row[copies.is_weight]
    category[weights], reason[weights] = Category.UNKNOWN, Reason.NO_RULE
    is_silent = np.isin(born.mark, UNDECIDED)
    is_silent[weights] = False
    rows, why_between = reasons_between_phases(trace, is_silent, born.phase, phase, category)
    reason[rows], category[rows] = why_between, category_of(why_between)
    compared = by_sizes(trace, category, certain, phase, phases.ends_step)
    compared[copies.row] = of_weights(trace, copies, compared, phase)
    changed = compared != category
    reason[changed] = Reason.SAME_SIZES
    reason[weights[changed[weights]]] = Reason.FRAMES
    reason[changed & (compared == Category.WORKSPACE)] = Reason.SIZE
    columns = np.full((2, len(phase)), [[Category.UNKNOWN], [Reason.NOT_RECORDED]], np.uint8)
    first = len(trace.start)
    columns[0, births], columns[1, births] = compared[first:], reason[first:]
    return Classified(columns[0], phase, compared[:first], columns[1], reason[:first])


def _judgement(trace: MemoryTrace) -> _Judgement:
    marks = {text: mark for text in distinct(trace.stacks) if (mark := mark_of(text))}
    rows = [judged([marks[text] for text in stack if text in marks]) for stack in (*trace.stacks, ())]
    columns = np.array(rows, np.uint8).reshape(-1, 3)
    return _Judgement(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())


def _named(labels: tuple[str, ...]) -> UInt8:
    """Return the category that each label, or a value in it, names; the last entry is for "no label"."""
    return np.array([*map(_category_named, labels), Category.UNKNOWN], np.uint8)


def _category_named(label: str) -> Category:
    words = (*label.split(JOIN), *fields_of(label).values())
    named = (_LABEL_WORDS.get(word.strip().lower()) for word in words)
    return next((category for category in named if category is not None), Category.UNKNOWN)


def _by_phase(trace: MemoryTrace, born: _Judgement, phases: EventPhases) -> UInt8:
    """Return the category of each allocation that follows from its phase and lifetime."""
    category = np.full(len(born.phase), Category.UNKNOWN, np.uint8)
    category[born.phase == Phase.FORWARD] = Category.ACTIVATION
    rules = (
        (Phase.BACKWARD, phases.ends_backward, Category.AUTOGRAD_DETAIL, Category.GRADIENT),
        (Phase.OPTIMIZER, phases.ends_step, Category.TEMPORARY, Category.OPTIMIZER_STATE),
    )
    for phase, over, inside, outside in rules:
        rows = np.flatnonzero(born.phase == phase)
        fates = np.array([inside, outside, Category.UNKNOWN], np.uint8)
        category[rows] = fates[_fate(trace, rows, over)]
    category[born.mark == Mark.RECOMPUTE] = Category.RECOMPUTED
    category[_saved_for_backward(trace, born, phases.phase)] = Category.ACTIVATION
    return category


def _saved_for_backward(trace: MemoryTrace, born: _Judgement, phase: UInt8) -> Bool:
    """Return a mask of blocks without a known phase that are freed in backward: saved by a forward for it.

    A block from before the trace counts only if the backward began within the trace: a backward that was
    already running also frees its own intermediate results.
    """
    blocks, count = trace.allocations, len(trace.events)
    of_free = np.append(phase, Phase.OTHER)[blocks.freed]
    by_autograd = (of_free == Phase.BACKWARD) & (born.phase == Phase.OTHER) & (born.mark == Mark.NOTHING)
    began = np.full(len(trace.devices), count, np.int64)
    for device in range(len(trace.devices)):
        began[device] = next_event(
            np.flatnonzero((trace.events.device == device) & (phase == Phase.FORWARD)), -1, count
        )
    mask: Bool = by_autograd & ((blocks.born >= 0) | (began[blocks.device] < blocks.freed))
    return mask


def _has_backward(trace: MemoryTrace, phase: UInt8) -> Bool:
    """Return on which devices a backward runs: in training, what transformers calls a cache is used once."""
    return np.bincount(trace.events.device[phase == Phase.BACKWARD], minlength=len(trace.devices)) > 0


def _fate(trace: MemoryTrace, rows: Int64, ends: Bool) -> UInt8:
    """Return whether allocations outlived the phase in which they were allocated.

    Returns:
        0 if not, 1 if they did, 2 if an out-of-memory error came first, so that it is not known.
    """
    blocks, count = trace.allocations, len(trace.events)
    fate = np.zeros(len(rows), np.uint8)
    for device in range(len(trace.devices)):
        mine = np.flatnonzero(blocks.device[rows] == device)
        here = trace.events.device == device
        born, freed = blocks.born[rows[mine]], blocks.freed[rows[mine]]
        over = next_event(np.flatnonzero(here & ends), born, count)
        failed = next_event(np.flatnonzero(here & (trace.events.kind == Kind.OOM)), born, count)
        fate[mine] = freed >= over
        fate[mine[(failed < over) & (freed > failed)]] = 2
    return fate


FEWEST_CALLS = 3
"""How many blocks, one in the place of the other, are a chain."""


def caches(trace: MemoryTrace, is_candidate: Bool) -> Bool:
    """Return which blocks are parts of caches that grow.

    What a model allocates for the new tokens alone is as large as what they add to the cache. So chains count
    only if as many other blocks have just that size: without a cache, all that a model allocates grows.

    Args:
        is_candidate: shape (allocations,), whether nothing shows that a block is something else.
    """
    blocks = trace.allocations
    result = np.zeros(len(blocks), bool)
    rows = np.flatnonzero(is_candidate & (blocks.stack >= 0) & (blocks.born >= 0))
    rows = rows[np.argsort(blocks.stack[rows], kind="stable")]
    bounds = np.flatnonzero(np.diff(blocks.stack[rows])) + 1
    sizes: Int64 = blocks.bytes[rows]
    for of_stack in np.split(rows, bounds):
        if len(of_stack) < FEWEST_CALLS or blocks.bytes[of_stack[0]] >= blocks.bytes[of_stack[-1]]:
            continue
        members, growth = _chains(blocks.born[of_stack], blocks.freed[of_stack], blocks.bytes[of_stack])
        for each in np.unique(growth).tolist():
            of_growth = members[growth == each]
            if np.count_nonzero(sizes == each) >= len(of_growth):
                result[of_stack[of_growth]] = True
    return result


def _chains(born: Int64, freed: Int64, size: Int64) -> tuple[Rows, Int64]:
    """Return the blocks of one stack that are in chains of three and more, and by how much each chain grows.

    Layers follow one another: in one call, their blocks have one size. A block is freed after that of its
    layer in the next call is allocated, and before the one after that is.
    """
    larger = np.flatnonzero(size != size[0])
    layers = int(larger[0]) if len(larger) else len(size)
    if len(born) < FEWEST_CALLS * layers:
        return np.empty(0, np.intp), np.empty(0, np.int64)
    growth = size[layers:] - size[:-layers]
    after_next = np.concatenate((born[2 * layers :], np.full(layers, np.iinfo(np.int64).max)))
    replaced = (freed[:-layers] > born[layers:]) & (freed[:-layers] < after_next)
    linked = (growth > 0) & replaced
    steady = np.flatnonzero(linked[:-layers] & linked[layers:] & (growth[:-layers] == growth[layers:]))
    members = np.concatenate((steady, steady + layers, steady + 2 * layers))
    members, first = np.unique(members, return_index=True)
    return members, np.tile(growth[steady], 3)[first]
