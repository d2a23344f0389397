"""Advice: gradients that stay allocated while the next forward runs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.steps import HighestStep, step_on, stretch_on
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import Bool, Int64

LEAST_SHARE = 0.01
"""Least share of the peak that the gradients must cost for a finding."""

SHOWN_GRADIENTS = 5

FREED_LATE = "freed after forward"
NEVER_FREED = "zeroed in place and never freed"
NOT_FREED_YET = "not freed by the end of the recording"

TRIED = 8
"""How many steps are examined: those with the highest peaks."""


def kept_gradients(judged: Judged) -> Result:
    """Find gradients that are alive in an optimizer step and still at the peak of the next forward.

    Gradients that are freed between an optimizer step and the next forward are as they should be, even if
    several backward passes accumulate into them. The finding's bytes are by how much the step's peak falls
    if the gradients are freed there. They are a lower bound: each gradient counts as allocated again from
    the first backward node of its module on. If the trace does not separate steps, a step is the time from
    one optimizer step to the next.
    """
    trace, device = judged.trace, judged.device
    gaps = _Gaps.of(trace, device)
    blocks = trace.allocations
    gradient = np.flatnonzero((blocks.category == Category.GRADIENT) & (blocks.device == device))
    if not len(gradient):
        return NotJudged("The recording does not tell gradients apart from other memory.")
    if not len(gaps.begin):
        return _without_spans(judged, gradient)
    named = blocks.label[gradient] >= 0
    if named.any():  # blocks without a name are no parameter's gradient: LBFGS keeps copies, for example
        gradient = gradient[named]
    first, behind = _kept(trace, gradient, gaps)
    count = len(gaps.end) + 1
    began, ended = np.bincount(first, minlength=count), np.bincount(behind, minlength=count)
    tried = np.flatnonzero(np.cumsum(began - ended)[:-1])
    if not len(tried):
        return Fine("Every gradient was freed between the optimizer step and the next forward.")
    peaks = [gaps.step(trace, device, gap).peak_bytes for gap in tried.tolist()]
    tried = tried[np.argsort(-np.array(peaks), kind="stable")[:TRIED]]
    best = max(
        (
            _Cost.of(trace, device, gradient[(first <= gap) & (gap < behind)], gaps, gap)
            for gap in tried.tolist()
        ),
        key=lambda cost: (cost.bytes, cost.kept_bytes),
    )
    if best.bytes < LEAST_SHARE * best.step.peak_bytes:
        return Fine(
            f"{size_text(best.kept_bytes)} of gradients stay allocated during forward, but the peak is "
            f"elsewhere: without them it would be only {size_text(best.bytes)} lower."
        )
    return _finding(trace, device, best)


def _without_spans(judged: Judged, gradient: Int64) -> Result:
    """Find gradients that are alive in a forward after the backward that allocated them.

    This judges recordings without spans of phases, such as snapshots, by the phases of their blocks. A
    gradient is needed again when the next backward allocates a block of its size, which it adds to it: the
    second of a size with the second block. One that the next backward adds to without an optimizer step in
    between is summed up on purpose: where steps allocate, they show it; else a gradient that is freed between
    two backwards, but not before the next one.
    """
    trace, device, step = judged.trace, judged.device, judged.step
    blocks = trace.allocations
    own = (blocks.device == device) & (blocks.born >= 0)
    backward = np.flatnonzero(own & (blocks.phase == Phase.BACKWARD))
    forward = blocks.born[own & (blocks.phase == Phase.FORWARD)]
    begun = np.searchsorted(blocks.born[backward], forward)
    firsts = forward[np.append(True, begun[1:] != begun[:-1])[: len(forward)]]
    lasts = forward[np.append(begun[1:] != begun[:-1], True)[: len(forward)]]
    end = len(trace.events) + 1
    begins = np.append(blocks.born[backward], end)
    spans = trace.phases.start_ns[trace.phases.phase == Phase.OPTIMIZER]
    updates = np.append(
        blocks.born[own & (blocks.phase == Phase.OPTIMIZER)], np.searchsorted(trace.events.time_ns, spans)
    )
    updates = np.append(np.sort(updates), end)
    births = np.append(np.sort(blocks.bytes[backward] * end + blocks.born[backward]), np.iinfo(np.int64).max)
    kept, gone, back = [gradient[:0]], [gradient[:0]], [gradient[:0]]
    at_peak = gradient[:0]
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        alive = blocks.alive_at(last, device)
        rows = alive[(blocks.category[alive] == Category.GRADIENT) & (blocks.born[alive] < first)]
        rows = rows[_is_kept(trace, rows, first, begins, updates)]
        rows = rows[np.argsort(blocks.bytes[rows], kind="stable")]
        size = blocks.bytes[rows]
        begin, behind = np.searchsorted(births, np.stack((size * end + last, (size + 1) * end)), side="right")
        nth = begin + np.arange(len(rows)) - np.searchsorted(size, size)
        again = np.where(behind > begin, births[np.minimum(nth, behind - 1)] % end, end - 1)
        kept.append(rows)
        gone.append(np.full(len(rows), first))
        back.append(np.minimum(again, blocks.freed[rows]))
        if first <= step.peak_event:
            at_peak = rows
    if not len(firsts) or (firsts[-1] < begins[0] and not len(np.concatenate(kept))):
        return NotJudged("This rule needs a backward, and a forward after it, in one recording.")
    sizes_kept = blocks.bytes[np.concatenate(kept)]
    saved = step.saved(sizes_kept, np.concatenate(gone), np.concatenate(back))
    if saved < LEAST_SHARE * step.peak_bytes:
        return Fine(f"Gradients that are alive in forward raise the peak by only {size_text(saved)}.")
    fate = NEVER_FREED if len(backward) else NOT_FREED_YET
    if (blocks.freed[at_peak] < len(trace.events)).any():
        fate = FREED_LATE
    cost = _Cost(step, at_peak, int(blocks.bytes[at_peak].sum()), saved, fate)
    return replace(
        _finding(trace, device, cost),
        level="option",
        price="none, unless you accumulate gradients on purpose",
    )


def _is_kept(trace: MemoryTrace, rows: Int64, first: int, begins: Int64, updates: Int64) -> Bool:
    """Return which gradients (rows) that are alive in a forward are not summed up on purpose.

    Args:
        begins: the births of all blocks of backward, ascending, and an event after all others.
        updates: those of optimizer steps, and where steps are known to begin.
    """
    behind = np.searchsorted(begins, first)
    if behind and int(updates[np.searchsorted(updates, begins[behind - 1])]) < first:
        return np.ones(len(rows), bool)
    freed = trace.allocations.freed[rows]
    never = (freed > begins[-2:].min()) & (len(updates) == 1)
    kept: Bool = (freed <= begins[behind]) | never
    return kept


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The gaps from each optimizer step to the peak of the next forward: event indices, int64 (n,).

    Attributes:
        optimizer: the first event of the optimizer step.
        begin: the first event after the optimizer step.
        forward: the first event of the forward.
        end: the event after that forward's peak. The phase goes on until backward, but a gradient that is
            freed after the peak does not raise it.
    """

    optimizer: Int64
    begin: Int64
    forward: Int64
    end: Int64

    @classmethod
    def of(cls, trace: MemoryTrace, device: int) -> _Gaps:
        phases = trace.phases
        updates = np.flatnonzero(phases.phase == Phase.OPTIMIZER)
        forwards = np.flatnonzero(phases.phase == Phase.FORWARD)
        following = np.searchsorted(phases.start_ns[forwards], phases.end_ns[updates], side="left")
        has_forward = following < len(forwards)
        updates, forwards = updates[has_forward], forwards[following[has_forward]]
        last = np.append(forwards[1:] != forwards[:-1], True)[: len(forwards)]  # last update before forward
        time = trace.events.time_ns
        last &= phases.start_ns[forwards] <= time.max(initial=-1)
        updates, forwards = updates[last], forwards[last]
        forward = np.searchsorted(time, phases.start_ns[forwards], side="left")
        behind = np.searchsorted(time, phases.end_ns[forwards], side="right")
        spans = zip(forward.tolist(), np.maximum(behind, forward + 1).tolist(), strict=True)
        level = trace.live(device)
        highest = [begin + int(np.argmax(level[begin + 1 : end + 1])) for begin, end in spans]
        end = np.array(highest, np.int64) + 1
        return cls(
            np.searchsorted(time, phases.start_ns[updates], side="left").astype(np.int64),
            np.searchsorted(time, phases.end_ns[updates], side="right").astype(np.int64),
            forward.astype(np.int64),
            end,
        )

    def step(self, trace: MemoryTrace, device: int, gap: int) -> HighestStep:
        """Return the step in which a gap's forward begins; if the trace has one step, up to the next gap."""
        begins = [trace.step_events(row)[0] for row in range(1, len(trace.steps))]
        if begins:
            return step_on(trace, device, bisect_right(begins, int(self.forward[gap])))
        ends = (*self.begin[1:].tolist(), len(trace.events))
        return stretch_on(trace, device, 0, int(self.begin[gap]), ends[gap])


def _kept(trace: MemoryTrace, rows: Int64, gaps: _Gaps) -> tuple[Int64, Int64]:
    """Return the gaps first to behind, behind excluded, that each gradient (row) outlives.

    A gradient that is freed between an optimizer step and its next forward gets none: it was kept to
    accumulate in it.
    """
    born, freed = trace.allocations.born[rows], trace.allocations.freed[rows]
    first = np.searchsorted(gaps.optimizer, born, side="right").astype(np.int64)
    behind = np.searchsorted(gaps.end, freed, side="right").astype(np.int64)
    last = np.searchsorted(gaps.begin, freed, side="right") - 1
    freed_in_gap = (last >= 0) & (freed < gaps.forward[last])
    return first, np.where(freed_in_gap, first, np.maximum(behind, first))


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of the gradients kept in one gap: without them, the step's peak is `bytes` lower."""

    step: HighestStep
    rows: Int64
    kept_bytes: int
    bytes: int
    fate: str
    """What happened to them: FREED_LATE, NEVER_FREED or NOT_FREED_YET."""

    @classmethod
    def of(cls, trace: MemoryTrace, device: int, rows: Int64, gaps: _Gaps, gap: int) -> _Cost:
        blocks = trace.allocations
        step = gaps.step(trace, device, gap)
        back = np.minimum(_needed_again(trace, rows, int(gaps.end[gap]) - 1), blocks.freed[rows])
        saved = step.saved(blocks.bytes[rows], np.full(len(rows), gaps.begin[gap]), back)
        kept_bytes = int(blocks.bytes[rows].sum())
        return cls(step, rows, kept_bytes, saved, _fate(trace, rows, int(gaps.end[gap])))


def _fate(trace: MemoryTrace, rows: Int64, end: int) -> str:
    """Return what happens to gradients after event `end`; not known if no backward follows it."""
    if not (trace.allocations.freed[rows] == len(trace.events)).all():
        return FREED_LATE
    phases = trace.phases
    began = phases.start_ns[phases.phase == Phase.BACKWARD]
    return NEVER_FREED if (began >= trace.events.time_ns[end - 1]).any() else NOT_FREED_YET


def _needed_again(trace: MemoryTrace, rows: Int64, after: int) -> Int64:
    """Return the first event, after event `after`, of the backward of each gradient's module.

    If the module has no backward call there, it is the first event of the whole backward.
    """
    time, calls = trace.events.time_ns, trace.calls
    since = int(time[after])
    later = (calls.start_ns >= since) & (calls.phase == Phase.BACKWARD)
    begun = np.full(len(trace.modules) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begun, calls.name[later], calls.start_ns[later])
    phases = trace.phases
    backward = phases.start_ns[(phases.phase == Phase.BACKWARD) & (phases.start_ns >= since)]
    at_once = int(backward.min()) if len(backward) else np.iinfo(np.int64).max
    own = begun[trace.allocations.module[rows]]
    begin = np.where(own == np.iinfo(np.int64).max, at_once, own)
    return np.searchsorted(time, begin, side="left").astype(np.int64)


def _finding(trace: MemoryTrace, device: int, cost: _Cost) -> Finding:
    step, several = cost.step, len(trace.steps) > 1
    title = (
        "Gradients of the previous step are freed only after forward, which does not need them."
        if cost.fate == FREED_LATE
        else "Gradients stay allocated during forward, which does not need them."
    )
    where = Where("allocations", (("step", str(step.number)), ("search", "gradient"), ("listed", "lifetime")))
    return Finding(
        kind="kept_gradients",
        level="problem",
        device=trace.devices[device].name,
        step=step.number,
        title=title,
        subject="",
        bytes=cost.bytes,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=(
            Evidence(
                "gradients alive during forward", cost.kept_bytes, f"{len(cost.rows):,}, {cost.fate}", False
            ),
            Evidence(
                f"peak of step {step.number}" if several else "peak between two optimizer steps",
                step.peak_bytes,
                "as recorded",
                False,
            ),
            Evidence("the same peak without them", step.peak_bytes - cost.bytes, "at most", False),
            *_largest(trace, cost.rows),
        ),
        where=where,
        what_to_do=(
            "Call optimizer.zero_grad() right after optimizer.step(), with set_to_none=True (the default). "
            "This frees the gradients until the next backward allocates them again."
        ),
    )


def _largest(trace: MemoryTrace, rows: Int64) -> list[Evidence]:
    blocks = trace.allocations
    largest = rows[np.argsort(-blocks.bytes[rows], kind="stable")][:SHOWN_GRADIENTS]
    named = [row for row in largest.tolist() if blocks.label[row] >= 0]
    return [Evidence(trace.labels[blocks.label[row]], int(blocks.bytes[row]), "one of them") for row in named]
