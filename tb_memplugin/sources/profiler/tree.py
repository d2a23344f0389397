"""Walk over torch.profiler's event tree: the only loop that runs once per event.

Creating a Python object for each event takes more than half of the time of `tensorboard_trace_handler`.
Reading a field takes 0.1 microseconds while the event's object exists, and 3 otherwise. So the loop reads as
few fields as possible, while it holds the event, and keeps no event. An event with a duration is an operator,
a range or a Python function; one without is taken for an allocation unless its fields show otherwise. Only
operators and the ranges of `record_function` have a correlation number other than 0 (torch:
csrc/profiler/collection.cpp, `Result::correlationID`).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch._C import _profiler

from tb_memplugin.sources.profiler.node_numbers import number_behind_hooks
from tb_memplugin.sources.profiler.roles import NODE_PREFIX, Event, Role, role_of
from tb_memplugin.sources.python_frames import CallTree
from tb_memplugin.trace.tables import Int64


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
_get_correlation = getter(_profiler._ProfilerEvent, "correlation_id")
_Allocation = _profiler._ExtraFields_Allocation
_Kineto = _profiler._ExtraFields_Kineto
_get_address = getter(_Allocation, "ptr")
_get_size = getter(_Allocation, "alloc_size")
_get_total = getter(_Allocation, "total_allocated")


@dataclass(slots=True)
class ProfilerTree:
    """The result of the walk, in no particular order; times in epoch nanoseconds.

    `operator_*` are the outermost operators that allocate, free, or may have made autograd nodes.
    `operator_sequence` is the autograd sequence number of operators outside all autograd nodes, optimizer
    steps and outermost module calls; -2 marks the others. `node_*` are autograd nodes.
    `memory` contains five numbers per allocator event: time, address, signed bytes, the allocator's total
    after it, and the row of its place. `places` contains, per place in the tree, the row of the outermost
    operator, the row of the innermost autograd node, and the innermost Python frame (a key of `frames`), each
    -1 for none. `fields` contains the events' fields if devices other than the CPU may occur.
    `makers` contains, if stacks were recorded, three numbers per operator that may have made an autograd
    node: its start, its sequence number and the frame around it. `threads` contains, for each run of events
    on one of the profiler's threads, the thread and how many rows of memory, operators and makers had been
    found when the run ended.
    """

    memory: list[int] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)
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
        *columns, place = np.fromiter(self.memory, np.int64, len(self.memory)).reshape(-1, 5).T
        return (*columns, *np.array(self.places, np.int64).T[:, place])

    def maker_columns(self) -> tuple[Int64, Int64, Int64]:
        """Return start, autograd sequence number and frame of `makers` as columns."""
        start, sequence, frame = np.fromiter(self.makers, np.int64, len(self.makers)).reshape(-1, 3).T
        return start, sequence, frame

    def end_run(self, thread: int) -> None:
        """Assign everything found since the end of the last run to a thread."""
        self.threads.append((thread, len(self.memory) // 5, len(self.operator_names), len(self.makers) // 3))

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
    memory, places, keep = tree.memory, tree.places, tree.fields.append
    remember, add_maker = memory.extend, tree.makers.extend
    names, starts, ends = tree.operator_names, tree.operator_start, tree.operator_end
    nodes, sequences = tree.operator_node, tree.operator_sequence
    called = tree.frames.add
    since, until, in_call = 0, 0, False  # the span around the last operator in which `in_call` holds
    running = thread
    pending = [(events, -1, -1, _OUTSIDE, -1, thread)]
    while pending:
        children, operator, node, where, frame, thread = pending.pop()
        if thread != running:
            tree.end_run(running)
            running = thread
        place = -1
        for event in children:
            duration = _get_duration(event)
            if not duration:
                fields = _get_fields(event)
                if type(fields) is _Allocation:
                    if place < 0:
                        place = len(places)
                        places.append((operator, node, frame))
                    start, address = _get_start(event), _get_address(fields)
                    remember((start, address, _get_size(fields), _get_total(fields), place))
                    if keep_fields:
                        keep(fields)
                    continue
            inner = _get_children(event)
            if not inner and not _get_correlation(event):  # a Python function that called nothing
                continue
            try:  # here, not in a function: this is the loop that takes the time
                name = _get_name(event)
            except UnicodeDecodeError:
                name = _name_of(event)
            role = roles.get(name)
            if role is None:
                role = roles[name] = role_of(name, event)
            if role is _CALL:
                pending.append((inner, operator, node, where, called(name, frame), thread))
            elif role is _PLAIN or role is _OPERATOR:
                start, sequence, loose = 0, -2, False
                if where == _OUTSIDE:
                    start = _get_start(event)
                    if not since <= start < until:
                        since, until, in_call = _span_around(start, outer_calls)
                    loose = not in_call
                if with_stack or loose:
                    sequence = _get_fields(event).sequence_number
                    # An operator may have made an autograd node, unless it is the own function of a node.
                    own = node >= 0 and tree.node_names[node] == NODE_PREFIX + name
                    if with_stack and sequence >= 0 and not own:
                        add_maker((start or _get_start(event), sequence, frame))
                if not inner and not loose:
                    continue
                row, found = len(names), len(memory)
                used = loose
                if role is _OPERATOR and module_entries:
                    start = start or _get_start(event)
                    if _entered(start, start + duration, module_entries):
                        pending.append((inner, row, node, where, frame, thread))
                        inner, used = [], True
                below, its_place = [inner], len(places)
                places.append((row, node, frame))
                while below:
                    for deeper in below.pop():
                        if _get_duration(deeper):
                            inner = _get_children(deeper)
                            if inner:
                                if with_stack and not _get_correlation(deeper):
                                    _look_inside(deeper, (row, node), frame, tree, keep_fields)
                                else:
                                    below.append(inner)
                            continue
                        fields = _get_fields(deeper)
                        if type(fields) is _Allocation:
                            time_ns, address = _get_start(deeper), _get_address(fields)
                            remember((time_ns, address, _get_size(fields), _get_total(fields), its_place))
                            if keep_fields:
                                keep(fields)
                        else:
                            below.append(_get_children(deeper))
                if not used and len(memory) == found:
                    continue
                if loose and sequence < 0 and role is _OPERATOR:
                    sequence = _first_number(event)
                start = start or _get_start(event)
                names.append(name)
                starts.append(start)
                ends.append(start + duration)
                nodes.append(node)
                sequences.append(sequence if loose else -2)
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
    call: Event, owner: tuple[int, int], frame: int, tree: ProfilerTree, keep_fields: bool
) -> None:
    """Collect the allocations below a Python function that an operator called (`__torch_dispatch__`).

    Args:
        owner: the rows of the operator and of the node around it.
        frame: the key of the frame around the operator.
    """
    below = [([call], frame)]
    while below:
        children, around = below.pop()
        place = len(tree.places)
        tree.places.append((*owner, around))
        for event in children:
            if _get_duration(event):
                inner = _get_children(event)
                if inner:
                    is_operator = _get_correlation(event)
                    below.append((inner, around if is_operator else _frame_of(event, around, tree)))
                continue
            fields = _get_fields(event)
            if type(fields) is _Allocation:
                time_ns, address = _get_start(event), _get_address(fields)
                tree.memory.extend((time_ns, address, _get_size(fields), _get_total(fields), place))
                if keep_fields:
                    tree.fields.append(fields)
            else:
                below.append((_get_children(event), around))


def _first_number(event: Event) -> int:
    """Return the sequence number of the first operator inside an event that has one, -1 for none.

    A region of torch.compile has none itself.
    """
    pending = list(reversed(_get_children(event)))
    while pending:
        inner = pending.pop()
        number: int = getattr(_get_fields(inner), "sequence_number", -1)
        if number >= 0:
            return number
        pending.extend(reversed(_get_children(inner)))
    return -1


def _frame_of(event: Event, outer: int, tree: ProfilerTree) -> int:
    """Return the key of a Python function's frame; the frame around it for module calls and other ranges."""
    name = _name_of(event)
    return tree.frames.add(name, outer) if role_of(name, event) is Role.CALL else outer


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


def _span_around(time_ns: int, calls: tuple[Sequence[int], Sequence[int]]) -> tuple[int, int, bool]:
    """Return the span around a time that is inside one of several disjoint calls or between two of them.

    Args:
        calls: the starts and ends of the calls, ascending.

    Returns:
        the start of the span, its end (excluded), and whether it is a call.
    """
    starts, ends = calls
    following = bisect_right(starts, time_ns)
    last_end = ends[following - 1] if following else -1
    if time_ns < last_end:
        return starts[following - 1], last_end, True
    return last_end, starts[following] if following < len(starts) else sys.maxsize, False


def _calls_closure(start: int, duration: int, inside: list[Event], entries: Sequence[int]) -> bool:
    """Whether an optimizer step runs a model: a module is entered in it, or, without entries, a node runs."""
    if entries:
        return _entered(start, start + duration, entries)
    return any(_name_of(event).startswith(NODE_PREFIX) for event in inside)


def _entered(start: int, end: int, module_entries: Sequence[int]) -> bool:
    """Whether a module was entered between two times."""
    following = bisect_left(module_entries, start)
    return following < len(module_entries) and module_entries[following] < end
