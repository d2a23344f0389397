"""Advice: modules whose activations are worth recomputing in backward (activation checkpointing)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, share
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.recomputed_calls import by_stack
from tb_memplugin.analysis.steps import HighestStep, highest_step
from tb_memplugin.analysis.units import Unit, part_text, size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import ROOT, Bool, Int64

LEAST_SHARE = 0.1
"""Least share of the peak that checkpointing must save for a finding."""

NEARLY = 0.9
"""Modules that save this share of the best saving count as equally good; the one with the least forward
time is chosen."""

TRIED = 24
"""How many modules are examined: those that hold the most activations at the peak."""

SHOWN, SHOWN_SHARE = 8, 0.01
"""How many modules are shown, and the least share of the peak that each must save."""


def checkpointing(trace: MemoryTrace, device: int) -> Result:
    """Find the modules whose checkpointing lowers the highest step's peak most; repeated layers count as one.

    The finding's bytes are a lower bound of the saving, see `recompute.Recomputed`. What the checkpoint
    itself keeps besides inputs (random state, 5 KB per call on the CPU) is not counted. Where the modules'
    calls are not recorded, call stacks say which calls keep activations: see `recomputed_calls.by_stack`.
    """
    blocks = trace.allocations
    if not (trace.calls.phase == Phase.FORWARD).any() or not (trace.calls.phase == Phase.BACKWARD).any():
        return by_stack(trace, device, LEAST_SHARE)
    if not ((blocks.category == Category.ACTIVATION) & (blocks.device == device)).any():
        return NotJudged("The recording does not tell activations apart from other memory.")
    step = highest_step(trace, device)
    activations = Activations(trace, device, step)
    groups = _groups(trace, activations.own_bytes(step.peak_event))
    estimates = [(name, activations.recomputed(rows)) for name, rows in groups]
    most = max((estimate.saved_bytes for _, estimate in estimates), default=0)
    if most <= 0:
        return Fine(f"There is no module whose recomputation would lower the peak of step {step.number}.")
    if most < LEAST_SHARE * step.peak_bytes:
        return Fine(
            f"Recomputing one module would lower the peak of step {step.number} by at most {size_text(most)} "
            f"({share(most, step.peak_bytes)})."
        )
    good = [(name, estimate) for name, estimate in estimates if estimate.saved_bytes >= NEARLY * most]
    name, best = min(good, key=lambda item: (item[1].forward_ns, -item[1].saved_bytes, item[0]))
    least = max(SHOWN_SHARE * step.peak_bytes, 1)
    shown = [(name, estimate) for name, estimate in estimates if estimate.saved_bytes >= least]
    shown.sort(key=lambda item: (-item[1].saved_bytes, item[1].forward_ns))
    calls = f"{best.calls:,} calls" if best.calls > 1 else "one call"
    rates = Unit.for_bytes(_per_ms(estimate) for _, estimate in shown)
    return Finding(
        kind="checkpointing",
        level="option",
        device=trace.devices[device].name,
        step=step.number,
        title=f"Recompute {name or ROOT} in backward instead of keeping its activations ({calls} per step).",
        subject=name or ROOT,
        bytes=best.saved_bytes,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=tuple(
            _evidence(name, estimate, step.number, rates, most) for name, estimate in shown[:SHOWN]
        ),
        where=_where(name, step.number),
        what_to_do="Call it through torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).",
        price=f"one more forward of it: {_ms(best)} per step",
    )


def _groups(trace: MemoryTrace, own: Int64) -> list[tuple[str, Int64]]:
    """Return the modules (rows) under each folded name, largest first, submodules included."""
    inclusive = own.copy()
    for row in range(len(trace.modules) - 1, -1, -1):
        if trace.modules[row].parent >= 0:
            inclusive[trace.modules[row].parent] += inclusive[row]
    folded = folds([module.key for module in trace.modules])
    rows: dict[str, list[int]] = {}
    for row, module in enumerate(trace.modules):
        if module.is_module and inclusive[row]:
            rows.setdefault(folded[module.key], []).append(row)
    total = {name: int(inclusive[members].sum()) for name, members in rows.items()}
    largest = sorted(rows, key=lambda name: (-total[name], name))[:TRIED]
    return [(name, np.array(rows[name], np.int64)) for name in largest]


def _per_ms(estimate: Recomputed) -> float:
    """Return the bytes that each millisecond of recomputation saves."""
    return estimate.saved_bytes * 1e6 / max(estimate.forward_ns, 1)


def _evidence(name: str, estimate: Recomputed, step: int, rates: Unit, most: int) -> Evidence:
    calls = f"{estimate.calls:,} {'call' if estimate.calls == 1 else 'calls'}"
    size = part_text(estimate.held_bytes, most)
    per_ms = rates.text(_per_ms(estimate))
    detail = f"{_ms(estimate)} of forward in {calls}; saves {per_ms} per ms; holds {size}"
    return Evidence(name or ROOT, estimate.saved_bytes, detail, where=_where(name, step))


def _where(name: str, step: int) -> Where:
    search = (("find", name),) if name else ()
    return Where("modules", (("step", str(step)), *search, ("sort", "activations")))


def _ms(estimate: Recomputed) -> str:
    return f"{estimate.forward_ns / 1e6:,.2f} ms"


_INPUTS_LOOKED_AT = 4
"""How many of the newest blocks before a call are searched for its input."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Some modules, and the effect of checkpointing each of their calls in a step. Bytes, nanoseconds.

    Attributes:
        rows: int64, the modules' rows in `trace.modules`.
        calls: forward calls in the step whose backward is in the step too.
        peak_bytes: upper bound of the step's peak with checkpointing.
        saved_bytes: the step's peak minus `peak_bytes`.
        held_bytes: what the calls keep for their backward, without their outputs.
        forward_ns: time of these calls, which recomputation spends again.
    """

    rows: Int64
    calls: int
    peak_bytes: int
    saved_bytes: int
    held_bytes: int
    forward_ns: int


class Activations:
    """A step's activations and module calls, from which `recomputed` estimates checkpointing.

    Args:
        trace: any trace; without module calls and phases nothing is ever saved.
        device: row in `trace.devices`.
        step: the step.
    """

    def __init__(self, trace: MemoryTrace, device: int, step: HighestStep) -> None:
        self._trace, self._step = trace, step
        blocks = trace.allocations
        born = slice(*np.searchsorted(blocks.born, (step.first, step.end)))
        own = (blocks.device[born] == device) & (blocks.category[born] == Category.ACTIVATION)
        rows = np.flatnonzero(own) + born.start
        self._born, self._freed, self._bytes = blocks.born[rows], blocks.freed[rows], blocks.bytes[rows]
        self._module, self._operator = blocks.module[rows], blocks.operator[rows]
        time = trace.events.time_ns
        began = int(time[step.first]) if step.end > step.first else 0
        ended = int(time[step.end - 1]) if step.end > step.first else 0
        self._calls = np.flatnonzero(
            (trace.calls.start_ns >= began - _slack(trace, step)) & (trace.calls.start_ns <= ended)
        )

    def own_bytes(self, event: int) -> Int64:
        """Return each module's activation bytes after an event, without submodules: int64, (modules,)."""
        total = np.zeros(len(self._trace.modules) + 1, np.int64)
        alive = (self._born <= event) & (self._freed > event)
        np.add.at(total, self._module[alive], self._bytes[alive])
        return total[:-1]

    def recomputed(self, rows: Int64) -> Recomputed:
        """Estimate the effect of checkpointing these modules.

        A checkpointed call does not keep the activations that were allocated in it and live from its end
        until its own backward begins, except its output: the largest block of its last operator. While the
        call runs, everything counts as held. Its input is kept until its backward. When that begins, the
        level rises as far as it did during the forward, and then everything that the call held is back.
        """
        inner = _inside(self._trace, rows)
        calls = self._with_backward(inner)
        if not len(calls.start):
            return Recomputed(rows, 0, self._step.peak_bytes, 0, 0, 0)
        block, call = self._held_by(inner, calls)
        lower = self._step.without(self._bytes[block], calls.end[call] + 1, calls.back[call])
        lower = lower + self._inputs(calls)
        again = self._again(calls, lower)
        peak = max(int(lower.max()), int(again.max()))
        held_bytes = int(self._bytes[block].sum())
        spent = int(calls.spent_ns.sum())
        return Recomputed(rows, len(calls.start), peak, self._step.peak_bytes - peak, held_bytes, spent)

    def _with_backward(self, inner: Int64) -> _Calls:
        """Return the forward calls of the outermost chosen modules that have a backward in the step."""
        spans, time = self._trace.calls, self._trace.events.time_ns
        own = np.append(inner, -1)[spans.name[self._calls]]
        forward = self._calls[(own == spans.name[self._calls]) & (spans.phase[self._calls] == Phase.FORWARD)]
        backward = self._calls[(own >= 0) & (spans.phase[self._calls] == Phase.BACKWARD)]
        owner = inner[spans.name[backward]]
        order = np.lexsort((spans.start_ns[backward], owner))
        begins, owner = spans.start_ns[backward][order], owner[order]
        module, end_ns = spans.name[forward].astype(np.int64), spans.end_ns[forward]
        following = _nearest(owner, begins, module, end_ns, later=True)
        forward, back = forward[following >= 0], begins[following[following >= 0]]
        order = np.argsort(spans.start_ns[forward], kind="stable")
        forward, back = forward[order], back[order]
        return _Calls(
            spans.name[forward].astype(np.int64),
            np.searchsorted(time, spans.start_ns[forward], side="left").astype(np.int64),
            np.searchsorted(time, spans.end_ns[forward], side="right").astype(np.int64),
            np.searchsorted(time, back, side="left").astype(np.int64),
            spans.end_ns[forward] - spans.start_ns[forward],
        )

    def _held_by(self, inner: Int64, calls: _Calls) -> tuple[Int64, Int64]:
        """Return the blocks that calls would not keep if they were checkpointed, and the call of each."""
        owner = np.append(inner, -1)[self._module]
        order = np.lexsort((calls.start, calls.module))
        last = _nearest(calls.module[order], calls.start[order], owner, self._born, later=False)
        call = np.where(last >= 0, np.append(order, -1)[last], -1)
        inside = np.flatnonzero((call >= 0) & (self._born < np.append(calls.end, 0)[call]))
        inside = inside[self._freed[inside] >= calls.end[call[inside]]]  # alive at the call's end
        kept = inside[~self._outputs(inside, call[inside])]
        kept = kept[self._freed[kept] >= calls.back[call[kept]]]
        return kept, call[kept]

    def _outputs(self, block: Int64, call: Int64) -> Bool:
        """Return the mask of the largest block of each call's last operator; blocks in allocation order."""
        order = np.lexsort((block, call))
        block, call = block[order], call[order]
        ends = np.append(np.flatnonzero(call[1:] != call[:-1]), len(call) - 1)[: len(call)]
        last = np.repeat(ends, np.diff(np.concatenate(([-1], ends))))
        other = self._operator[block] != self._operator[block[last]]
        differs = np.maximum.accumulate(np.where(other, np.arange(len(block)), -1))
        final = np.flatnonzero(np.arange(len(block)) > differs[last])
        by_size = final[np.lexsort((self._bytes[block[final]], call[final]))]
        largest = by_size[np.append(call[by_size[1:]] != call[by_size[:-1]], True)[: len(by_size)]]
        mask = np.zeros(len(block), bool)
        mask[order[largest]] = True
        return mask

    def _inputs(self, calls: _Calls) -> Int64:
        """Return what keeping each call's input until its backward adds to the level.

        The input is taken to be the largest of the newest blocks before the call that are alive at its
        start and freed before its backward. An input that lives on until then is kept anyway and adds
        nothing.
        """
        newest = np.searchsorted(self._born, calls.start) - 1
        near = (newest[:, None] - np.arange(_INPUTS_LOOKED_AT)).clip(-1)
        freed, size = np.append(self._freed, -1)[near], np.append(self._bytes, 0)[near]
        is_freed = (freed >= calls.start[:, None]) & (freed < calls.back[:, None])
        call, newest_of = np.arange(len(near)), np.argmax(np.where(is_freed, size, -1), axis=1)
        is_freed, freed, size = is_freed[call, newest_of], freed[call, newest_of], size[call, newest_of]
        without = self._step.without(size[is_freed], freed[is_freed] + 1, calls.back[is_freed])
        added: Int64 = self._step.level - without
        return added

    def _again(self, calls: _Calls, lower: Int64) -> Int64:
        """Return the highest level while each call runs its forward again."""
        level, first = self._step.level, self._step.first
        limit = len(level) - 1
        start, end = (calls.start - first).clip(0, limit), (calls.end - first).clip(0, limit)
        ranges = np.stack((start, end + 1), axis=1).ravel()
        rise = np.maximum.reduceat(np.append(level, 0), ranges)[::2] - level[start]
        again: Int64 = lower[(calls.back - first).clip(0, limit)] + rise
        return again


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls in order of their start, int64 (n,): the module, event indices, and the time each took.

    `start` is the first event in the call, `end` the first after it, `back` the first of its backward.
    """

    module: Int64
    start: Int64
    end: Int64
    back: Int64
    spent_ns: Int64


def _slack(trace: MemoryTrace, step: HighestStep) -> int:
    """Return how long before its first event a step's first call may begin: since the event before it."""
    if step.first == 0:
        return 1 << 60
    return int(trace.events.time_ns[step.first] - trace.events.time_ns[step.first - 1])


def _inside(trace: MemoryTrace, rows: Int64) -> Int64:
    """Return the outermost of `rows` that each module is or lies in, -1 for none: int64, (modules,)."""
    chosen = set(rows.tolist())
    outermost: list[int] = []
    for row, module in enumerate(trace.modules):
        around = outermost[module.parent] if 0 <= module.parent < row else -1
        outermost.append(around if around >= 0 else row if row in chosen else -1)
    return np.array(outermost, np.int64)


def _nearest(group: Int64, value: Int64, of_group: Int64, at: Int64, *, later: bool) -> Int64:
    """Return the index of the last value <= `at` in the group `of_group`, or if `later` of the first >= `at`.

    Args:
        group, value: the groups and values to search, sorted by group, then value.
        of_group, at: the queries: a group and a value each. Those without such a value get -1.
        later: whether to look for larger values.
    """
    if not len(group):
        return np.full(len(of_group), -1, np.int64)
    is_query = np.arange(len(group) + len(at)) >= len(group)
    order = np.lexsort((is_query != later, np.concatenate((value, at)), np.concatenate((group, of_group))))
    order = order[::-1] if later else order  # so that the wanted value comes right before its query
    is_query = is_query[order]
    before = np.maximum.accumulate(np.where(is_query, -1, np.arange(len(order))))[is_query]
    index = np.full(len(of_group), -1, np.int64)
    index[order[is_query] - len(group)] = np.where(before >= 0, order[before], -1)
    index[(index >= 0) & (group[index] != of_group)] = -1
    return index
