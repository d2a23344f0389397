"""What allocated the blocks of a step: operators and Python frames, from any kind of recording."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, Level, NotJudged, Result, Where
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.lines import line_evidence
from tb_memplugin.analysis.source_lines import (
    frame_of_line,
    leading_frame,
    line_key,
    runs_library_model,
    stacks_in_use,
)
from tb_memplugin.analysis.steps import HighestStep, highest_step, step_on
from tb_memplugin.analysis.sums import groups
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import BACKWARD, MODULE_CALL, THREAD, read_frame
from tb_memplugin.trace.tables import NOT_NAMED, Bool, Int64, module_text

T = TypeVar("T")

UNKNOWN_ORIGINS = NotJudged("The recording contains neither operators nor stacks.")

_OPERATOR = re.compile(r"\bat::_ops::(\w+)::(?:call|redispatch)\b")
_NODE = re.compile(r"\btorch::autograd::generated::(\w+Backward\w*)::")
AUTOGRAD = "torch/autograd/"
"""The folder of the Python code that runs a backward."""

_TORCH_FILE = re.compile(r"(^|/)(torch|einops|opt_einsum)/")


@dataclass(frozen=True, slots=True)
class Origin:
    """What allocated a block.

    Attributes:
        names: operators without their namespace ("bmm", "_softmax"), autograd nodes ("BmmBackward0") and the
            functions of torch's own Python files ("softmax"); empty if nothing of this is recorded.
        frames: the Python frames outside torch and einops, innermost first.
        stack, module: rows in `trace.stacks` and `trace.modules`, -1 for none.
        line: the source line, "" without a stack.
        inside: the Python frames that the line called, innermost first, if a module's call is among them.
        is_direct: whether Python code outside torch and einops called the operator itself.
        in_call: whether a module call is in the stack.
    """

    names: frozenset[str]
    frames: tuple[str, ...]
    stack: int
    module: int
    line: str
    inside: tuple[str, ...]
    is_direct: bool
    in_call: bool

    @property
    def is_backward(self) -> bool:
        """Whether autograd ran it."""
        return any(
            "Backward" in name or name.endswith(("_backward", "_backward_data")) for name in self.names
        )

    @property
    def is_known(self) -> bool:
        """Whether any operator or function is recorded."""
        return bool(self.names or self.frames)


@dataclass(frozen=True)
class StepBlocks:
    """The blocks that are alive on a device at some time in a step, or in the window.

    They are in the order of their birth.

    Attributes:
        step: the device's highest step.
        rows: rows of `trace.allocations`; int64, shape (n,).
        bytes, born, freed: as in `trace.allocations`, shape (n,).
        at_peak: whether each is alive at the step's peak; bool, shape (n,).
        origin: the index in `origins` of each, shape (n,).
        origins: what allocated the blocks, each once.
    """

    step: HighestStep
    rows: Int64
    bytes: Int64
    born: Int64
    freed: Int64
    at_peak: Bool
    origin: Int64
    origins: tuple[Origin, ...]

    def of(self, fits: Callable[[Origin], bool]) -> Bool:
        """Return the mask of the blocks whose origin fits; bool, shape (n,)."""
        return np.array([fits(origin) for origin in self.origins], bool)[self.origin]

    @cached_property
    def sites(self) -> Int64:
        """A number for each block, the same for those alike in names, line and what it called (or module)."""
        numbers: dict[tuple[str, frozenset[str], tuple[str, ...] | int], int] = {}
        same = [
            numbers.setdefault(
                (origin.line, origin.names, origin.inside if origin.line else origin.module), len(numbers)
            )
            for origin in self.origins
        ]
        sites: Int64 = np.array(same, np.int64)[self.origin]
        return sites

    @cached_property
    def kinds(self) -> Int64:
        """A number for each block, the same for those of a site that have one size."""
        kinds: Int64 = self.bytes * (int(self.sites.max(initial=0)) + 1) + self.sites
        return kinds

    def alike(self, chosen: Int64) -> Bool:
        """Return the mask of the blocks of the same kinds as some (indices): those of other passes, too."""
        return np.isin(self.kinds, self.kinds[chosen]) & (self.born >= 0)

    @property
    def are_known(self) -> bool:
        """Whether an operator or a function is recorded for any block."""
        return any(origin.is_known for origin in self.origins)

    def of_operators(self, names: Collection[str]) -> Bool:
        """Return the mask of the blocks of this window that one of some operators allocated."""
        return self.of(lambda origin: not origin.names.isdisjoint(names)) & (self.born >= 0)

    def saved(self, chosen: Bool) -> int:
        """Return by how many bytes the step's peak falls without the chosen blocks (mask, shape (n,))."""
        return self.step.saved(self.bytes[chosen], self.born[chosen] + 1, self.freed[chosen])


@dataclass(frozen=True)
class Judged:
    """A device (its row) of a trace that the rules judge. What several of them need is computed once.

    `step` is the step of the row `step_row` or, without one, that in which the device has its highest peak.
    `_shared` is that of all devices of the trace.
    """

    trace: MemoryTrace
    device: int
    _shared: dict[object, Any] = field(default_factory=dict, repr=False)
    step_row: int | None = None

    @property
    def name(self) -> str:
        """The device's name."""
        return self.trace.devices[self.device].name

    @cached_property
    def step(self) -> HighestStep:
        """The step that is judged."""
        if self.step_row is not None:
            return step_on(self.trace, self.device, self.step_row)
        return highest_step(self.trace, self.device)

    @cached_property
    def failed(self) -> int:
        """The event of the device's last failed request, -1 if none."""
        own = (oom.event for oom in self.trace.ooms if self.trace.events.device[oom.event] == self.device)
        return max(own, default=-1)

    @property
    def blocks(self) -> StepBlocks:
        """The blocks of this step."""
        return self.result(_step_blocks)

    @property
    def window(self) -> StepBlocks:
        """The blocks of all steps."""
        is_single = len(self.trace.steps) == 1
        return self.blocks if is_single else self.beside(self.device).result(_window_blocks)

    def beside(self, device: int) -> Judged:
        """Return a device of the trace, in the step in which it has its highest peak."""
        return Judged(self.trace, device, self._shared)

    def in_step(self, row: int) -> Judged:
        """Return the device in another step (its row)."""
        return Judged(self.trace, self.device, self._shared, row)

    def result(self, rule: Callable[[Judged], T]) -> T:
        """Return what a rule says of the device in this step."""
        key = rule, self.device, self.step_row
        if key not in self._shared:
            self._shared[key] = rule(self)
        result: T = self._shared[key]
        return result

    def finding(
        self,
        kind: str,
        level: Level,
        title: str,
        saved: int,
        evidence: Iterable[Evidence],
        what_to_do: str,
        *,
        view: str,
        state: Sequence[tuple[str, str]] = (),
        subject: str = "",
        measure: str = "less at the peak",
        price: str = "",
    ) -> Finding:
        """Return a finding on `step` of which `saved` is a part of the peak."""
        number = self.step.number
        return Finding(
            kind=kind,
            level=level,
            device=self.name,
            step=number,
            title=title,
            subject=subject,
            bytes=saved,
            measure=measure,
            of_bytes=self.step.peak_bytes,
            evidence=tuple(evidence),
            where=Where(view, (("step", str(number)), *state)),
            what_to_do=what_to_do,
            price=price,
        )

    def avoidable(
        self,
        kind: str,
        level: Level,
        chosen: Int64,
        title: str,
        fine: str,
        what_to_do: str,
        *,
        gone: Int64 | None = None,
        size: Int64 | None = None,
        without: str = "them",
        least_share: float = 0.05,
        price: str = "",
    ) -> Result:
        """Return a finding if the peak falls far enough without some of `blocks` (indices).

        Args:
            title: what the finding says; `{name}` stands for the line, or the module, of most bytes.
            fine: what is so if there are no such blocks.
            gone: the birth of each block by default, or the event from which it is not needed.
            size: the bytes of each that are not needed, all by default.
            least_share: the least share of the peak.
        """
        blocks = self.blocks
        if not blocks.are_known:
            return UNKNOWN_ORIGINS
        since = blocks.born[chosen] if gone is None else gone
        saved = blocks.step.saved(
            blocks.bytes[chosen] if size is None else size, since + 1, blocks.freed[chosen]
        )
        if saved < max(least_share * self.step.peak_bytes, 1):
            less = f": without {without} the peak would be only {size_text(saved)} lower" if saved else ""
            return Fine(f"{fine}{less}.")
        at_peak = np.unique(chosen[blocks.at_peak[chosen] & (since <= self.step.peak_event)])
        lines = line_evidence(self.trace, blocks.rows[at_peak])
        largest = int(blocks.rows[at_peak[np.argmax(blocks.bytes[at_peak])]])
        module = int(self.trace.allocations.module[largest])
        module_name = self.trace.modules[module].key if module >= 0 else NOT_NAMED
        cpp_name = lines[0].what if module_name == NOT_NAMED else module_text(module_name)
        frames = ((line.what, frame_of_line(line.what)) for line in lines)
        name = next((text for text, frame in frames if frame and frame.is_python), cpp_name)
        if module_name != NOT_NAMED and runs_library_model(
            self.trace.stack(int(self.trace.allocations.stack[largest]))
        ):
            name = module_text(folds([each.key for each in self.trace.modules])[module_name])
        return self.finding(
            kind,
            level,
            title.format(name=name),
            saved,
            (*lines, self.without(without, saved)),
            what_to_do,
            view="allocations",
            state=[("block", str(largest))],
            subject=name,
            price=price,
        )

    @property
    def at_peak(self) -> tuple[tuple[str, str]]:
        """The state of a link to the peak."""
        return (("event", str(self.step.peak_event)),)

    def without(self, what: str, saved: int, how: str = "by replay without them") -> Evidence:
        """Return the peak without what a finding is about, as evidence."""
        return Evidence(f"the same peak without {what}", self.step.peak_bytes - saved, how, False)


def _step_blocks(judged: Judged) -> StepBlocks:
    step, blocks = judged.step, judged.trace.allocations
    rows = blocks.alive_between(step.first, step.end, judged.device)
    return _blocks(judged.trace, step, rows.astype(np.int64))


def _window_blocks(judged: Judged) -> StepBlocks:
    return window_blocks(judged.trace, judged.device)


def window_blocks(trace: MemoryTrace, device: int) -> StepBlocks:
    """Return all blocks of a device (its row), those of its other steps, too."""
    rows = np.flatnonzero(trace.allocations.device == device).astype(np.int64)
    return _blocks(trace, highest_step(trace, device), rows)


def freed_by_program(trace: MemoryTrace, blocks: StepBlocks) -> Bool:
    """Return the mask of the blocks that are freed and were not alive when a request failed.

    What frees those is often the error's way up.
    """
    is_freed = blocks.freed < len(trace.events)
    for oom in trace.ooms:
        is_freed &= (blocks.born > oom.event) | (blocks.freed < oom.event)
    return is_freed


def freed_by_python(trace: MemoryTrace, blocks: StepBlocks, *, in_calls: bool = True) -> Bool:
    """Return the mask of the blocks that Python code outside of autograd freed, by the stacks of the frees.

    What was alive when a request failed is not among them.

    Args:
        in_calls: whether code in module calls counts, too.
    """
    is_freed = freed_by_program(trace, blocks)
    stack = trace.own_stacks[blocks.freed[is_freed]]
    others = (AUTOGRAD,) if in_calls else (AUTOGRAD, MODULE_CALL)
    is_python = {
        row: any(read_frame(text).is_python for text in trace.stack(row))
        and not any(other in text for text in trace.stack(row) for other in others)
        for row in np.unique(stack).tolist()
    }
    is_freed[is_freed] = [is_python[row] for row in stack.tolist()]
    return is_freed


def _blocks(trace: MemoryTrace, step: HighestStep, rows: Int64) -> StepBlocks:
    blocks = trace.allocations
    origin, origins = _origins(trace, rows)
    born, freed = blocks.born[rows], blocks.freed[rows]
    at_peak = (born <= step.peak_event) & (freed > step.peak_event)
    return StepBlocks(step, rows, blocks.bytes[rows], born, freed, at_peak, origin, origins)


def _origins(trace: MemoryTrace, rows: Int64) -> tuple[Int64, tuple[Origin, ...]]:
    blocks = trace.allocations
    stack, stacks = stacks_in_use(trace, blocks.stack[rows])
    width, end = len(trace.modules) + 1, (len(trace.operators) + 1) * (len(trace.modules) + 1)
    pairs, pair = groups((blocks.operator[rows].astype(np.int64) + 1) * width + blocks.module[rows] + 1, end)
    first, origin = groups(stack * len(pairs) + pair, max(len(stacks), 1) * len(pairs) + 1)
    of_stack = [_of_stack(trace.stack(row)) for row in stacks]
    origins = []
    for at in first.tolist():
        names, frames, line, inside, is_direct, in_call = of_stack[int(stack[at])]
        operator, module = int(blocks.operator[rows[at]]), int(blocks.module[rows[at]])
        if operator >= 0:
            names |= {trace.operators[operator].rpartition("::")[2]}
        origins.append(
            Origin(names, frames, stacks[int(stack[at])], module, line, inside, is_direct, in_call)
        )
    return origin, tuple(origins)


def _of_stack(
    stack: tuple[str, ...],
) -> tuple[frozenset[str], tuple[str, ...], str, tuple[str, ...], bool, bool]:
    names: set[str] = set()
    frames = []
    for text in stack:
        name, is_outside = _of_frame(text)
        if name:
            names.add(name)
        if is_outside:
            frames.append(text)
    leading = leading_frame(stack)
    innermost = next((text for text in stack if read_frame(text).is_python), "")
    is_direct = bool(frames) and innermost == frames[0]
    in_call = any(text.startswith(MODULE_CALL) for text in stack)
    called = tuple(takewhile(lambda text: text != leading, stack))
    calls_module = any(text.startswith(MODULE_CALL) for text in called)
    inside = tuple(text for text in called if calls_module and read_frame(text).is_python)
    line = "" if leading is None else line_key(leading)
    return frozenset(names), tuple(frames), line, inside, is_direct, in_call


@lru_cache(maxsize=16_384)
def _of_frame(text: str) -> tuple[str, bool]:
    """Return the name that a frame gives, "" for none; and whether it is Python outside torch and einops."""
    if text.startswith(BACKWARD):
        return text.removeprefix(BACKWARD).rstrip(")"), False
    if text.startswith(THREAD):
        return "", False
    frame = read_frame(text)
    if not frame.is_python:
        match = _OPERATOR.search(text) or _NODE.search(text)
        return (match[1] if match else ""), False
    if _TORCH_FILE.search(frame.file.replace("\\", "/")):
        return (frame.function if frame.file.endswith("functional.py") else ""), False
    return "", True
