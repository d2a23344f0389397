"""The phase of each event of a snapshot: from frames, else from annotations, and around them."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from tb_memplugin.read.snapshot.frame_marks import UNDECIDED, Mark, mark_of
from tb_memplugin.trace import Kind, MemoryTrace, Phase
from tb_memplugin.trace.frames import distinct, read_frame
from tb_memplugin.trace.tables import Bool, Int64, UInt8

_STEP = re.compile(r"Optimizer\.step#|(^|[^a-z])optim(izer)?([ _-]?step)?([^a-z]|$)", re.IGNORECASE)
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#|(^|[^a-z])zero_grad([^a-z]|$)", re.IGNORECASE)
_FORWARD = re.compile(r"(^|[^a-z])(forward|fwd)([^a-z]|$)", re.IGNORECASE)
_BACKWARD = re.compile(r"(^|[^a-z])(backward|bwd)([^a-z]|$)", re.IGNORECASE)


class EventPhases(NamedTuple):
    """Columns of shape (events,): the phase, and whether no backward and no optimizer's step runs there."""

    phase: UInt8
    ends_backward: Bool
    ends_step: Bool


def event_phases(trace: MemoryTrace, phase: UInt8, mark: UInt8) -> EventPhases:
    """Return the phases of all events.

    Args:
        phase, mark: what the frames of each event say, shape (events,).
    """
    phase = _with_annotations(trace, phase, mark)
    phase = _with_threads_of_autograd(trace, phase, mark)
    ends_step: Bool = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
    return EventPhases(_with_losses(trace, phase, mark), _ends_of_backward(trace, phase, mark), ends_step)


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
    is_decided &= ~on_threads_without_forward(trace, phase)
    for device in range(len(trace.devices)):
        here = trace.events.device == device
        decided, candidates = np.flatnonzero(here & is_decided), np.flatnonzero(here & silent)
        before = np.searchsorted(decided, candidates)
        candidates, before = candidates[before > 0], before[before > 0]
        last = phase[decided[before - 1]]
        phases[candidates[(last == Phase.FORWARD) | (last == Phase.BACKWARD)]] = Phase.BACKWARD
    return phases


def on_threads_without_forward(trace: MemoryTrace, phase: UInt8) -> Bool:
    """Return a mask of events with a stack that begins where no forward's does: of an optimizer in a hook.

    Where a stack begins is known if its outermost frame is no function that torch calls within others. No
    event is taken for one where that is not known of each forward, or where there is none.
    """
    outermost = [stack[-1] if stack else "" for stack in trace.stacks]
    begin = {text: None if mark_of(text) else read_frame(text)[:2] for text in {*outermost, ""}}
    stacks = np.unique(trace.events.stack[phase == Phase.FORWARD]).tolist()
    of_forward = {begin[outermost[row]] for row in stacks if row >= 0}
    is_clear = bool(of_forward) and None not in of_forward
    is_other = [is_clear and begin[text] not in {*of_forward, None} for text in outermost]
    mask: Bool = np.array([*is_other, False])[trace.events.stack]
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
        behind = next_event(here, written.event[starts & (written.device == device)], len(over))
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


def next_event(indices: Int64, after: Int64 | int, otherwise: int) -> Int64:
    """Return the first of the sorted `indices` after each event, `otherwise` if there is none."""
    following: Int64 = np.append(indices, otherwise)[np.searchsorted(indices, after, side="right")]
    return following
