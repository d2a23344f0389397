"""Give the allocations of a trace the modules that its call stacks show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np

from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.read.layers.backward import CAST, Backward, Meaning, meaning_of
from tb_memplugin.read.layers.calls import Call, follow_all
from tb_memplugin.read.layers.frames import Frames, Role
from tb_memplugin.read.layers.names import Names, is_sequential, link_recomputed, unname_conditional
from tb_memplugin.read.layers.own_modules import ModelModule, OwnModules
from tb_memplugin.read.layers.parameters import (
    Gradient,
    Gradients,
    Moved,
    before_the_window,
    complete_loops,
    depth_of,
    in_parameter_order,
    match_moved,
    match_state,
    registered,
)
from tb_memplugin.read.layers.source_text import NOT_KNOWN
from tb_memplugin.read.tables import ModuleTree
from tb_memplugin.trace import Category, Events, Kind, MemoryTrace, Note, StartState
from tb_memplugin.trace.notes import MODULES_INFERRED
from tb_memplugin.trace.replay import attributed
from tb_memplugin.trace.tables import CERTAIN, NOT_NAMED, Int32, UInt8, code_mask

BY_TEXT, BY_SITE, IN_PART = 99, 95, 60
"""How sure a name is, in percent: by source texts, by lines of calls alone, with a part that is not known."""

OF_PARAMETER = 99
"""How sure it is that a parameter or its state is the module's, in percent; `OF_NODE` is for backwards.

Measured in docs/design/layers_from_stacks.md.
"""


ONE_OUTPUT = frozenset(("linear", "conv1d", "conv2d", "conv3d"))
"""Operators that allocate one output with a stack."""

OF_NO_NODE = (Category.COMMUNICATION, Category.WORKSPACE)
"""What is allocated in an operator or node, but not for it."""


MOST_FRAMES, FRAMES_PER_EVENT = 1 << 18, 2
"""How many frames distinct stacks may have: so many, and so many more for each event.

Of the real files that were tried, none has above 18,215 in all, or 2.3 for each event.
"""

LATER = ("module", "module_confidence")
"""The columns of `Events` that are inferred."""


def with_inferred_layers(
    trace: MemoryTrace, *, read_text: bool = True, models: Sequence[ModelModule] = ()
) -> MemoryTrace:
    """Return a trace of a snapshot with the modules that its Python stacks show, if it names none itself.

    They are inferred when the modules, their columns or the notes of the result are first read.

    Args:
        trace: a trace with categories, phases and no modules but `(not named)`. One that this function
            returned is returned as it is.
        read_text: whether the source files that the stacks name may be read, if they are here.
        models: the program's own, if they are at hand: calls that are surely of one of their modules get its
            name.
    """
    if isinstance(trace, _LaterTrace) or len(trace.modules) > 1 or not trace.stacks:
        return trace
    if not (trace.events.kind == Kind.ALLOC).any():
        return trace
    events, start = _LaterEvents.__new__(_LaterEvents), _LaterStart.__new__(_LaterStart)
    later = _LaterTrace.__new__(_LaterTrace)
    for table, columns in ((events, trace.events), (start, trace.start)):
        for name in type(columns).__slots__:
            if name not in LATER:
                object.__setattr__(table, name, getattr(columns, name))
    fields = {name: value for name, value in vars(trace).items() if name not in ("modules", "notes")}
    blocks = attributed(trace.allocations, events, start)
    vars(later).update(fields, events=events, start=start, allocations=blocks)

    def infer() -> None:
        with collector_at_rest():
            inferred = _inferred(trace, read_text=read_text, models=models)
        for table, columns in ((events, inferred.events), (start, inferred.start)):
            for name in LATER:
                object.__setattr__(table, name, getattr(columns, name))
        vars(later).update(modules=inferred.modules, notes=inferred.notes)

    for part in (events, start, later):
        object.__setattr__(part, "infer", infer)
    return later


class _LaterColumns:
    """Columns of which those of modules are not inferred yet."""

    __slots__ = ()
    infer: Callable[[], None]

    def __getattr__(self, name: str) -> object:
        """Infer what is not set yet."""
        if name in LATER:
            self.infer()
        return object.__getattribute__(self, name)

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        """Be copied and pickled as what they are, with the modules inferred."""
        kind: Any = type(self).__bases__[1]
        return kind, tuple(getattr(self, name) for name in kind.__slots__)


class _LaterEvents(_LaterColumns, Events):
    __slots__ = ("infer",)


class _LaterStart(_LaterColumns, StartState):
    __slots__ = ("infer",)


class _LaterTrace(MemoryTrace):
    """A trace whose modules are not inferred yet."""

    infer: Callable[[], None]

    def __getattr__(self, name: str) -> object:
        """Infer what is not set yet."""
        if name in ("modules", "notes"):
            self.infer()
        return object.__getattribute__(self, name)

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[Any, ...]:
        """Be copied and pickled as a trace whose modules are inferred."""
        state = {"modules": self.modules, **vars(self)}
        return _plain, ({name: value for name, value in state.items() if name != "infer"},)


def _plain(fields: dict[str, Any]) -> MemoryTrace:
    trace = object.__new__(MemoryTrace)
    vars(trace).update(fields)
    return trace


def _inferred(trace: MemoryTrace, *, read_text: bool, models: Sequence[ModelModule]) -> MemoryTrace:
    count = sum(map(len, trace.stacks))
    if count > MOST_FRAMES + FRAMES_PER_EVENT * len(trace.events):
        return _with_too_many(trace, count)
    allocates = np.flatnonzero(trace.events.kind == Kind.ALLOC)
    frames = Frames(trace.stacks, read_text=read_text)
    if not any(frame.role == Role.CALL and frame.line for frame in frames.all):
        return trace
    meanings = [meaning_of(stack) for stack in trace.stacks]
    stacks = [frames.of_stack(stack) for stack in trace.stacks]
    calls, owner = _tracked(trace, frames, stacks, meanings)
    confidence = np.full(len(trace.events), CERTAIN, np.uint8)
    operator = _with_backward(trace, frames, meanings, calls, owner, confidence)
    link_recomputed(calls, frames)
    names = Names(frames)
    last = int(allocates[-1])
    is_in_call = owner[last] >= 0 and not meanings[trace.events.stack[last]].is_backward
    at_end = calls[owner[last]] if is_in_call else None
    names.name(calls, at_end)
    of_gradients = Gradients(trace, frames, stacks, meanings, calls)
    of_gradients.refine(owner, confidence, operator)
    of_gradient = np.flatnonzero(
        (trace.events.kind == Kind.ALLOC) & (trace.events.category == Category.GRADIENT) & (owner >= 0)
    )
    sizes = trace.events.bytes[of_gradient].tolist()
    gradients = registered(map(Gradient, sizes, (calls[row] for row in owner[of_gradient].tolist())))
    complete = _with_parameters(trace, frames, stacks, calls, owner, confidence, gradients)
    unname_conditional(calls, complete)
    own = OwnModules(frames, models, at_end)
    own.match(calls)
    modules = ModuleTree()
    owner[trace.events.category == Category.WORKSPACE] = -1
    rows = np.zeros(len(calls) + 1, np.int32)  # owner -1 reads the last
    for row in np.unique(owner[owner >= 0]).tolist():
        rows[row] = modules.add(own.fqn(calls[row]), names.class_of(calls[row]))
    module = rows[owner]
    start = trace.start
    before = np.zeros(len(start), np.int32)
    first_device = np.unique(trace.events.device[of_gradient])[:1]  # all have copies of parameters
    for device in first_device:
        category = np.where(start.device == device, start.category, Category.UNKNOWN)
        for blocks, name in before_the_window(category, start.bytes, gradients):
            before[blocks] = modules.add(name, "") if name else 0
    table = modules.as_tuple()
    sure = np.array([_confidence(m.key) for m in table], np.uint8)
    start = replace(start, module=before, module_confidence=sure[before])
    named = replace(
        trace, modules=table, start=start, paired=attributed(trace.allocations, trace.events, start)
    )
    return _with_modules(named, module, np.minimum(sure[module], confidence))


def _tracked(
    trace: MemoryTrace, frames: Frames, stacks: Sequence[tuple[int, ...]], meanings: Sequence[Meaning]
) -> tuple[list[Call], Int32]:
    """Return all module calls, and the row of the call in which each event allocates: -1 for none."""
    kind = trace.events.kind
    rows = np.flatnonzero(code_mask((Kind.ALLOC, Kind.FREE_REQUESTED, Kind.FREE_COMPLETED))[kind])
    stack, size = trace.own_stacks[rows], trace.events.bytes[rows]
    # The stack of an only output again, with any size, is the next module's.
    is_output = np.array(
        [bool(ONE_OUTPUT & m.operators) and CAST not in m.operators for m in meanings] + [False]
    )
    size = np.where(is_output[stack], 0, size)
    owner = np.full(len(trace.events), -1, np.int32)
    calls, owner[rows] = follow_all(frames, stacks, kind[rows] == Kind.ALLOC, stack, size)
    return calls, owner


def _with_backward(
    trace: MemoryTrace,
    frames: Frames,
    meanings: Sequence[Meaning],
    calls: Sequence[Call],
    owner: Int32,
    confidence: UInt8,
) -> Int32:
    """Add the calls of what autograd's nodes allocate, and how sure they are.

    Returns:
        As `Matched.operator`, for all events.
    """
    operator = np.full(len(owner), -1, np.int32)
    if not any(meaning.node for meaning in meanings):
        return operator
    events = trace.events
    is_backward = np.array([*(meaning.is_backward for meaning in meanings), False])[events.stack]
    by_engine = np.array([meaning.is_backward and not meaning.node for meaning in meanings] + [False])
    # Where the stack is that of the allocation: what a forward allocated, or another node than the last.
    nodes = [*(meaning.node for meaning in meanings), ""]
    node = np.unique(nodes, return_inverse=True)[1][events.stack]
    last = np.maximum.accumulate(np.where(events.kind == Kind.ALLOC, np.arange(len(node)), 0))
    is_repeated = trace.own_stacks != events.stack
    of_engine = np.where(is_repeated, ~is_backward | (node != node[last]), by_engine[events.stack])
    is_free = (events.kind == Kind.FREE_REQUESTED) & of_engine
    is_alloc = (events.kind == Kind.ALLOC) & (events.stack >= 0) & ~np.isin(events.category, OF_NO_NODE)
    is_alloc &= ~is_backward | (owner < 0)  # else checkpointing runs a forward again
    containers = {call.row for call in calls if is_sequential(call.inside, frames)}
    backward = Backward(calls, meanings, containers)
    for device in range(len(trace.devices)):
        rows = np.flatnonzero((is_alloc | is_free) & (events.device == device))
        matched = backward.match(events.stack[rows], events.bytes[rows], owner[rows], is_free[rows])
        is_matched = matched.owner >= 0
        owner[rows[is_matched]] = matched.owner[is_matched]
        confidence[rows[is_matched]] = matched.evidence[is_matched]
        operator[rows] = matched.operator
    return operator


def _with_parameters(
    trace: MemoryTrace,
    frames: Frames,
    stacks: Sequence[tuple[int, ...]],
    calls: list[Call],
    owner: Int32,
    confidence: UInt8,
    gradients: Sequence[Gradient],
) -> set[tuple[str, tuple[int, ...]]]:
    """Add the calls of parameters, buffers and optimizer state, and how sure they are.

    Returns:
        The loops that surely skipped no module, as `complete_loops` does.
    """
    events = trace.events
    is_alloc = events.kind == Kind.ALLOC
    size = events.bytes
    if not gradients:
        return set()
    depth = [sum(frames.all[n].role == Role.APPLY for n in stack) for stack in stacks]
    depths = np.array([*depth, 0])[events.stack]
    moved = np.flatnonzero(is_alloc & (depths > 0))
    parts = list(map(Moved, moved.tolist(), size[moved].tolist(), depths[moved].tolist()))
    of_moved = match_moved(parts, gradients, calls)
    for event, call in of_moved.items():
        owner[event] = call.row
    confidence[moved] = OF_PARAMETER
    state = np.flatnonzero(is_alloc & (events.category == Category.OPTIMIZER_STATE))
    confidence[state] = OF_PARAMETER
    parameters = in_parameter_order(
        [(part.size, part.depth, of_moved.get(part.event)) for part in parts]
        or [(gradient.size, depth_of(gradient), gradient.call) for gradient in gradients]
    )
    of_state = match_state(
        list(zip(state.tolist(), size[state].tolist(), strict=True)),
        parameters,
        calls,
        is_order_known=bool(parts),
    )
    for event, call in of_state.items():
        owner[event] = call.row
    return complete_loops(parts, gradients, of_moved)


def _confidence(key: str) -> int:
    if key == NOT_NAMED:
        return 0
    if NOT_KNOWN in key:
        return IN_PART
    return BY_SITE if ":" in key else BY_TEXT


def _with_too_many(trace: MemoryTrace, count: int) -> MemoryTrace:
    """Return a trace with a note that its stacks name modules, and are too many to follow."""
    if not any("_call_impl" in frame for stack in trace.stacks for frame in stack):
        return trace
    note = Note(
        f"Call stacks show modules, but {len(trace.stacks):,} distinct ones, with {count:,} frames, are too "
        f"many for {len(trace.events):,} events: no modules are inferred.",
        "too_many_stacks",
    )
    return replace(trace, notes=(*trace.notes, note))


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
