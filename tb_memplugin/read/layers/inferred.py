"""Give the allocations of a trace the modules that its call stacks show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tb_memplugin.read.layers.backward import Meaning, Request, match_backward, meaning_of
from tb_memplugin.read.layers.calls import Call, Calls
from tb_memplugin.read.layers.frames import Frames, Role
from tb_memplugin.read.layers.names import Names, link_recomputed, unname_conditional
from tb_memplugin.read.layers.parameters import (
    Gradient,
    Moved,
    complete_loops,
    match_moved,
    match_state,
    registered,
)
from tb_memplugin.read.layers.source_text import NOT_KNOWN
from tb_memplugin.read.tables import ModuleTree
from tb_memplugin.trace import Category, Kind, MemoryTrace, Note
from tb_memplugin.trace.notes import MODULES_INFERRED
from tb_memplugin.trace.replay import attributed
from tb_memplugin.trace.tables import NOT_NAMED, Int32, UInt8

BY_TEXT, BY_SITE, IN_PART = 99, 95, 60
"""How sure a name is, in percent: by source texts, by lines of calls alone, with a part that is not known."""

OF_NODE, OF_ENGINE, OF_PARAMETER = 98, 90, 95
"""How sure it is that a block is the module's, in percent: of an autograd node that matches an operator, of
another node or the engine, of a parameter or its state. Measured in docs/design/layers_from_stacks.md."""


ONE_OUTPUT, CAST = "linear", "tocopy"

OF_NO_NODE = (Category.COMMUNICATION, Category.WORKSPACE)
"""What is allocated in an operator or node, but not for it."""


def with_inferred_layers(trace: MemoryTrace, *, read_text: bool = True) -> MemoryTrace:
    """Return a trace of a snapshot with the modules that its Python stacks show, if it names none itself.

    Args:
        trace: a trace with categories, phases and no modules but `(not named)`.
        read_text: whether the source files that the stacks name may be read, if they are here.
    """
    allocates = np.flatnonzero(trace.events.kind == Kind.ALLOC)
    if len(trace.modules) > 1 or not trace.stacks or not len(allocates):
        return trace
    frames = Frames(trace.stacks, read_text=read_text)
    if not any(frame.role == Role.CALL and frame.line for frame in frames.all):
        return trace
    meanings = [meaning_of(stack) for stack in trace.stacks]
    owner, calls = _tracked(trace, frames, meanings)
    confidence = np.full(len(trace.events), 100, np.uint8)
    _with_backward(trace, meanings, owner, confidence)
    link_recomputed(calls.outermost, frames)
    names = Names(frames)
    last = int(allocates[-1])
    names.name(
        calls.outermost, at_end=None if meanings[trace.events.stack[last]].is_backward else owner.get(last)
    )
    complete = _with_parameters(trace, frames, owner, confidence)
    unname_conditional(calls.outermost, complete)
    modules = ModuleTree()
    row_of: dict[int, int] = {}
    module = np.zeros(len(trace.events), np.int32)
    is_owned = trace.events.category != Category.WORKSPACE
    for event, call in owner.items():
        if is_owned[event]:
            row = row_of.get(id(call))
            if row is None:
                row = row_of[id(call)] = modules.add(call.fqn(), names.class_of(call))
            module[event] = row
    table = modules.as_tuple()
    sure = np.array([_confidence(m.key) for m in table], np.uint8)
    return _with_modules(replace(trace, modules=table), module, np.minimum(sure[module], confidence))


def _tracked(
    trace: MemoryTrace, frames: Frames, meanings: Sequence[Meaning]
) -> tuple[dict[int, Call], Calls]:
    """Return the module call of each event that allocates in one, and all calls."""
    stacks = [frames.of_stack(stack) for stack in trace.stacks]
    kind = trace.events.kind
    rows = np.flatnonzero(np.isin(kind, (Kind.ALLOC, Kind.FREE_REQUESTED, Kind.FREE_COMPLETED)))
    is_alloc, stack, size = kind[rows] == Kind.ALLOC, trace.events.stack[rows], trace.events.bytes[rows]
    # A linear allocates one output: its stack again, with any size, is the next one's.
    is_output = np.array([ONE_OUTPUT in m.operators and CAST not in m.operators for m in meanings] + [False])
    size = np.where(is_output[stack], 0, size)
    columns = list(zip(rows.tolist(), is_alloc.tolist(), stack.tolist(), size.tolist(), strict=True))
    first, _ = _followed(Calls(frames), stacks, columns)
    calls, owner = _followed(Calls(frames, first), stacks, columns)
    return owner, calls


def _with_backward(
    trace: MemoryTrace, meanings: Sequence[Meaning], owner: dict[int, Call], confidence: UInt8
) -> None:
    """Add the calls of what autograd's nodes allocate, and how sure they are."""
    if not any(meaning.node for meaning in meanings):
        return
    events = trace.events
    by_engine = np.array([meaning.is_backward and not meaning.node for meaning in meanings] + [False])
    is_free = (events.kind == Kind.FREE_REQUESTED) & by_engine[events.stack]
    is_alloc = (events.kind == Kind.ALLOC) & (events.stack >= 0) & ~np.isin(events.category, OF_NO_NODE)
    for device in range(len(trace.devices)):
        rows = np.flatnonzero((is_alloc | is_free) & (events.device == device))
        columns = (
            rows.tolist(),
            events.stack[rows].tolist(),
            events.bytes[rows].tolist(),
            is_free[rows].tolist(),
        )
        matched = match_backward(
            [
                Request(at, row, meanings[row], size, owner.get(at), free)
                for at, row, size, free in zip(*columns, strict=True)
            ]
        )
        owner.update(matched.owner)
        confidence[list(matched.owner)] = OF_ENGINE
        confidence[list(matched.direct)] = OF_NODE


def _with_parameters(
    trace: MemoryTrace, frames: Frames, owner: dict[int, Call], confidence: UInt8
) -> set[tuple[str, tuple[int, ...]]]:
    """Add the calls of parameters, buffers and optimizer state, and how sure they are.

    Returns:
        The loops that surely skipped no module, as `complete_loops` does.
    """
    events = trace.events
    is_alloc = events.kind == Kind.ALLOC
    gradient_events = np.flatnonzero(is_alloc & (events.category == Category.GRADIENT)).tolist()
    size = events.bytes
    gradients = registered(Gradient(int(size[at]), owner[at]) for at in gradient_events if at in owner)
    if not gradients:
        return set()
    depth = [sum(frames.all[n].role == Role.APPLY for n in frames.of_stack(stack)) for stack in trace.stacks]
    depths = np.array([*depth, 0])[events.stack]
    moved = np.flatnonzero(is_alloc & (depths > 0)).tolist()
    parts = [Moved(at, int(size[at]), int(depths[at])) for at in moved]
    owner.update(match_moved(parts, gradients))
    confidence[moved] = OF_PARAMETER
    state = np.flatnonzero(is_alloc & (events.category == Category.OPTIMIZER_STATE)).tolist()
    confidence[state] = OF_PARAMETER
    parameters: list[tuple[int, Call | None]] = [(int(size[at]), owner.get(at)) for at in moved]
    if not moved:
        parameters = [(gradient.size, gradient.call) for gradient in gradients]
    owner.update(match_state([(at, int(size[at])) for at in state], parameters))
    return complete_loops(parts, gradients, owner)


def _followed(
    calls: Calls, stacks: Sequence[tuple[int, ...]], columns: list[tuple[int, bool, int, int]]
) -> tuple[Calls, dict[int, Call]]:
    owner: dict[int, Call] = {}
    last = -1
    for event, is_alloc, row, size in columns:
        stack = stacks[row] if row >= 0 else ()
        if is_alloc:
            if not stack:  # autograd's threads, which begin when a forward is over
                calls.forget()
            elif (call := calls.add(stack, size, row)) is not None:
                owner[event] = call
        elif stack and row != last:
            calls.add_free(stack)
        last = row
    return calls, owner


def _confidence(key: str) -> int:
    if key == NOT_NAMED:
        return 0
    if NOT_KNOWN in key:
        return IN_PART
    return BY_SITE if ":" in key else BY_TEXT


def _with_modules(trace: MemoryTrace, module: Int32, confidence: UInt8) -> MemoryTrace:
    """Return a trace with the modules of its events, without pairing its blocks again."""
    blocks, first = trace.allocations, len(trace.start)
    births = blocks.born[first:]
    named = int(blocks.bytes[first:][module[births] > 0].sum())
    note = Note(
        f"The recording names no modules; those of {named:,} allocated bytes are inferred from call stacks.",
        MODULES_INFERRED,
        named,
    )
    events = replace(trace.events, module=module, module_confidence=confidence)
    paired = attributed(blocks, events, trace.start)
    return replace(trace, events=events, notes=(*trace.notes, note), paired=paired)
