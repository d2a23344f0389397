"""Assign categories and phases to the blocks of a snapshot.

Labels (`user_metadata`) come first, then frames that name a category, then the phase: from frames, else from
annotations such as `Optimizer.step#AdamW.step`. Within a phase or between two, a block's lifetime decides as
in `categories.by_lifetime`; last come comparisons with the sizes of other blocks. The rest stays unknown.

A cache grows as `keys = torch.cat([keys, new_keys])` does: in each call of a model the same stack allocates a
block, larger than that of the call before by the same bytes, and that one is freed, once for each layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tb_memplugin.read.categories import between_phases, category_of
from tb_memplugin.read.cublas import LARGE_WORKSPACE, LT_WORKSPACE, MOST_WORKSPACES, WORKSPACE
from tb_memplugin.read.snapshot.frame_marks import UNDECIDED, Mark, judged, mark_of
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase, Reason
from tb_memplugin.trace.frames import distinct, read_frame
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

_STEP = re.compile(r"Optimizer\.step#|(^|[^a-z])optim(izer)?([ _-]?step)?([^a-z]|$)", re.IGNORECASE)
_TRANSFORM = re.compile(r"[/\\]_functorch[/\\](vmap|eager_transforms|apis)\.py:")
"""Frames of `torch.func`, whose functions have forward and backward without modules and autograd's thread."""
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#|(^|[^a-z])zero_grad([^a-z]|$)", re.IGNORECASE)
_FORWARD = re.compile(r"(^|[^a-z])(forward|fwd)([^a-z]|$)", re.IGNORECASE)
_BACKWARD = re.compile(r"(^|[^a-z])(backward|bwd)([^a-z]|$)", re.IGNORECASE)


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
    phase = _with_annotations(trace, phase, mark)
    phase = _with_threads_of_autograd(trace, phase, mark)
    ends = _ends_of_backward(trace, phase, mark), (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    phase = _with_losses(trace, phase, mark)
    births = blocks.born[len(trace.start) :]
    born = _Judgement(
        category=by_stack.category[blocks.stack],
        phase=np.concatenate((by_stack.phase[trace.start.stack], phase[births])),
        mark=np.concatenate((by_stack.mark[trace.start.stack], mark[births])),
    )
    category = _by_phase(trace, born, phase, ends)
    reason = _REASON_OF[category]
    saved = (category == Category.ACTIVATION) & (born.phase == Phase.OTHER)
    reason[saved] = Reason.FREED_BY_AUTOGRAD
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
    rows, why_between = _between_phases(trace, born, phase, category)
    reason[rows], category[rows] = why_between, category_of(why_between)
    compared = by_sizes(trace, category, certain, phase, ends[1])
    changed = compared != category
    reason[changed] = Reason.SAME_SIZES
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


def _annotation_phase(name: str) -> Phase:
    """Return the phase that an annotation's name contains; OTHER if it contains none or several."""
    if _ZERO_GRAD.search(name):
        return Phase.OTHER
    patterns = {Phase.OPTIMIZER: _STEP, Phase.FORWARD: _FORWARD, Phase.BACKWARD: _BACKWARD}
    matches = [phase for phase, pattern in patterns.items() if pattern.search(name)]
    return matches[0] if len(matches) == 1 else Phase.OTHER


def _with_annotations(trace: MemoryTrace, phase: UInt8, mark: UInt8) -> UInt8:
    """Return the phases, with those of open annotations where frames say nothing and annotations agree.

    Beside events with frames, one without is of autograd's thread, whatever the program has opened.
    """
    written = trace.annotations
    if not len(written):
        return phase
    of_name = np.array([_annotation_phase(name) for name in trace.annotation_names], np.uint8)
    noted, opened = np.full(len(phase), Phase.OTHER, np.uint8), np.zeros(len(phase), np.uint8)
    for device in np.unique(written.device).tolist():
        here = trace.events.device == device
        for wanted in (Phase.OPTIMIZER, Phase.FORWARD, Phase.BACKWARD):
            rows = np.flatnonzero((written.device == device) & (of_name[written.name] == wanted))
            if len(rows):
                is_open = here & _is_open(written.event[rows], written.ends[rows], len(phase))
                noted[is_open] = wanted
                opened += is_open
    silent = (phase == Phase.OTHER) & (mark == Mark.NOTHING) & (opened == 1)
    has_frames = trace.own_stacks >= 0
    silent &= has_frames | ~has_frames.any()
    return np.where(silent, noted, phase).astype(np.uint8)


def _is_open(event: Int64, ends: UInt8, events: int) -> Bool:
    """Whether an annotation is open at each event. One without a start is open from the beginning."""
    step = np.where(ends == 1, -1, 1)
    change = np.zeros(events + 1, np.int64)
    np.add.at(change, event + 1, step)  # an annotation comes after its event
    change[0] -= min(0, int(np.cumsum(step).min()))
    mask: Bool = np.cumsum(change[:-1]) > 0
    return mask


def _with_threads_of_autograd(trace: MemoryTrace, phase: UInt8, mark: UInt8) -> UInt8:
    """Return the phases, with allocations without frames set to backward if only Python frames are recorded.

    Autograd runs on its own thread without Python, so a history recorded with `stacks="python"` has no
    frames of it. Allocations before a known forward or after an optimizer step are not changed. Frames of
    blocks from before say nothing: an earlier history may have recorded them in another way.
    """
    silent = (trace.events.stack < 0) & (trace.events.kind == Kind.ALLOC) & (phase == Phase.OTHER)
    if not silent.any():
        return phase
    recorded = trace.events.stack[trace.events.stack >= 0]
    stacks = [trace.stacks[row] for row in np.unique(recorded).tolist()]
    if not stacks or not all(read_frame(text).is_python for text in distinct(stacks)):
        return phase
    phases: UInt8 = phase.copy()
    is_decided = (phase != Phase.OTHER) | ~np.isin(mark, UNDECIDED)
    is_decided &= ~_on_threads_without_forward(trace, phase)
    for device in range(len(trace.devices)):
        here = trace.events.device == device
        decided, candidates = np.flatnonzero(here & is_decided), np.flatnonzero(here & silent)
        before = np.searchsorted(decided, candidates)
        candidates, before = candidates[before > 0], before[before > 0]
        last = phase[decided[before - 1]]
        phases[candidates[(last == Phase.FORWARD) | (last == Phase.BACKWARD)]] = Phase.BACKWARD
    return phases


def _on_threads_without_forward(trace: MemoryTrace, phase: UInt8) -> Bool:
    """Return a mask of events with a stack that begins where no forward's does: of an optimizer in a hook."""
    texts = [stack[-1] if stack else "" for stack in trace.stacks]
    beginning = {text: read_frame(text)[:2] for text in {*texts, ""}}
    of_forward = np.unique(trace.events.stack[phase == Phase.FORWARD]).tolist()
    with_forward = {beginning[texts[row]] for row in of_forward if row >= 0}
    is_other = np.array([*(beginning[text] not in with_forward for text in texts), False])
    mask: Bool = is_other[trace.events.stack]
    return mask


def _ends_of_backward(trace: MemoryTrace, phase: UInt8, mark: UInt8) -> Bool:
    """Return a mask of events at which no backward runs: in a forward, an optimizer step or `zero_grad`."""
    over: Bool = (phase == Phase.FORWARD) | (phase == Phase.OPTIMIZER) | (mark == Mark.ZERO_GRAD)
    written = trace.annotations
    names = [
        _annotation_phase(name) == Phase.OPTIMIZER or bool(_ZERO_GRAD.search(name))
        for name in trace.annotation_names
    ]
    starts = (written.ends == 0) & np.array([*names, False], bool)[written.name]
    for device in np.unique(written.device[starts]).tolist():
        here = np.flatnonzero(trace.events.device == device)
        behind = _next(here, written.event[starts & (written.device == device)], len(over))
        over[behind[behind < len(over)]] = True
    return over


def _with_losses(trace: MemoryTrace, phase: UInt8, mark: UInt8) -> UInt8:
    """Return the phases, with events between a forward and the next backward (the loss) set to forward.

    What is freed in between decides nothing: old gradients, and blocks with the stack of their allocation.
    """
    phases: UInt8 = phase.copy()
    loose = (phase == Phase.OTHER) & np.isin(mark, UNDECIDED)
    for device in range(len(trace.devices)):
        here = trace.events.device == device
        decided = np.flatnonzero(here & ~loose & (trace.events.kind == Kind.ALLOC))
        candidates = np.flatnonzero(here & loose)
        after = np.searchsorted(decided, candidates)
        inside = (after > 0) & (after < len(decided))
        candidates, after = candidates[inside], after[inside]
        between = (phase[decided[after - 1]] == Phase.FORWARD) & (phase[decided[after]] == Phase.BACKWARD)
        phases[candidates[between]] = Phase.FORWARD
    return phases


def _by_phase(trace: MemoryTrace, born: _Judgement, phase_of_event: UInt8, ends: tuple[Bool, Bool]) -> UInt8:
    """Return the category of each allocation that follows from its phase and lifetime."""
    category = np.full(len(born.phase), Category.UNKNOWN, np.uint8)
    category[born.phase == Phase.FORWARD] = Category.ACTIVATION
    rules = (
        (Phase.BACKWARD, ends[0], Category.AUTOGRAD_DETAIL, Category.GRADIENT),
        (Phase.OPTIMIZER, ends[1], Category.TEMPORARY, Category.OPTIMIZER_STATE),
    )
    for phase, over, inside, outside in rules:
        rows = np.flatnonzero(born.phase == phase)
        fates = np.array([inside, outside, Category.UNKNOWN], np.uint8)
        category[rows] = fates[_fate(trace, rows, over)]
    category[born.mark == Mark.RECOMPUTE] = Category.RECOMPUTED
    category[_saved_for_backward(trace, born, phase_of_event)] = Category.ACTIVATION
    return category


def _between_phases(
    trace: MemoryTrace, born: _Judgement, phase: UInt8, category: UInt8
) -> tuple[Rows, UInt8]:
    """Return the blocks that lines outside of every phase allocated, and their reasons, see `between_phases`.

    A step ends with a backward or, where there is none, with a forward. Nothing tells parameters or state
    from data where no block of their size and stack was ever freed, nor new weights, as of an average or of
    meta-learning, where one line allocates several blocks that all have sizes of parameters. Nor are lines
    under a transformation of `torch.func` known to be outside of every phase.
    """
    blocks, events = trace.allocations, trace.events
    is_own = (category == Category.UNKNOWN) & (born.phase == Phase.OTHER) & np.isin(born.mark, UNDECIDED)
    is_own &= (blocks.born >= 0) & (blocks.stack >= 0)
    stacks = np.unique(blocks.stack[is_own]).tolist()
    transformed = [row for row in stacks if any(map(_TRANSFORM.search, trace.stacks[row]))]
    is_own &= ~np.isin(blocks.stack, transformed)
    weights = category == (Category.PARAMETER if Category.PARAMETER in category else Category.GRADIENT)
    is_weight = np.isin(blocks.bytes, blocks.bytes[weights])
    elsewhere = _on_threads_without_forward(trace, phase)
    reason = np.full(len(blocks), Reason.NO_RULE, np.uint8)
    for device in range(len(trace.devices)):
        at = np.flatnonzero((events.kind == Kind.ALLOC) & (events.device == device))
        rows, forwards = np.flatnonzero(is_own & (blocks.device == device)), at[phase[at] == Phase.FORWARD]
        if not len(rows) or not len(forwards):
            continue
        start, end, stack = blocks.born[rows], blocks.freed[rows], blocks.stack[rows].astype(np.int64)
        decided = at[(phase[at] != Phase.OTHER) & ~elsewhere[at]]
        last = Phase.BACKWARD if (phase[decided] == Phase.BACKWARD).any() else Phase.FORWARD
        order = decided if last == Phase.BACKWARD else at
        step_ends = order[(phase[order] == last) & (np.append(phase[order[1:]], Phase.OTHER) != last)] + 1
        outlives = end > _next(decided, start, len(events))
        kind = np.array((blocks.bytes[rows], stack))
        mine = between_phases(start, end, outlives, kind, forwards, step_ends)
        number, is_freed = _numbered(kind), end < len(events)
        mine[~is_freed & ~np.isin(number, number[is_freed])] = Reason.NO_RULE
        line = _numbered(np.array((np.searchsorted(decided, start), stack)))
        several = np.bincount(line)[line] > 1
        mine[several & ~np.isin(line, line[~is_weight[rows]])] = Reason.NO_RULE
        reason[rows] = mine
    rows = np.flatnonzero(reason != Reason.NO_RULE)
    return rows, reason[rows]


def _numbered(columns: Int64) -> Rows:
    """Return a number for each column of an array of shape (values, columns), the same for equal columns."""
    return np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)


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
        began[device] = _next(
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
        over = _next(np.flatnonzero(here & ends), born, count)
        failed = _next(np.flatnonzero(here & (trace.events.kind == Kind.OOM)), born, count)
        fate[mine] = freed >= over
        fate[mine[(failed < over) & (freed > failed)]] = 2
    return fate


def _next(indices: Int64, after: Int64 | int, otherwise: int) -> Int64:
    """Return the first of the sorted `indices` after each event, `otherwise` if there is none."""
    following: Int64 = np.append(indices, otherwise)[np.searchsorted(indices, after, side="right")]
    return following


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


FEWEST = 8
"""The smallest number of blocks that must agree. Fewer could agree by accident."""


def by_sizes(trace: MemoryTrace, category: UInt8, certain: Bool, phase: UInt8, ends_step: Bool) -> UInt8:
    """Return the categories of allocations, including those that follow from the sizes of other blocks.

    Args:
        category: the category of each allocation, `UNKNOWN` if not known.
        certain: which of them a label or a frame names.
        phase: the phase of each event.
        ends_step: mask of events at which no optimizer step runs.
    """
    categories: UInt8 = category.copy()
    blocks = trace.allocations
    categories[_workspaces(trace, certain)] = Category.WORKSPACE
    categories[_large_workspaces(trace, certain, phase)] = Category.WORKSPACE
    for device in range(len(trace.devices)):
        rows = np.flatnonzero((categories == Category.UNKNOWN) & (blocks.device == device))
        categories[_replaced_state(trace, categories, phase, rows, ends_step)] = Category.OPTIMIZER_STATE
        rows = rows[categories[rows] == Category.UNKNOWN]
        categories[_with_gradients(trace, categories, phase, rows, device)] = Category.PARAMETER
    return categories


def _workspaces(trace: MemoryTrace, certain: Bool) -> Int64:
    """Return the blocks of the size of a cuBLAS workspace that nothing else explains.

    PyTorch allocates a workspace in the first product of a thread on a stream and keeps it, so with Python's
    frames alone it looks like a result of that product. Frames of C++ would name it. Of a tensor's size, some
    blocks would be freed, or there would be many.
    """
    blocks = trace.allocations
    right_size = blocks.bytes == WORKSPACE
    kept = right_size & (blocks.freed == len(trace.events))
    rows = []
    for device in np.unique(blocks.device[kept]).tolist():
        here = right_size & (blocks.device == device)
        if not (here & ~kept).any() and np.count_nonzero(here) <= MOST_WORKSPACES[WORKSPACE]:
            rows += np.flatnonzero(here & ~certain).tolist()
    return np.array([row for row in rows if not _has_native_frames(trace, row)], np.int64)


def _large_workspaces(trace: MemoryTrace, certain: Bool, phase: UInt8) -> Int64:
    """Return the blocks of the size of a cuBLAS workspace on Hopper, which tensors have, too, that are one.

    A product allocates it once, next to its result, and cuBLASLt's with it. So they are workspaces if they
    stay, and each other call of their stack allocated all but them. Autograd's thread has its own, without
    Python's frames: a later backward allocates all but it. Where only two blocks of this size stay, each
    tells what the other is.
    """
    blocks = trace.allocations
    stays = blocks.freed == len(trace.events)
    kept = stays & (blocks.born >= 0) & ~certain
    large = blocks.bytes == LARGE_WORKSPACE
    workspaces: list[int] = []
    for device in np.unique(blocks.device[kept & large]).tolist():
        here = blocks.device == device
        count = np.count_nonzero(here & large & stays)
        if count > MOST_WORKSPACES[LARGE_WORKSPACE]:
            continue
        of_device = _allocated_once(trace, np.flatnonzero(here & (blocks.born >= 0)), kept)
        of_device += _of_first_backward(trace, np.flatnonzero(here & kept & (blocks.stack < 0)), phase)
        candidates = np.flatnonzero(here & kept & large)
        is_silent = blocks.stack[candidates] < 0
        if (
            np.count_nonzero(is_silent) == np.isin(candidates, of_device).sum() == 1
            and len(candidates) == count == 2
        ):
            of_device += [row for row in candidates.tolist() if not _has_native_frames(trace, row)]
        workspaces += of_device
    return np.array(workspaces, np.int64)


def _of_first_backward(trace: MemoryTrace, rows: Int64, phase: UInt8) -> list[int]:
    """Return the workspaces of autograd's thread: a later backward allocates all but them, in the same order.

    Args:
        rows: the blocks of a device that stay and have no stack.
        phase: the phase of each event.
    """
    blocks, events = trace.allocations, trace.events
    born, size = blocks.born[rows], blocks.bytes[rows]
    large = np.flatnonzero(size == LARGE_WORKSPACE)
    if not len(large):
        return []
    is_own = (events.kind == Kind.ALLOC) & (events.device == blocks.device[rows[0]])
    at = np.flatnonzero(is_own & np.isin(phase, (Phase.FORWARD, Phase.BACKWARD)))
    passes = np.split(at, np.flatnonzero(np.diff(phase[at])) + 1)
    passes = [of_pass for of_pass in passes if len(of_pass) and phase[of_pass[0]] == Phase.BACKWARD]
    sizes = {tuple(events.bytes[of_pass].tolist()) for of_pass in passes}
    workspaces: list[int] = []
    for of_pass in passes:
        lt = np.flatnonzero((size == LT_WORKSPACE) & np.isin(born, of_pass))
        for row in large[np.isin(born[large], of_pass)].tolist():
            for left_out in ([row], [row, *lt.tolist()]):
                rest = of_pass[~np.isin(of_pass, born[left_out])]
                if tuple(events.bytes[rest].tolist()) in sizes:
                    workspaces += rows[left_out].tolist()
                    break
    return workspaces


def _allocated_once(trace: MemoryTrace, rows: Int64, kept: Bool) -> list[int]:
    """Return the kept blocks of workspaces that one call of a stack in Python allocated, and no other.

    Args:
        rows: the allocations of a device, in order.
        kept: which of all allocations may be workspaces.
    """
    stack, size = trace.allocations.stack[rows], trace.allocations.bytes[rows]
    fits = kept[rows] & (stack >= 0)
    first = np.flatnonzero(np.diff(stack, prepend=-2))
    length = np.diff(np.append(first, len(rows)))
    once: list[int] = []
    for at in np.flatnonzero(fits & (size == LARGE_WORKSPACE)).tolist():
        call = int(np.searchsorted(first, at, side="right")) - 1
        within = np.arange(first[call], first[call] + length[call])
        extra = within[fits[within] & np.isin(size[within], (LARGE_WORKSPACE, LT_WORKSPACE))]
        same = stack[first] == stack[at]
        same[call] = False
        is_once = same.any() and length[call] == length[same].max() + len(extra)
        if is_once and not _has_native_frames(trace, int(rows[at])):
            once += rows[extra].tolist()
    return once


def _has_native_frames(trace: MemoryTrace, row: int) -> bool:
    return any(not read_frame(text).is_python for text in trace.stack(int(trace.allocations.stack[row])))


def _replaced_state(trace: MemoryTrace, category: UInt8, phase: UInt8, rows: Int64, ends_step: Bool) -> Int64:
    """Return those of the unknown blocks that an optimizer step freed and replaced by new state."""
    blocks = trace.allocations
    old: Int64 = rows[(blocks.born[rows] < 0) & (blocks.freed[rows] < len(phase))]
    old = old[phase[blocks.freed[old]] == Phase.OPTIMIZER]
    if not len(old):
        return old
    device, first = blocks.device[old[0]], int(blocks.freed[old].min())
    step_ends = np.flatnonzero(ends_step & (trace.events.device == device))
    limits = np.concatenate(([-1], step_ends, [len(phase)]))
    after = int(np.searchsorted(limits, first, side="right"))
    begin, end = limits[after - 1], limits[after]
    new = np.flatnonzero(
        (category == Category.OPTIMIZER_STATE)
        & (blocks.device == device)
        & (blocks.born > begin)
        & (blocks.born < end)
    )
    same: Int64 = old if _same_sizes(blocks.bytes[old], blocks.bytes[new]) else old[:0]
    return same


def _with_gradients(trace: MemoryTrace, category: UInt8, phase: UInt8, rows: Int64, device: int) -> Int64:
    """Return those of the unknown blocks that were alive before backward and have one gradient each.

    Blocks already known as parameters are counted, too; otherwise momentum could be taken for parameters.
    """
    blocks = trace.allocations
    gradients = np.flatnonzero((category == Category.GRADIENT) & (blocks.device == device))
    if len(gradients) < FEWEST or not len(rows):
        return rows[:0]
    moment = _most_alive(blocks.born[gradients], blocks.freed[gradients], len(phase))
    gradients = gradients[(blocks.born[gradients] <= moment) & (blocks.freed[gradients] > moment)]
    begun = np.flatnonzero((phase == Phase.BACKWARD) & (trace.events.device == device))
    backward = int(begun[0]) if len(begun) else 0
    parameters = np.flatnonzero((category == Category.PARAMETER) & (blocks.device == device))
    both = np.concatenate((rows, parameters))
    both = both[(blocks.born[both] < backward) & (blocks.freed[both] > moment)]
    both = both[np.isin(blocks.bytes[both], blocks.bytes[gradients])]
    if not _same_sizes(blocks.bytes[both], blocks.bytes[gradients]):
        return rows[:0]
    unknown: Int64 = both[category[both] == Category.UNKNOWN]
    return unknown


def _most_alive(born: Int64, freed: Int64, events: int) -> int:
    """Return the event after which the largest number of the blocks are alive."""
    change = np.bincount(born + 1, minlength=events + 2) - np.bincount(freed + 1, minlength=events + 2)
    return int(np.argmax(np.cumsum(change))) - 1


def _same_sizes(a: Int64, b: Int64) -> bool:
    """Whether two sets of blocks have the same sizes, each equally often."""
    return len(a) == len(b) >= FEWEST and bool(np.array_equal(np.sort(a), np.sort(b)))
