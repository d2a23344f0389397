"""Advice: gradients that stay allocated while the next forward runs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, in_words
from tb_memplugin.analysis.highest_step import HighestStep, step_on, stretch_on
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import Int64

LEAST_SHARE = 0.01
"""Of the peak that the gradients cost: less is not worth a change."""

SHOWN_GRADIENTS = 5

FREED_LATE = "freed after forward"
NEVER_FREED = "zeroed in place and never freed"
NOT_FREED_YET = "not freed by the end of the recording"

TRIED = 8
"""Steps looked at: those with the highest peaks."""


def kept_gradients(trace: MemoryTrace, device: int) -> Result:
    """Gradients that were alive in an optimizer step and still are when the forward after it has ended.

    Gradients that are freed between an optimizer step and the next forward are as they should be, also
    where several backward passes add up in them. Its bytes are what the step's peak loses if they are
    freed there: a lower bound, for each counts as back from its module's first node in backward on.
    Where no steps are told apart, a step goes from one optimizer step to the next.
    """
    gaps = _Gaps.of(trace, device)
    blocks = trace.allocations
    gradient = np.flatnonzero((blocks.category == Category.GRADIENT) & (blocks.device == device))
    if not len(gaps.begin):
        return NotJudged("It needs an optimizer step and a forward after it in one recording.")
    if not len(gradient):
        return NotJudged("The recording tells no gradient from other memory.")
    named = blocks.label[gradient] >= 0
    if named.any():  # the others are no parameter's: LBFGS, say, keeps what it makes of gradients
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
            f"{in_words(best.kept_bytes)} of gradients stay alive in forward, but the peak is elsewhere: "
            f"without them it would be {in_words(best.bytes)} lower."
        )
    return _finding(trace, device, best)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """From each optimizer step to the end of the next stretch of forward: event indices, int64 (n,).

    Attributes:
        optimizer: the optimizer step's first event.
        begin: the first event behind it.
        forward: the first event of the forward.
        end: the event behind that forward's highest moment: what comes after it, up to backward, counts
            as forward too, but what is freed there was in nobody's way.
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
        known = following < len(forwards)
        updates, forwards = updates[known], forwards[following[known]]
        last = np.append(forwards[1:] != forwards[:-1], True)[: len(forwards)]  # of several optimizers
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
        """The step in which a gap's forward begins; in a trace of one, what lies up to the next gap."""
        begins = [trace.step_events(row)[0] for row in range(1, len(trace.steps))]
        if begins:
            return step_on(trace, device, bisect_right(begins, int(self.forward[gap])))
        ends = (*self.begin[1:].tolist(), len(trace.events))
        return stretch_on(trace, device, 0, int(self.begin[gap]), ends[gap])


def _kept(trace: MemoryTrace, rows: Int64, gaps: _Gaps) -> tuple[Int64, Int64]:
    """The gaps first..behind, half-open, through which each gradient (row) lives on.

    One that is freed between some optimizer step and its forward was summed up on purpose: none.
    """
    born, freed = trace.allocations.born[rows], trace.allocations.freed[rows]
    first = np.searchsorted(gaps.optimizer, born, side="right").astype(np.int64)
    behind = np.searchsorted(gaps.end, freed, side="right").astype(np.int64)
    last = np.searchsorted(gaps.begin, freed, side="right") - 1
    let_go = (last >= 0) & (freed < gaps.forward[last])
    return first, np.where(let_go, first, np.maximum(behind, first))


@dataclass(frozen=True, slots=True)
class _Cost:
    """What the gradients kept in one gap cost: the step's peak is `bytes` lower without them."""

    step: HighestStep
    rows: Int64
    kept_bytes: int
    bytes: int
    fate: str
    """How they went on: freed after forward, or never, as far as the recording tells."""

    @classmethod
    def of(cls, trace: MemoryTrace, device: int, rows: Int64, gaps: _Gaps, gap: int) -> _Cost:
        blocks = trace.allocations
        step = gaps.step(trace, device, gap)
        back = np.minimum(_needed_again(trace, rows, int(gaps.end[gap]) - 1), blocks.freed[rows])
        lower = step.without(blocks.bytes[rows], np.full(len(rows), gaps.begin[gap]), back)
        kept = int(blocks.bytes[rows].sum())
        return cls(
            step, rows, kept, step.peak_bytes - int(lower.max()), _fate(trace, rows, int(gaps.end[gap]))
        )


def _fate(trace: MemoryTrace, rows: Int64, end: int) -> str:
    """What becomes of gradients behind a forward's end; not known where no backward comes there."""
    if not (trace.allocations.freed[rows] == len(trace.events)).all():
        return FREED_LATE
    phases = trace.phases
    began = phases.start_ns[phases.phase == Phase.BACKWARD]
    return NEVER_FREED if (began >= trace.events.time_ns[end - 1]).any() else NOT_FREED_YET


def _needed_again(trace: MemoryTrace, rows: Int64, after: int) -> Int64:
    """The event at which each gradient's module, else all of backward, begins behind an event."""
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
        "Gradients of the step before are freed only after forward, where nothing needs them."
        if cost.fate == FREED_LATE
        else "Gradients stay allocated through forward, where nothing needs them."
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
                "gradients alive through forward", cost.kept_bytes, f"{len(cost.rows):,}, {cost.fate}", False
            ),
            Evidence(
                f"peak of step {step.number}" if several else "peak between two optimizer steps",
                step.peak_bytes,
                "as recorded",
                False,
            ),
            Evidence("the same, without them", step.peak_bytes - cost.bytes, "at most", False),
            *_largest(trace, cost.rows),
        ),
        where=where,
        what_to_do="Call optimizer.zero_grad() right after optimizer.step(), and leave set_to_none at its "
        "default, True: then gradients give their memory back until backward makes them anew.",
    )


def _largest(trace: MemoryTrace, rows: Int64) -> list[Evidence]:
    blocks = trace.allocations
    largest = rows[np.argsort(-blocks.bytes[rows], kind="stable")][:SHOWN_GRADIENTS]
    named = [row for row in largest.tolist() if blocks.label[row] >= 0]
    return [Evidence(trace.labels[blocks.label[row]], int(blocks.bytes[row]), "one of them") for row in named]
