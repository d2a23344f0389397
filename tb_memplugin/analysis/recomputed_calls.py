"""Checkpointing by call stacks: which line's calls to recompute in backward, where modules are not known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tb_memplugin.analysis.block_origins import StepBlocks, step_blocks
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, share
from tb_memplugin.analysis.source_lines import line_key
from tb_memplugin.analysis.sums import sums
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.frames import FX, read_frame
from tb_memplugin.trace.tables import Int64

TRIED = 24
"""How many lines are examined: those under which most of the activations at the peak were allocated."""

NEARLY = 0.9
"""Lines that save this share of the best saving count as equally good; the one that holds least is chosen."""

FEWEST_CALLS = 2
"""Activations of fewer calls are not kept for backward: they are those of the running call."""

SHOWN_LINES = 4

KEPT = (Category.ACTIVATION, Category.AUTOGRAD_DETAIL, Category.UNKNOWN)

_MACHINERY = re.compile(
    r"(^|/)torch/(nn/(modules/module|functional)|_\w+|autograd/\w+|utils/\w+|cuda/\w+|nn/parallel/\w+|optim/\w+"
    r"|_dynamo/.*|_functorch/.*|fx/.*|functional)\.py$|(^|/)(threading|contextlib|runpy)\.py$|^<frozen"
    r"|(^|/)(transformers/(utils/\w+|modeling_layers)|accelerate/utils/\w+)\.py$"
)
"""Python files whose lines call what others gave them: to checkpoint one would mean all calls."""


@dataclass(frozen=True, slots=True)
class CallsOfLine:
    """What checkpointing every call that a line makes would save. Bytes.

    `line`: its key. `calls`: how many keep activations at the peak. `held_bytes`: what they keep.
    `saved_bytes`: by how much the step's peak falls.
    """

    line: str
    calls: int
    held_bytes: int
    saved_bytes: int


def by_stack(trace: MemoryTrace, device: int, least_share: float) -> Result:
    """Find the line whose calls, recomputed in backward, lower the highest step's peak most.

    A call keeps its last block, its output. What else it allocated and kept is missing from its end until
    backward reaches it: until the activations of the next call of the line are freed. A new call begins
    where the line that it runs is before that of the previous block, or is of another function.
    """
    blocks = step_blocks(trace, device)
    kept = _kept(trace, blocks)
    if not any(blocks.origins[origin].frames for origin in np.unique(blocks.origin[kept]).tolist()):
        return NotJudged(
            "This rule needs the modules' forward and backward calls (pass the model to the recorder), or "
            "activations with call stacks."
        )
    step = blocks.step
    estimates = [
        calls for text in _callers(trace, blocks, kept) if (calls := _calls(trace, blocks, kept, text))
    ]
    most = max((estimate.saved_bytes for estimate in estimates), default=0)
    if most < least_share * step.peak_bytes:
        return Fine(
            f"Recomputing the calls of one line would lower the peak of step {step.number} by at most "
            f"{size_text(most)} ({share(most, step.peak_bytes)})."
        )
    good = [estimate for estimate in estimates if estimate.saved_bytes >= NEARLY * most]
    best = min(good, key=lambda estimate: (estimate.held_bytes, -estimate.saved_bytes, estimate.line))
    estimates.sort(key=lambda estimate: -estimate.saved_bytes)
    return Finding(
        kind="checkpointing",
        level="option",
        device=trace.devices[device].name,
        step=step.number,
        title=f"Recompute what {best.line} calls in backward, instead of keeping the activations of "
        f"{counted(best.calls, 'call')}.",
        subject=best.line,
        bytes=best.saved_bytes,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=tuple(
            Evidence(
                estimate.line,
                estimate.saved_bytes,
                f"{counted(estimate.calls, 'call')} hold {size_text(estimate.held_bytes)}",
            )
            for estimate in (best, *(other for other in estimates if other is not best))[:SHOWN_LINES]
        ),
        where=Where("stacks", (("step", str(step.number)), ("event", str(step.peak_event)))),
        what_to_do="Call it through torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).",
        price="one more forward of these calls per step",
    )


def _kept(trace: MemoryTrace, blocks: StepBlocks) -> Int64:
    """Return the blocks (indices) of forward that are alive at the peak, and their like in other steps."""
    rows = blocks.rows
    chosen = blocks.at_peak & (blocks.born >= 0) & np.isin(trace.allocations.category[rows], KEPT)
    chosen &= ~blocks.of(lambda origin: origin.is_backward)
    chosen &= ~np.isin(trace.allocations.phase[rows], (Phase.BACKWARD, Phase.OPTIMIZER))
    return np.flatnonzero(blocks.alike(np.flatnonzero(chosen).astype(np.int64))).astype(np.int64)


def _callers(trace: MemoryTrace, blocks: StepBlocks, kept: Int64) -> list[str]:
    """Return the frames under which most of the kept bytes were allocated, but not by the frame itself."""
    total = sums(blocks.origin[kept], blocks.bytes[kept], len(blocks.origins))
    held: dict[str, int] = {}
    for number in np.flatnonzero(total).tolist():
        for text in set(_calling(trace.stack(blocks.origins[number].stack))[1:]):
            held[text] = held.get(text, 0) + int(total[number])
    return sorted(held, key=lambda text: (-held[text], text))[:TRIED]


@lru_cache(maxsize=4_096)
def _calling(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return the Python frames of a stack without `_MACHINERY`, innermost first."""
    return tuple(text for text in stack if _calls_by_itself(text))


@lru_cache(maxsize=16_384)
def _calls_by_itself(text: str) -> bool:
    frame = read_frame(text)
    return frame.is_python and _MACHINERY.search(frame.file.replace("\\", "/")) is None


def _calls(trace: MemoryTrace, blocks: StepBlocks, kept: Int64, text: str) -> CallsOfLine | None:
    """Return what checkpointing the calls of a frame would save; None if it keeps those of too few calls."""
    function, line = _callees(trace, blocks, kept, text)
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
    held = int(blocks.bytes[inside[at_peak]].sum())
    return CallsOfLine(line_key(text.partition(FX)[0]), calls, held, saved)


def _callees(trace: MemoryTrace, blocks: StepBlocks, kept: Int64, text: str) -> tuple[Int64, Int64]:
    """Return a number for the function that each origin ran below a frame, -1 for none; and its line."""
    function, line = np.full((2, len(blocks.origins)), -1, np.int64)
    numbers: dict[tuple[str, str], int] = {}
    for number in np.unique(blocks.origin[kept]).tolist():
        frames = _calling(trace.stack(blocks.origins[number].stack))
        if text in frames[1:]:
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
