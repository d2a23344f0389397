"""Walk over torch.profiler's event tree: the only loop that runs once per event.

Creating a Python object for each event takes more than half of the time of `tensorboard_trace_handler`.
Reading a field takes 0.1 microseconds while the event's object exists, and 3 otherwise. So the loop reads as
few fields as possible, while it holds the event, and keeps no event. An event with a duration is an operator
or a range; one without is taken for an allocation unless its fields show otherwise.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from torch._C import _profiler

from tb_memplugin.sources.profiler.node_numbers import number_behind_hooks
from tb_memplugin.sources.python_frames import CallTree
from tb_memplugin.trace.tables import Int64

Event = Any
"""A `torch._C._profiler._ProfilerEvent`; the class is not typed upstream."""


def getter(owner: Any, name: str) -> Callable[[Any], Any]:
    """Return the getter function of a property, to save the attribute look-up at every event."""
    function: Callable[[Any], Any] = getattr(owner, name).fget
    return function


_get_children = getter(_profiler._ProfilerEvent, "children")
_get_name = getter(_profiler._ProfilerEvent, "name")
_get_start = getter(_profiler._ProfilerEvent, "start_time_ns")
_get_duration = getter(_profiler._ProfilerEvent, "duration_time_ns")
_get_thread = getter(_profiler._ProfilerEvent, "start_tid")
_get_fields = getter(_profiler._ProfilerEvent, "extra_fields")
_Allocation = _profiler._ExtraFields_Allocation
_Kineto = _profiler._ExtraFields_Kineto
_get_address = getter(_Allocation, "ptr")
_get_size = getter(_Allocation, "alloc_size")
_get_total = getter(_Allocation, "total_allocated")

NODE_PREFIX = "autograd::engine::evaluate_function: "
STEP_PREFIX = "ProfilerStep#"
SHARDING_PREFIXES = ("FSDP::all_gather", "FSDP::post_backward_reduce")
_STEP = re.compile(r"ProfilerStep#[0-9]{1,18}\Z")
"""Matches the names of steps only: `ProfilerStep#warmup` would be a range that the user opened."""
OPTIMIZER_PREFIX = "Optimizer.step#"
MODULE_PREFIX = "nn.Module: "
_PLAIN_PREFIXES = ("aten::", "prims::", "quantized::", "c10d::")


class Role(IntEnum):
    """The role of an event that has a duration."""

    PLAIN = 0
    """An operator that never calls a module, so that only allocations are searched inside it."""
    OPERATOR = 1
    NODE = 2
    """An autograd node being evaluated."""
    STEP = 3
    OPTIMIZER = 4
    MODULE = 5
    """The Python frame of a module call (only with `with_stack`)."""
    RANGE = 6
    """A range that the user opened, or another kind of event. Events inside count as if it were not there."""
    CALL = 7
    """A Python function (only with `with_stack`). Events inside count as if it were not there."""
    SHARDING = 8
    """FSDP2 gathers parameters or reduces gradients."""


@dataclass(slots=True)
class ProfilerTree:
    """The result of the walk, in no particular order; times in epoch nanoseconds.

    `operator_*` are the outermost operators that allocate, free, or may have made autograd nodes.
    `operator_sequence` is the autograd sequence number of operators outside all autograd nodes, optimizer
    steps and outermost module calls; -2 marks the others. `node_*` are autograd nodes.
    `memory` contains four numbers per allocator event: time, address, signed bytes, and the allocator's
    total after it. `around` contains four numbers per run of consecutive events in the same place: the
    length of `memory` when the run ended, the row of the outermost operator, the row of the innermost
    autograd node, and the innermost Python frame (a key of `frames`), each -1 for none. `fields` contains
    the events' fields if devices other than the CPU may occur.
    `makers` contains, if stacks were recorded, three numbers per operator that may have made an autograd
    node: its start, its sequence number and the frame around it. `threads` contains, for each run of events
    on one of the profiler's threads, the thread and how many rows of memory, operators and makers had been
    found when the run ended.
    """

    memory: list[int] = field(default_factory=list)
    around: list[int] = field(default_factory=list)
    fields: list[Any] = field(default_factory=list)
    operator_names: list[str] = field(default_factory=list)
    operator_start: list[int] = field(default_factory=list)
    operator_end: list[int] = field(default_factory=list)
    operator_node: list[int] = field(default_factory=list)
    operator_sequence: list[int] = field(default_factory=list)
    node_names: list[str] = field(default_factory=list)
    node_start: list[int] = field(default_factory=list)
    node_end: list[int] = field(default_factory=list)
    node_parent: list[int] = field(default_factory=list)
    node_sequence: list[int] = field(default_factory=list)
    node_thread: list[int] = field(default_factory=list)
    ranges: dict[Role, list[tuple[str, int, int]]] = field(default_factory=dict)
    makers: list[int] = field(default_factory=list)
    frames: CallTree = field(default_factory=CallTree)
    threads: list[tuple[int, int, int, int]] = field(default_factory=list)

    def memory_columns(self) -> tuple[Int64, ...]:
        """Return allocator events as columns: time, address, signed bytes, total, operator, node, frame."""
        told = np.fromiter(self.memory, np.int64, len(self.memory)).reshape(-1, 4).T
        until, *around = np.fromiter(self.around, np.int64, len(self.around)).reshape(-1, 4).T
        count = np.diff(until // 4, prepend=0)
        return (*told, *(np.repeat(column, count) for column in around))

    def maker_columns(self) -> tuple[Int64, Int64, Int64]:
        """Return start, autograd sequence number and frame of `makers` as columns."""
        start, sequence, frame = np.fromiter(self.makers, np.int64, len(self.makers)).reshape(-1, 3).T
        return start, sequence, frame

    def end_run(self, thread: int) -> None:
        """Assign everything found since the end of the last run to a thread."""
        self.threads.append((thread, len(self.memory) // 4, len(self.operator_names), len(self.makers) // 3))

    def thread_of_nodes(self) -> Int64:
        """Return the profiler's thread of each node."""
        return np.array(self.node_thread, np.uint64).view(np.int64)  # 2**64 - 1: none

    def thread_of(self, kind: int) -> Int64:
        """Return the profiler's thread of each row of memory (kind 1), operators (2) or makers (3)."""
        numbers = np.array([row[0] for row in self.threads], np.uint64).view(np.int64)  # see thread_of_nodes
        ends = np.array([row[kind] for row in self.threads], np.int64)
        return np.repeat(numbers, np.diff(ends, prepend=0))

    def range_spans(self, role: Role) -> tuple[Int64, Int64]:
        """Return the starts and ends of the ranges with a role, sorted by start."""
        found = sorted((start, end) for _, start, end in self.ranges.get(role, ()))
        return np.array([start for start, _ in found], np.int64), np.array(
            [end for _, end in found], np.int64
        )


def walk(
    roots: Iterable[Event],
    *,
    module_entries: Sequence[int] = (),
    outer_calls: tuple[Sequence[int], Sequence[int]] = ((), ()),
    keep_fields: bool = False,
    with_stack: bool = False,
) -> ProfilerTree:
    """Visit every event once and return what was found.

    Args:
        roots: `prof.profiler.kineto_results.experimental_event_tree()`.
        module_entries: epoch nanoseconds at which modules were entered, ascending. If a module was entered
            during an operator (as in activation checkpointing), its allocations are attributed to the
            operators inside it.
        outer_calls: starts and ends of the outermost module calls, ascending.
        keep_fields: keep the fields of allocations, to read devices and reserves.
        with_stack: whether the profile recorded Python frames; if so, keep the frames around allocations
            and around operators that may have made autograd nodes.
    """
    tree = ProfilerTree()
    by_thread: dict[int, list[Event]] = {}
    for root in roots:
        by_thread.setdefault(_get_thread(root), []).append(root)
    for thread, events in by_thread.items():
        _walk_thread(thread, events, tree, module_entries, outer_calls, keep_fields, with_stack)
    return tree


_OUTSIDE, _IN_OPTIMIZER, _IN_NODE = 0, 1, 2
_PLAIN, _OPERATOR, _NODE = Role.PLAIN, Role.OPERATOR, Role.NODE
_RANGE, _OPTIMIZER, _CALL = Role.RANGE, Role.OPTIMIZER, Role.CALL


def _walk_thread(
    thread: int,
    events: list[Event],
    tree: ProfilerTree,
    module_entries: Sequence[int],
    outer_calls: tuple[Sequence[int], Sequence[int]],
    keep_fields: bool,
    with_stack: bool,
) -> None:
    """Walk one thread's events and those below them. An inner loop searches operators for allocations only.

    The nodes that a device's autograd thread runs are below an event of the thread that called backward, so
    each node's own thread is read from the node (torch: csrc/profiler/collection.cpp, `build_tree`).
    """
    roles: dict[str, Role] = {}
    memory, around, keep = tree.memory, tree.around, tree.fields.append
    remember, told = memory.extend, around.extend
    names, starts, ends = tree.operator_names, tree.operator_start, tree.operator_end
    nodes, sequences = tree.operator_node, tree.operator_sequence
    called = tree.frames.add
    running = thread
    pending = [(events, -1, -1, _OUTSIDE, -1, thread)]
    while pending:
        children, operator, node, where, frame, thread = pending.pop()
        if thread != running:
            tree.end_run(running)
            running = thread
        for event in children:
            duration = _get_duration(event)
            if not duration:
                fields = _get_fields(event)
                if type(fields) is _Allocation:
                    remember((_get_start(event), _get_address(fields), _get_size(fields), _get_total(fields)))
                    told((len(memory), operator, node, frame))
                    if keep_fields:
                        keep(fields)
                    continue
            inner = _get_children(event)
            try:  # here, not in a function: this is the loop that takes the time
                name = _get_name(event)
            except UnicodeDecodeError:
                name = _name_of(event)
            role = roles.get(name)
            if role is None:
                role = roles[name] = _role(name, event)
            if role is _PLAIN or role is _OPERATOR:
                loose = where == _OUTSIDE and not _inside(_get_start(event), outer_calls)
                if with_stack:
                    _note_maker(event, name, node, frame, tree)
                if not inner and not loose:
                    continue
                row, found = len(names), len(memory)
                start = 0
                if role is _OPERATOR and module_entries:
                    start = _get_start(event)
                    if _entered(start, start + duration, module_entries):
                        pending.append((inner, row, node, where, frame, thread))
                        inner, loose = [], True
                if with_stack:
                    _look_inside(inner, (row, node), frame, tree, roles, keep_fields)
                below = [] if with_stack else [inner]
                while below:
                    for deeper in below.pop():
                        if _get_duration(deeper):
                            inner = _get_children(deeper)
                            if inner:
                                below.append(inner)
                            continue
                        fields = _get_fields(deeper)
                        if type(fields) is _Allocation:
                            time_ns, address = _get_start(deeper), _get_address(fields)
                            remember((time_ns, address, _get_size(fields), _get_total(fields)))
                            if keep_fields:
                                keep(fields)
                        else:
                            below.append(_get_children(deeper))
                if len(memory) != found:
                    if not with_stack:
                        told((len(memory), row, node, -1))
                elif not loose:
                    continue
                start = start or _get_start(event)
                names.append(name)
                starts.append(start)
                ends.append(start + duration)
                nodes.append(node)
                alone = loose and where == _OUTSIDE and not _inside(start, outer_calls)
                sequences.append(_get_fields(event).sequence_number if alone else -2)
            elif role is _NODE:
                its_thread = _get_thread(event)
                tree.node_thread.append(its_thread)
                tree.node_names.append(name)
                start = _get_start(event)
                tree.node_start.append(start)
                tree.node_end.append(start + duration)
                tree.node_parent.append(node)
                sequence = _get_fields(event).sequence_number
                if sequence < 0 and len(inner) > 1:
                    sequence = number_behind_hooks(name.removeprefix(NODE_PREFIX), inner)
                tree.node_sequence.append(sequence)
                pending.append((inner, -1, len(tree.node_names) - 1, _IN_NODE, frame, its_thread))
            elif role is _CALL:
                if inner:
                    pending.append((inner, operator, node, where, called(name, frame), thread))
            else:
                below_it = where
                # Kineto adds a range with the same name for a step or an optimizer on the GPU's timeline.
                if role is not _RANGE and type(_get_fields(event)) is not _Kineto:
                    start = _get_start(event)
                    tree.ranges.setdefault(role, []).append((name, start, start + duration))
                    if role is _OPTIMIZER and not _calls_closure(start, duration, inner, outer_calls[0]):
                        below_it = _IN_OPTIMIZER
                if inner:
                    pending.append((inner, operator, node, below_it, frame, thread))
    tree.end_run(running)


def _look_inside(
    children: list[Event],
    owner: tuple[int, int],
    frame: int,
    tree: ProfilerTree,
    roles: dict[str, Role],
    keep_fields: bool,
) -> None:
    """Collect the allocations below an operator, with the Python frames it called (`__torch_dispatch__`).

    Args:
        owner: the rows of the operator and of the node around it.
        frame: the key of the frame around the operator.
        roles: the roles of known names, to which new ones are added.
    """
    memory = tree.memory
    below = [(children, frame)]
    while below:
        children, around = below.pop()
        found = len(memory)
        for event in children:
            inner = _get_children(event)
            if inner:
                name = _name_of(event)
                role = roles.get(name)
                if role is None:
                    role = roles[name] = _role(name, event)
                below.append((inner, tree.frames.add(name, around) if role is _CALL else around))
            elif not _get_duration(event):
                fields = _get_fields(event)
                if type(fields) is _Allocation:
                    time_ns, address = _get_start(event), _get_address(fields)
                    memory.extend((time_ns, address, _get_size(fields), _get_total(fields)))
                    if keep_fields:
                        tree.fields.append(fields)
        if len(memory) != found:
            tree.around.extend((len(memory), *owner, around))


def _name_of(event: Event) -> str:
    """Return an event's name, with invalid bytes replaced.

    torch 2.13 keeps no copy of a Python function's name. If the function no longer exists when names are
    read (it came from `exec`, or a module was imported meanwhile), the name may consist of other bytes.
    """
    try:
        name: str = _get_name(event)
    except UnicodeDecodeError as garbled:
        name = garbled.object.decode("utf-8", "replace")
    return name


def _note_maker(event: Event, name: str, node: int, frame: int, tree: ProfilerTree) -> None:
    """Add an operator with a sequence number to `makers`, unless it is the own function of a node."""
    sequence = _get_fields(event).sequence_number
    if sequence >= 0 and (node < 0 or tree.node_names[node] != NODE_PREFIX + name):
        tree.makers.extend((_get_start(event), sequence, frame))


def _inside(time_ns: int, calls: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Whether a time lies in one of several disjoint spans."""
    place = bisect_right(calls[0], time_ns) - 1
    return place >= 0 and time_ns < calls[1][place]


def _calls_closure(start: int, duration: int, inside: list[Event], entries: Sequence[int]) -> bool:
    """Whether an optimizer step runs a model: a module is entered in it, or, without entries, a node runs."""
    if entries:
        return _entered(start, start + duration, entries)
    return any(_name_of(event).startswith(NODE_PREFIX) for event in inside)


def _entered(start: int, end: int, module_entries: Sequence[int]) -> bool:
    """Whether a module was entered between two times."""
    following = bisect_left(module_entries, start)
    return following < len(module_entries) and module_entries[following] < end


def _role(name: str, event: Event) -> Role:
    if name.startswith(NODE_PREFIX):
        return Role.NODE
    if _STEP.match(name):
        return Role.STEP
    if name.startswith(OPTIMIZER_PREFIX):
        return Role.OPTIMIZER
    if name.startswith(_PLAIN_PREFIXES):
        return Role.PLAIN
    if name == "PythonDispatchMode":  # such as FlopCounterMode; ranges of steps and optimizers may be inside
        return Role.RANGE
    if name.startswith(SHARDING_PREFIXES):
        return Role.SHARDING
    fields = _get_fields(event)
    if isinstance(fields, _profiler._ExtraFields_TorchOp):
        user = fields.scope == _profiler.RecordScope.USER_SCOPE and not name.startswith(
            "Torch-Compiled Region"
        )
        return Role.RANGE if user else Role.OPERATOR
    if not isinstance(fields, (_profiler._ExtraFields_PyCall, _profiler._ExtraFields_PyCCall)):
        return Role.RANGE
    return Role.MODULE if name.startswith(MODULE_PREFIX) else Role.CALL
