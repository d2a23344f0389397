"""Advice: modules whose activations are worth recomputing in backward (activation checkpointing)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from tb_memplugin.analysis.autograd_graphs import Backwards, trains, waiting_forwards
from tb_memplugin.analysis.block_origins import Judged, StepBlocks, freed_by_program, freed_by_python
from tb_memplugin.analysis.findings import Evidence, Fine, NotJudged, Result, Where, share
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.source_lines import line_key
from tb_memplugin.analysis.steps import HighestStep
from tb_memplugin.analysis.sums import sums
from tb_memplugin.analysis.units import Unit, counted, part_text, size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.frames import FX, read_frame
from tb_memplugin.trace.tables import ROOT, Bool, Int64, module_text

LEAST_SHARE = 0.1
"""Least share of the peak that checkpointing must save for a finding."""

NEARLY = 0.9
"""What saves this share of the best saving counts as equally good. The module with the least forward time is
chosen, or the line that holds least."""

TRIED = 24
"""How many modules or lines are examined: those that hold the most activations at the peak."""

SHOWN, SHOWN_SHARE = 8, 0.01
"""How many modules are shown, and the least share of the peak that each must save."""


def checkpointing(judged: Judged) -> Result:
    """Find the modules whose checkpointing lowers the highest step's peak most; repeated layers count as one.

    The finding's bytes are a lower bound of the saving, see `Recomputed`. What the checkpoint
    itself keeps besides inputs (random state, 5 KB per call on the CPU) is not counted. Where the modules'
    calls are not recorded, call stacks say which calls keep activations: see `by_stack`.
    """
    trace, device, step = judged.trace, judged.device, judged.step
    blocks = trace.allocations
    if not (trace.calls.phase == Phase.FORWARD).any() or not (trace.calls.phase == Phase.BACKWARD).any():
        return by_stack(judged)
    if not ((blocks.category == Category.ACTIVATION) & (blocks.device == device)).any():
        return NotJudged("The recording does not tell activations apart from other memory.")
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
    return judged.finding(
        "checkpointing",
        "option",
        f"Recompute {module_text(name)} in backward instead of keeping its activations ({calls} per step).",
        best.saved_bytes,
        (_evidence(name, estimate, step.number, rates, most) for name, estimate in shown[:SHOWN]),
        "Call it through torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).",
        view="modules",
        state=_state(name),
        subject=name or ROOT,
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
    return Evidence(
        name or ROOT,
        estimate.saved_bytes,
        detail,
        where=Where("modules", (("step", str(step)), *_state(name))),
    )


def _state(name: str) -> tuple[tuple[str, str], ...]:
    return (*((("find", name),) if name else ()), ("sort", "activations"))


def _ms(estimate: Recomputed) -> str:
    return Unit("ms", 10**6).text(estimate.forward_ns)


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
        call = np.append(order, -1)[last]
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


FEWEST_CALLS = 2
"""Activations of fewer calls are not kept for backward: they are those of the running call."""

SHOWN_LINES = 4

KEPT = (Category.ACTIVATION, Category.AUTOGRAD_DETAIL, Category.UNKNOWN)

_MACHINERY = re.compile(
    r"(^|/)torch/(nn/(modules/module|functional)|_\w+|autograd/\w+|utils/\w+|cuda/\w+|nn/parallel/\w+|optim/\w+"
    r"|_dynamo/.*|_functorch/.*|fx/.*|functional)\.py$|(^|/)(threading|contextlib|runpy)\.py$|^<frozen"
    r"|(^|/)torch/distributed/.*\.py$|(^|/)(transformers/(utils/\w+|modeling_layers)|accelerate/utils/\w+)\.py$"
)
"""Python files whose lines call what others gave them: to checkpoint one would mean all calls."""

_OF_TRANSFORMERS = re.compile(r"[/\\]transformers[/\\]models[/\\]")


@dataclass(frozen=True, slots=True)
class CallsOfLine:
    """What checkpointing every call that a line makes would save. Bytes.

    `line`: its key. `module`: the folded name of most of what it calls, "" if not known. `calls`: how many
    keep activations at the peak. `held_bytes`: what they keep. `saved_bytes`: by how much the peak falls.
    """

    line: str
    module: str
    calls: int
    held_bytes: int
    saved_bytes: int


def by_stack(judged: Judged) -> Result:
    """Find the line whose calls, recomputed in backward, lower the highest step's peak most.

    A call keeps its last block, its output. What else it allocated and kept is missing from its end until
    backward reaches it: until the activations of the next call of the line are freed. A new call begins
    where the line that it runs is before that of the previous block, or is of another function.
    """
    trace, blocks, step = judged.trace, judged.blocks, judged.step
    if not (blocks.of(lambda origin: bool(origin.frames)) & (blocks.born >= 0)).any():
        return NotJudged(
            "This rule needs the modules' forward and backward calls (pass the model to the recorder), or "
            "activations with call stacks."
        )
    if not trace.ooms and not trains(trace, blocks):
        return Fine("The recording has no backward or optimizer step, or memory of one.")
    kept = _kept(judged)
    called = _CalledFrames.of(trace, blocks, kept)
    estimates = [calls for text in called.largest() if (calls := _calls(trace, blocks, kept, called, text))]
    most = max((estimate.saved_bytes for estimate in estimates), default=0)
    if most < LEAST_SHARE * step.peak_bytes:
        return Fine(
            f"Recomputing the calls of one line would lower the peak of step {step.number} by at most "
            f"{size_text(most)} ({share(most, step.peak_bytes)})."
        )
    good = [estimate for estimate in estimates if estimate.saved_bytes >= NEARLY * most]
    best = min(good, key=lambda estimate: (estimate.held_bytes, -estimate.saved_bytes, estimate.line))
    estimates.sort(key=lambda estimate: -estimate.saved_bytes)
    what = f"{best.module}, which {best.line} calls," if best.module else f"what {best.line} calls"
    return judged.finding(
        "checkpointing",
        "option",
        f"Recompute {what} in backward, instead of keeping the activations of {counted(best.calls, 'call')}.",
        best.saved_bytes,
        (
            Evidence(
                estimate.line,
                estimate.saved_bytes,
                f"{counted(estimate.calls, 'call')} hold {size_text(estimate.held_bytes)}",
            )
            for estimate in (best, *(other for other in estimates if other is not best))[:SHOWN_LINES]
        ),
        "Call model.gradient_checkpointing_enable(), which models of transformers have."
        if _OF_TRANSFORMERS.search(best.line)
        else "Call it through torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).",
        view="stacks",
        state=judged.at_peak,
        subject=best.line,
        price="one more forward of these calls per step",
    )


def _kept(judged: Judged) -> Int64:
    """Return the blocks (indices) of forward that are alive at the peak, and their like in other steps.

    What one checkpoint around several calls recomputes counts, too. What Python code frees, or outlives its
    backward, does not, nor what forwards without a backward keep.
    """
    trace, blocks = judged.trace, judged.blocks
    rows = blocks.rows
    category = trace.allocations.category[rows]
    chosen = np.isin(category, KEPT) & ~blocks.of(lambda origin: origin.is_backward)
    chosen &= blocks.of(lambda origin: origin.in_call) | (category != Category.UNKNOWN)
    chosen &= ~np.isin(trace.allocations.phase[rows], (Phase.BACKWARD, Phase.OPTIMIZER))
    chosen |= category == Category.RECOMPUTED
    chosen &= blocks.at_peak & (blocks.born >= 0) & ~freed_by_python(trace, blocks, in_calls=False)
    chosen &= ~(judged.result(Backwards.of).outlived(judged) & freed_by_program(trace, blocks))
    chosen &= blocks.born < blocks.born[judged.result(waiting_forwards)[0]].min(initial=len(trace.events))
    return np.flatnonzero(blocks.alike(np.flatnonzero(chosen).astype(np.int64))).astype(np.int64)


@dataclass(frozen=True)
class _CalledFrames:
    """The Python frames, without `_MACHINERY` and innermost first, of the origins of kept blocks.

    `under`: the origins that a frame called something for. `size`: the bytes of each origin's blocks.
    """

    frames: dict[int, tuple[str, ...]]
    under: dict[str, list[int]]
    size: Int64

    @staticmethod
    def of(trace: MemoryTrace, blocks: StepBlocks, kept: Int64) -> _CalledFrames:
        """Read the stack of each origin once."""
        size = sums(blocks.origin[kept], blocks.bytes[kept], len(blocks.origins))
        frames: dict[int, tuple[str, ...]] = {}
        under: dict[str, list[int]] = {}
        calls_by_itself: dict[str, bool] = {}
        for number in np.unique(blocks.origin[kept]).tolist():
            stack = trace.stack(blocks.origins[number].stack)
            for text in stack:
                if text not in calls_by_itself:
                    calls_by_itself[text] = _calls_by_itself(text)
            frames[number] = tuple(text for text in stack if calls_by_itself[text])
            for text in set(frames[number][1:]):
                under.setdefault(text, []).append(number)
        return _CalledFrames(frames, under, size)

    def largest(self) -> list[str]:
        """Return the frames that called what allocated most of the kept bytes."""
        sizes = {text: int(self.size[origins].sum()) for text, origins in self.under.items()}
        return sorted(filter(sizes.get, sizes), key=lambda text: (-sizes[text], text))[:TRIED]


def _calls_by_itself(text: str) -> bool:
    frame = read_frame(text)
    return frame.is_python and _MACHINERY.search(frame.file.replace("\\", "/")) is None


def _calls(
    trace: MemoryTrace, blocks: StepBlocks, kept: Int64, called: _CalledFrames, text: str
) -> CallsOfLine | None:
    """Return what checkpointing the calls of a frame would save; None if it keeps those of too few calls."""
    function, line = _callees(called, len(blocks.origins), text)
    inside = kept[function[blocks.origin[kept]] >= 0]
    if not len(inside):
        return None
    runs, at = function[blocks.origin[inside]], line[blocks.origin[inside]]
    call = np.append(0, np.cumsum((runs[1:] != runs[:-1]) | (at[1:] < at[:-1]))).astype(np.int64)
    at_peak = blocks.at_peak[inside]
    calls = len(np.unique(call[at_peak]))
    if calls < FEWEST_CALLS:
        return None
    saved = blocks.step.peak_bytes - _peak_with_recomputation(trace, blocks, inside, call)
    held_bytes = int(blocks.bytes[inside[at_peak]].sum())
    module = _called_modules(trace, blocks, inside, call) if saved > 0 else ""
    return CallsOfLine(line_key(text.partition(FX)[0]), module, calls, held_bytes, saved)


def _called_modules(trace: MemoryTrace, blocks: StepBlocks, inside: Int64, call: Int64) -> str:
    """Return the folded name of the module that keeps all of a call, of more than half of the calls."""
    module = trace.allocations.module[blocks.rows[inside]]
    is_named = np.array([*(each.is_module for each in trace.modules), False])[module]
    module, call = module[is_named], call[is_named]
    folded = folds([each.key for each in trace.modules])
    around: Counter[str] = Counter()
    for rows in np.split(module, np.flatnonzero(np.diff(call)) + 1):
        keys = [trace.modules[row].key.split(".") for row in np.unique(rows).tolist()]
        same = takewhile(lambda segments: len(set(segments)) == 1, zip(*keys, strict=False))
        around[folded.get(".".join(segments[0] for segments in same), "")] += 1
    name, count = around.most_common(1)[0]
    return name if 2 * count > around.total() and ":" not in name else ""  # a call's line is its name, too


def _callees(called: _CalledFrames, origins: int, text: str) -> tuple[Int64, Int64]:
    """Return a number for the function that each origin ran below a frame, -1 for none; and its line."""
    function, line = np.full((2, origins), -1, np.int64)
    numbers: dict[tuple[str, str], int] = {}
    for number in called.under[text]:
        frames = called.frames[number]
        callee = read_frame(frames[frames.index(text, 1) - 1])
        function[number] = numbers.setdefault(callee[:2], len(numbers))
        line[number] = callee.line
    return function, line


def _peak_with_recomputation(trace: MemoryTrace, blocks: StepBlocks, chosen: Int64, call: Int64) -> int:
    """Return the peak if calls (a number for each chosen block, ascending) ran again in backward."""
    first = np.searchsorted(call, np.arange(int(call[-1]) + 1))
    last_born = blocks.born[chosen[np.append(first[1:] - 1, len(chosen) - 1)]]
    until = np.append(blocks.born[chosen[first[1:]]], last_born[-1])  # the next call, or the end of the last
    outlives = blocks.freed[chosen] > until[call]
    chosen, call = chosen[outlives], call[outlives]
    ends = np.flatnonzero(np.append(call[1:] != call[:-1], True))
    begins = np.append(0, ends[:-1] + 1)
    last_free = np.maximum.reduceat(blocks.freed[chosen], begins)
    first_free = np.minimum.reduceat(blocks.freed[chosen], begins)
    begun = np.minimum(np.append(last_free[1:], first_free[-1]), first_free - 1)
    no_backward = min([len(trace.events), *(oom.event for oom in trace.ooms)])  # an error frees all of them
    begun[first_free >= no_backward] = len(trace.events)
    absent = np.ones(len(chosen), bool)
    absent[ends] = False  # a call's output is the input of the next
    if trace.ooms:
        absent &= call != call[-1]  # the last call has not ended
    back = np.repeat(begun, ends - begins + 1)
    lower = blocks.step.without(blocks.bytes[chosen[absent]], last_born[call[absent]] + 2, back[absent])
    return int(lower.max())
