"""Suspected leaks: memory that one site in the code allocates step after step and that is not freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.source_lines import NO_STACK
from tb_memplugin.analysis.sums import groups, levels_of_groups, sums
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.frames import MODULE_CALL
from tb_memplugin.trace.labels import HELD_BY, HELD_BY_A_LOCAL, IN_CYCLE, any_element
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import NO_OPERATOR, NOT_NAMED, Int64

FEWEST_STEPS = 3
"""Fewer whole steps are no evidence: warm-up fills caches in the first, and the last may not have ended."""

LONGEST_CYCLE = 4
"""The most steps that an iteration may consist of, as with several optimizers or accumulated gradients."""

MODELS_OWN = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE)
"""Categories of the model's own memory, which `kept_sites` leaves out."""

STEP_ANNOTATIONS = ("ProfilerStep#", "Optimizer.step#")
"""Beginnings of the annotations that occur once per step, in order of preference."""


@dataclass(frozen=True, slots=True)
class Leak(AnalysisResult):
    """One site whose blocks pile up. It is only suspected: a queue or cache that still fills looks the same.

    Attributes:
        key: the stack, innermost frame first, one frame per line; without a stack, module and operator.
        frames: the stack's frames, innermost first; empty without a stack.
        bytes_per_step: bytes allocated in a step and kept, the mean over all steps examined, rounded down.
        slope_bytes: least-squares rise of the site's live bytes, per step.
        bytes, blocks: allocated in the steps in which it grew, and alive at the end of the last step.
        steps: in how many steps the site grew and kept what was added.
        of_steps: how many whole steps were examined.
        first_event: the first event of the first step in which it grew.
        is_replaced: whether each step replaced what the previous one had left by something larger. Then
            `bytes` is by how much the site grew, without the first step if the site was empty before it.
    """

    key: str
    frames: tuple[str, ...]
    bytes_per_step: int
    slope_bytes: float
    bytes: int
    blocks: int
    steps: int
    of_steps: int
    first_event: int
    is_replaced: bool = False


def leaks(trace: MemoryTrace, device: int, annotation: str | None = None) -> ResultTable[Leak]:
    """Return the sites that grew in at least three of four steps, or in a cycle; largest first.

    The steps are those of the profile if it has three or more. Otherwise a step goes from one START of a
    repeating annotation, or of the optimizer's phase, to the next; without these, from one call of the model
    to the next (`call_bounds`). Fewer than three steps give no result.

    A site grew in a step if blocks allocated in the step are alive at the end of the last step, and the
    site's live bytes rose from the step's start to its end. Memory that is replaced in each step, or filled
    once, is no leak, nor are blocks in whose place older ones of their size are freed in each step. Memory
    that is replaced by something larger is a leak if that happens in every one of four or more steps since
    the first time, by amounts within a factor of two, and the other sites do not allocate more in each step
    as well; between calls it is none, because caches of generated tokens grow like that.

    What grows in each iteration grows only in some steps if an iteration has several, as with two optimizers
    of one class. So where annotations or phases mark the steps, a site is a leak too if the steps in which
    it grew repeat every k = 2, 3 or 4 steps, at least three times. If all leaks are like that, the result
    counts k steps as one, for the smallest k.

    Args:
        annotation: what the name of the annotation that starts a step begins with; None tries the steps of
            the profile, then `STEP_ANNOTATIONS`, then the optimizer's phases.
    """
    marked = _marked_bounds(trace, device, annotation)
    bounds = marked if len(marked) or annotation is not None else call_bounds(trace, device)
    if len(bounds) <= FEWEST_STEPS:
        return ResultTable()
    blocks = trace.allocations
    rows = blocks.alive_between(bounds[0], bounds[-1], device)
    rows = rows[~_passed_on(trace, rows, device, bounds)]
    site = _sites(trace, rows)
    first, site_of = groups(site, int(site.max(initial=0)) + 1)
    sites = site[first]
    level = _levels_at(trace, rows, site_of, len(sites), bounds)
    kept, count = _kept(trace, rows, site_of, len(sites), bounds)
    rise = np.diff(level, axis=1)
    grew = (kept > 0) & (rise > 0)
    often = 4 * np.count_nonzero(grew, axis=1) >= 3 * (len(bounds) - 1)
    replaced = _grows_evenly(rise) & ~often & (len(marked) > 0)
    if replaced.any() and (np.diff(_born(trace, rows[~replaced[site_of]], bounds)) > 0).all():
        replaced[:] = False  # the batches grow, and everything computed from them grows with them
    grew[replaced] = (rise > 0)[replaced] & (level[:, :-1] > 0)[replaced]
    gained = np.where(grew, np.where(replaced[:, None], rise, kept), 0)
    is_profile = annotation is None and len(trace.steps) >= FEWEST_STEPS
    cycles = np.where(often | replaced, 1, 0 if is_profile else _cycles(grew))
    cycle = int(cycles[cycles > 0].min(initial=LONGEST_CYCLE))
    growing = [
        _leak(
            trace,
            int(sites[row]),
            bounds,
            level[row],
            gained[row],
            np.where(grew[row], count[row], 0),
            cycle,
            is_replaced=bool(replaced[row]),
        )
        for row in np.flatnonzero(cycles).tolist()
    ]
    return ResultTable(sorted(growing, key=lambda leak: (-leak.bytes, leak.key)))


def kept_sites(trace: MemoryTrace, device: int, before: int) -> list[tuple[str, tuple[str, ...], int]]:
    """Return (key, frames, bytes) of each site with blocks that live to the trace's end.

    Only blocks allocated in the window before event `before` count, without the categories in `MODELS_OWN`.
    See `Leak` for key and frames.
    """
    blocks = trace.allocations
    stays = (blocks.device == device) & (blocks.freed >= len(trace.events))
    stays &= (blocks.born >= 0) & (blocks.born < before) & ~np.isin(blocks.category, MODELS_OWN)
    rows = np.flatnonzero(stays)
    sites, site_of = np.unique(_sites(trace, rows), return_inverse=True)
    size = sums(site_of.astype(np.int64), blocks.bytes[rows], len(sites))
    totals = zip(sites.tolist(), size.tolist(), strict=True)
    return [(*_key(trace, number), total) for number, total in totals]


def holder(trace: MemoryTrace, device: int, keys: Collection[str]) -> str:
    """Return what holds most of the memory that some sites keep to the trace's end: `train.losses[*]`.

    The elements of a list or dictionary are one. It is "" where nothing that is known holds half of it.
    """
    blocks = trace.allocations
    rows = np.flatnonzero(
        (blocks.device == device) & (blocks.born >= 0) & (blocks.freed >= len(trace.events))
    )
    sites = _sites(trace, rows)
    rows = rows[np.isin(sites, [site for site in np.unique(sites).tolist() if _key(trace, site)[0] in keys])]
    held: Counter[str] = Counter()
    for row, label in zip(rows.tolist(), blocks.label[rows].tolist(), strict=True):
        held[any_element(trace.labels[label]) if label >= 0 else ""] += int(blocks.bytes[row])
    name, size = max(held.items(), key=lambda item: item[1], default=("", 0))
    known = name.startswith(HELD_BY) and not name.startswith((IN_CYCLE, HELD_BY_A_LOCAL))
    return name.removeprefix(HELD_BY).removeprefix("__main__.") if known and 2 * size >= held.total() else ""


def step_bounds(trace: MemoryTrace, device: int) -> Int64:
    """Return where whole steps begin and end: int64, shape (steps + 1,), ascending; empty without steps.

    Step i holds the events bounds[i] <= e < bounds[i + 1]. Steps without an event of this device are left
    out: the device's ring buffer may begin later than another's, and end earlier. If nothing marks steps, a
    step is a call of the model: see `call_bounds`.
    """
    marked = _marked_bounds(trace, device, None)
    return marked if len(marked) else call_bounds(trace, device)


def _marked_bounds(trace: MemoryTrace, device: int, annotation: str | None) -> Int64:
    if annotation is None and len(trace.steps) >= FEWEST_STEPS:
        first = [trace.step_events(row)[0] for row in range(len(trace.steps))]
        return _own_bounds(trace, device, np.array([*first, len(trace.events)], np.int64))
    start_ns = _annotation_starts(trace, device, annotation)
    if start_ns is None and annotation is None:
        start_ns = trace.phases.start_ns[trace.phases.phase == Phase.OPTIMIZER]
    if start_ns is None or len(start_ns) <= FEWEST_STEPS:
        return np.empty(0, np.int64)
    return _own_bounds(trace, device, np.searchsorted(trace.events.time_ns, start_ns, side="left"))


def _annotation_starts(trace: MemoryTrace, device: int, annotation: str | None) -> Int64 | None:
    """Return when the steps that annotations mark begin, epoch nanoseconds; None if there are too few."""
    annotations = trace.annotations
    for beginning in STEP_ANNOTATIONS if annotation is None else (annotation,):
        rows = [row for row, name in enumerate(trace.annotation_names) if name.startswith(beginning)]
        # Several optimizers take turns within one step, so each optimizer's annotation is tried alone.
        groups = [rows] if beginning.endswith("Step#") and annotation is None else [[row] for row in rows]
        for group in groups:
            is_start = (annotations.ends == 0) & np.isin(annotations.name, group)
            count = np.bincount(annotations.device[is_start], minlength=len(trace.devices))
            source = device if count[device] else count.argmax()  # one device only: each may have all steps
            if count[source] > FEWEST_STEPS:
                starts: Int64 = annotations.time_ns[is_start & (annotations.device == source)]
                return starts
    return None


def _own_bounds(trace: MemoryTrace, device: int, bounds: npt.NDArray[np.signedinteger]) -> Int64:
    """Move each bound to the device's next event, and drop duplicates."""
    own = np.append(np.flatnonzero(trace.events.device == device), len(trace.events))
    return np.unique(own[np.searchsorted(own, bounds)]).astype(np.int64)


def _sites(trace: MemoryTrace, rows: Int64) -> Int64:
    """Return a number for the site of each block: its stack or, without a stack, its module and operator."""
    blocks, stacks, operators = trace.allocations, len(trace.stacks), len(trace.operators) + 1
    stack = blocks.stack[rows].astype(np.int64)
    owner = blocks.module[rows].astype(np.int64) + 1
    site: Int64 = np.where(stack >= 0, stack, stacks + owner * operators + blocks.operator[rows] + 1)
    return site


def _key(trace: MemoryTrace, site: int) -> tuple[str, tuple[str, ...]]:
    """Return the key and the frames of a site, by its number from `_sites`."""
    if site < len(trace.stacks):
        return "\n".join(trace.stacks[site]), trace.stacks[site]
    owner, operator = divmod(site - len(trace.stacks), len(trace.operators) + 1)
    if not owner and not operator:
        return NO_STACK, ()
    module = trace.modules[owner - 1].key if owner else NOT_NAMED
    return f"{module} · {trace.operators[operator - 1] if operator else NO_OPERATOR}", ()


def _levels_at(trace: MemoryTrace, rows: Int64, site: Int64, site_count: int, bounds: Int64) -> Int64:
    """Return the live bytes of each site at each bound: int64, shape (sites, bounds)."""
    blocks = trace.allocations
    enter = np.searchsorted(bounds, blocks.born[rows], side="right")
    leave = np.searchsorted(bounds, blocks.freed[rows], side="right")
    return levels_of_groups(site, blocks.bytes[rows], enter, leave, (site_count, len(bounds)))


def _kept(
    trace: MemoryTrace, rows: Int64, site: Int64, site_count: int, bounds: Int64
) -> tuple[Int64, Int64]:
    """Return the bytes and blocks of each step that are alive at the last bound: int64, (sites, steps)."""
    blocks, steps = trace.allocations, len(bounds) - 1
    stays = (blocks.freed[rows] >= bounds[-1]) & (blocks.born[rows] >= bounds[0])
    step = np.searchsorted(bounds, blocks.born[rows][stays], side="right") - 1
    key = site[stays] * steps + step
    size = sums(key, blocks.bytes[rows][stays], site_count * steps)
    count = np.bincount(key, minlength=site_count * steps)
    return size.reshape(site_count, steps), count.reshape(site_count, steps)


def _passed_on(trace: MemoryTrace, rows: Int64, device: int, bounds: Int64) -> npt.NDArray[np.bool_]:
    """Return which blocks stay in place of older ones: in each step, as many of their size were freed.

    A queue that was full before the first step passes on batches like that. The site of the older ones is
    often not known.
    """
    blocks = trace.allocations
    stays: npt.NDArray[np.bool_] = (blocks.freed[rows] >= bounds[-1]) & (blocks.born[rows] >= bounds[0])
    sizes = np.unique(blocks.bytes[rows[stays]])
    older = (blocks.device == device) & (blocks.born < bounds[0]) & np.isin(blocks.bytes, sizes)
    older &= (blocks.freed >= bounds[0]) & (blocks.freed < bounds[-1])
    added, freed = np.zeros((2, len(sizes), len(bounds) - 1), np.int64)
    for count, of, event in ((added, rows[stays], blocks.born), (freed, np.flatnonzero(older), blocks.freed)):
        step = np.searchsorted(bounds, event[of], side="right") - 1
        np.add.at(count, (np.searchsorted(sizes, blocks.bytes[of]), step), 1)
    stays &= np.isin(blocks.bytes[rows], sizes[(freed >= added).all(axis=1)])
    return stays


def _grows_evenly(rise: Int64) -> npt.NDArray[np.bool_]:
    """Return the sites that rise in every step since they first do, by amounts within a factor of two.

    Random sizes, such as those of batches of sentences, do not rise like that. The first amount does not
    count: on the CPU, torch.profiler does not report what was alive before it started. bool, shape (sites,).
    """
    since = np.maximum.accumulate(rise != 0, axis=1)
    later, amounts = since[:, :-1], rise[:, 1:]
    most = np.where(later, amounts, 0).max(axis=1, initial=0)
    even: npt.NDArray[np.bool_] = (~later | (2 * amounts >= most[:, None])).all(axis=1)
    even &= (rise >= since).all(axis=1) & (later.sum(axis=1) >= FEWEST_STEPS)
    return even


def _cycles(grew: npt.NDArray[np.bool_]) -> Int64:
    """Return after how many steps, 2 to 4, each site grows again: int64, shape (sites,); 0 if it does not.

    Every step must be like the one that many before it.
    """
    cycle = np.zeros(len(grew), np.int64)
    for steps in range(min(LONGEST_CYCLE, grew.shape[1] // FEWEST_STEPS), 1, -1):
        repeats = (grew[:, steps:] == grew[:, :-steps]).all(axis=1) & grew.any(axis=1)
        cycle[repeats] = steps
    return cycle


def _born(trace: MemoryTrace, rows: Int64, bounds: Int64) -> Int64:
    """Return the bytes of some blocks allocated in each step: int64, shape (steps,)."""
    step = np.searchsorted(bounds, trace.allocations.born[rows], side="right") - 1
    in_steps = (step >= 0) & (step < len(bounds) - 1)
    return sums(step[in_steps], trace.allocations.bytes[rows][in_steps], len(bounds) - 1)


def _leak(
    trace: MemoryTrace,
    site: int,
    bounds: Int64,
    level: Int64,
    gained: Int64,
    count: Int64,
    cycle: int,
    *,
    is_replaced: bool,
) -> Leak:
    """Return a leak by its figures in every step; `cycle` steps are counted as one, up to the last step."""
    key, frames = _key(trace, site)
    first = (len(bounds) - 1) % cycle
    bounds, level = bounds[first::cycle], level[first::cycle]
    gained, count = (column[first:].reshape(-1, cycle).sum(axis=1) for column in (gained, count))
    grew = gained > 0
    total, steps = int(gained.sum()), len(bounds) - 1
    return Leak(
        key=key,
        frames=frames,
        bytes_per_step=total // steps,
        slope_bytes=_slope(level[int(np.argmax(grew)) :] if is_replaced else level),
        bytes=total,
        blocks=int(count.sum()),
        steps=int(np.count_nonzero(grew)),
        of_steps=steps,
        first_event=int(bounds[np.argmax(grew)]),
        is_replaced=is_replaced,
    )


def _slope(level: Int64) -> float:
    """Return the slope, per step, of the least-squares line through the levels at the bounds."""
    step = np.arange(len(level)) - (len(level) - 1) / 2
    return float(step @ (level - level[0]) / (step @ step))


FEWEST_CALLS = 4
"""Fewer whole calls are no evidence of a loop."""

FREED_SHARE, OFTEN = 0.5, 0.75
"""Least share of a call's bytes that is freed before the next unless a loss is allocated outside of module
calls, and of the calls of which this holds.

The layers of one forward, whose activations are kept for backward, look like calls that free almost nothing.
"""

LOSS = 8
"""The most bytes of a loss: one element of float64."""


def call_bounds(trace: MemoryTrace, device: int) -> Int64:
    """Return where calls of a model begin, by stacks: int64, shape (calls + 1,), ascending; empty without.

    The model is the outermost module call with most bytes, from one line. Of the stacks, each in one module,
    that allocate more than `FEWEST_CALLS` times in it, the first that does so least often marks its calls.
    """
    blocks = trace.allocations
    rows = np.flatnonzero((blocks.device == device) & (blocks.born >= 0) & (blocks.stack >= 0))
    rows = rows[blocks.category[rows] != Category.WORKSPACE]
    width = len(trace.modules) + 1
    used, at = np.unique(
        blocks.stack[rows].astype(np.int64) * width + blocks.module[rows] + 1, return_inverse=True
    )
    callers: dict[tuple[str, ...], int] = {}
    stacks, of_stack = np.unique(used // width, return_inverse=True)
    by_stack = [callers.setdefault(_caller(trace.stack(row)), len(callers)) for row in stacks.tolist()]
    caller = np.array(by_stack)[of_stack]
    outside = callers.get((), -1)
    if not len(callers) - (outside >= 0):
        return np.empty(0, np.int64)
    total = sums(caller[at], blocks.bytes[rows], len(callers))
    total[outside if outside >= 0 else len(total) :][:1] = 0
    inside = caller[at] == int(np.argmax(total))
    losses = blocks.born[rows[(caller[at] == outside) & (blocks.bytes[rows] <= LOSS)]]
    rows, at = rows[inside], at[inside]
    allocations = np.bincount(at)[at]
    if int(allocations.max()) <= FEWEST_CALLS:
        return np.empty(0, np.int64)
    fewest = int(allocations[allocations > FEWEST_CALLS].min())  # what is not in a loop within the model
    begins = at == at[np.argmax(allocations == fewest)]
    begins[1:] &= ~begins[:-1]  # one operator may allocate several blocks
    bounds: Int64 = blocks.born[rows[begins]].astype(np.int64)
    last = rows[(blocks.born[rows] >= bounds[-2:].min()) & (blocks.born[rows] < bounds[-1])]
    in_loop = _shared_frames(trace, last) > _shared_frames(trace, rows)
    return bounds if not in_loop and _are_steps(trace, rows, bounds, losses) else bounds[:0]


def _shared_frames(trace: MemoryTrace, rows: Int64) -> int:
    """Return how many frames all stacks of some blocks share, from the outermost on.

    The rounds of a loop within a model share its line, which other blocks of the model do not.
    """
    stacks = [trace.stack(row)[::-1] for row in np.unique(trace.allocations.stack[rows]).tolist()]
    return sum(1 for _ in takewhile(lambda frames: len(set(frames)) == 1, zip(*stacks, strict=False)))


def _caller(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames outside of the outermost module call of a stack, () if there is none."""
    calls = [at for at, text in enumerate(stack) if text.startswith(MODULE_CALL)]
    return stack[calls[-1] + 1 :] if calls else ()


def _are_steps(trace: MemoryTrace, rows: Int64, bounds: Int64, losses: Int64) -> bool:
    """Return whether there are enough calls, and most of them free most of what they allocate or have a loss.

    Args:
        losses: the births of what may be losses, ascending.
    """
    count = len(bounds) - 1
    if count < FEWEST_CALLS:
        return False
    blocks = trace.allocations
    call = np.searchsorted(bounds, blocks.born[rows], side="right") - 1
    rows, call = rows[(call >= 0) & (call < count)], call[(call >= 0) & (call < count)]
    size, is_freed = blocks.bytes[rows], blocks.freed[rows] <= bounds[call + 1]
    freed = sums(call[is_freed], size[is_freed], count)
    has_loss = np.diff(np.searchsorted(losses, bounds)) > 0
    return bool(np.mean(has_loss | (freed >= FREED_SHARE * sums(call, size, count))) >= OFTEN)
