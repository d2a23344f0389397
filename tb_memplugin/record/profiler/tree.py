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
from collections.abc import Callable, Iterable, Iterator, Sequence

from tb_memplugin.record.profiler.roles import NODE_PREFIX, Role, role_of
from tb_memplugin.record.profiler.tree_columns import (
    ProfilerTree,
    pack_maker,
    pack_memory,
    pack_node,
    pack_operator,
    pack_position,
)
from tb_memplugin.record.tensor_metadata import OperatorTensors
from tb_memplugin.record.torch_private.profiler import (
    CALLER,
    AllocationFields,
    Event,
    KinetoFields,
    OperatorFields,
    allocated_after,
    allocation_address,
    allocation_size,
    event_children,
    event_correlation,
    event_duration,
    event_fields,
    event_name,
    event_start,
    event_thread,
    operator_sequence,
)


def walk(
    roots: Iterable[Event],
    *,
    module_entries: Sequence[int] = (),
    outer_calls: tuple[Sequence[int], Sequence[int]] = ((), ()),
    keep_fields: bool = False,
    with_stack: bool = False,
    tensors: OperatorTensors | None = None,
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
        tensors: gets what operators received, if the profile recorded shapes.
    """
    tree = ProfilerTree()
    see = None if tensors is None else tensors.see
    by_thread: dict[int, list[Event]] = {}
    for root in roots:
        by_thread.setdefault(event_thread(root), []).append(root)
    if with_stack:
        first = [frame for events in by_thread.values() for frame in _first_frames(events[0])]
        tree.frames.were_running(first, _first_call)
    for thread, events in by_thread.items():
        _walk_thread(thread, events, tree, module_entries, outer_calls, keep_fields, with_stack, see)
    return tree


def _first_frames(event: Event) -> Iterator[tuple[str, int, Event]]:
    """Yield an event and what it called first, and so on, as long as these are Python functions."""
    while (name := _name_of(event)) and role_of(name, event) is Role.CALL:
        yield name, event_start(event), event
        inner = event_children(event)
        if not inner:
            break
        event = inner[0]


def _first_call(event: Event) -> int:
    inner = event_children(event)
    return int(event_start(inner[0]) if inner else event_start(event) + event_duration(event))


_OUTSIDE, _IN_OPTIMIZER, _IN_NODE = 0, 1, 2
_PLAIN, _OPERATOR, _NODE = Role.PLAIN, Role.OPERATOR, Role.NODE
_RANGE, _OPTIMIZER, _CALL, _ACCUMULATE = Role.RANGE, Role.OPTIMIZER, Role.CALL, Role.ACCUMULATE


def _walk_thread(  # noqa: C901  # its parts as functions made the walk slower
    thread: int,
    events: list[Event],
    tree: ProfilerTree,
    module_entries: Sequence[int],
    outer_calls: tuple[Sequence[int], Sequence[int]],
    keep_fields: bool,
    with_stack: bool,
    see: Callable[[Event], None] | None,
) -> None:
    """Walk one thread's events and those below them. An inner loop searches operators for allocations only.

    The nodes that a device's autograd thread runs are below an event of the thread that called backward, so
    each node's own thread is read from the node (torch: csrc/profiler/collection.cpp, `build_tree`).
    """
    roles: dict[str, Role] = {}
    memory, positions, keep = tree.memory, tree.positions, tree.fields.append
    remember, add_position, add_maker = memory.append, positions.append, tree.makers.append
    names, node_names, called = tree.operator_names, tree.node_names, tree.frames.add
    since, until, in_call = 0, 0, False  # the span around the last operator in which `in_call` holds
    running = thread
    pending = [(events, -1, -1, _OUTSIDE, -1, thread)]
    while pending:
        children, operator, node, where, frame, thread = pending.pop()
        if thread != running:
            tree.end_run(running)
            running = thread
        position = -1
        for event in children:
            duration = event_duration(event)
            if not duration:
                fields = event_fields(event)
                if type(fields) is AllocationFields:
                    if position < 0:
                        position = len(positions)
                        add_position(pack_position(operator, node, frame))
                    start, address = event_start(event), allocation_address(fields)
                    remember(
                        pack_memory(
                            start, address, allocation_size(fields), allocated_after(fields), position
                        )
                    )
                    if keep_fields:
                        keep(fields)
                    continue
            inner = event_children(event)
            if see is not None and event_correlation(event):
                see(event)
            # A Python function that called nothing, or an operator where no nodes are made.
            if not inner and ((where and not with_stack) or not event_correlation(event)):
                continue
            try:  # here, not in a function: this is the loop that takes the time
                name = event_name(event)
            except UnicodeDecodeError:
                name = _name_of(event)
            role = roles.get(name)
            if role is None:
                role = roles[name] = role_of(name, event)
            if role is _CALL:
                around = _at_call(event, frame, tree)
                pending.append((inner, operator, node, where, called(name, around), thread))
            elif role is _PLAIN or role is _OPERATOR or (role is _ACCUMULATE and not _runs_hooks(inner)):
                start, sequence, loose = 0, -2, False
                if where == _OUTSIDE:
                    start = event_start(event)
                    if not since <= start < until:
                        since, until, in_call = _span_around(start, outer_calls)
                    loose = not in_call
                if with_stack or loose:
                    sequence = operator_sequence(event_fields(event))
                    # An operator may have made an autograd node, unless it is the own function of a node.
                    own = node >= 0 and node_names[node] == NODE_PREFIX + name
                    if with_stack and sequence >= 0 and not own:
                        add_maker(pack_maker(start or event_start(event), sequence, frame))
                if not inner and not loose:
                    continue
                row, before = len(names), len(memory)
                used = loose
                if role is _OPERATOR and module_entries:
                    start = start or event_start(event)
                    if _entered(start, start + duration, module_entries):
                        pending.append((inner, row, node, where, frame, thread))
                        inner, used = [], True
                below, its_position = [inner], len(positions)
                add_position(pack_position(row, node, frame))
                while below:
                    for deeper in below.pop():
                        if event_duration(deeper):
                            inner = event_children(deeper)
                            if see is not None and event_correlation(deeper):
                                see(deeper)
                            if inner:
                                if with_stack and not event_correlation(deeper):
                                    _look_inside(deeper, (row, node), frame, tree, keep_fields, see)
                                else:
                                    below.append(inner)
                            continue
                        fields = event_fields(deeper)
                        if type(fields) is AllocationFields:
                            remember(
                                pack_memory(
                                    event_start(deeper),
                                    allocation_address(fields),
                                    allocation_size(fields),
                                    allocated_after(fields),
                                    its_position,
                                )
                            )
                            if keep_fields:
                                keep(fields)
                        else:
                            below.append(event_children(deeper))
                if not used and len(memory) == before:
                    continue
                if loose and sequence < 0 and role is _OPERATOR:
                    sequence = _first_number(event)
                start = start or event_start(event)
                names.append(name)
                tree.operator_rows.append(
                    pack_operator(start, start + duration, node, sequence if loose else -2)
                )
            elif role is _NODE:
                its_thread = event_thread(event)
                start, sequence = event_start(event), operator_sequence(event_fields(event))
                if sequence < 0 and len(inner) > 1:
                    sequence = number_behind_hooks(name.removeprefix(NODE_PREFIX), inner)
                pending.append((inner, -1, len(node_names), _IN_NODE, frame, its_thread))
                node_names.append(name)
                tree.node_rows.append(pack_node(start, start + duration, node, sequence, its_thread))
            else:
                below_it = where
                # Kineto adds a range with the same name for a step or an optimizer on the GPU's timeline.
                named = role is not _RANGE and role is not _ACCUMULATE
                if named and type(event_fields(event)) is not KinetoFields:
                    start = event_start(event)
                    tree.ranges.setdefault(role, []).append((name, start, start + duration))
                    if role is _OPTIMIZER and not _calls_closure(start, duration, inner, outer_calls[0]):
                        below_it = _IN_OPTIMIZER
                if inner:
                    around = _at_call(event, frame, tree) if role is Role.MODULE else frame
                    pending.append((inner, operator, node, below_it, around, thread))
    tree.end_run(running)


def _look_inside(
    call: Event,
    owner: tuple[int, int],
    frame: int,
    tree: ProfilerTree,
    keep_fields: bool,
    see: Callable[[Event], None] | None,
) -> None:
    """Collect the allocations below a Python function that an operator called (`__torch_dispatch__`).

    Args:
        owner: the rows of the operator and of the node around it.
        frame: the key of the frame around the operator.
    """
    below = [([call], frame)]
    while below:
        children, around = below.pop()
        position = len(tree.positions)
        tree.positions.append(pack_position(*owner, around))
        for event in children:
            if event_duration(event):
                inner, is_operator = event_children(event), event_correlation(event)
                if see is not None and is_operator:
                    see(event)
                if inner:
                    below.append((inner, around if is_operator else _frame_of(event, around, tree)))
                continue
            fields = event_fields(event)
            if type(fields) is AllocationFields:
                start, address = event_start(event), allocation_address(fields)
                tree.memory.append(
                    pack_memory(start, address, allocation_size(fields), allocated_after(fields), position)
                )
                if keep_fields:
                    tree.fields.append(fields)
            else:
                below.append((event_children(event), around))


def _first_number(event: Event) -> int:
    """Return the sequence number of the first operator inside an event that has one, -1 for none.

    A region of torch.compile has none itself.
    """
    pending = list(reversed(event_children(event)))
    while pending:
        inner = pending.pop()
        number: int = getattr(event_fields(inner), "sequence_number", -1)
        if number >= 0:
            return number
        pending.extend(reversed(event_children(inner)))
    return -1


def _frame_of(event: Event, outer: int, tree: ProfilerTree) -> int:
    """Return the key of a Python function's frame; that of the frame around it for other events."""
    name = _name_of(event)
    role = role_of(name, event)
    if role is Role.CALL:
        return tree.frames.add(name, _at_call(event, outer, tree))
    return _at_call(event, outer, tree) if role is Role.MODULE else outer


def _at_call(event: Event, frame: int, tree: ProfilerTree) -> int:
    """Return the key of a frame (-1: none) at the line where it calls a Python function's event."""
    caller = getattr(event_fields(event), CALLER, None) if frame >= 0 else None
    return frame if caller is None else tree.frames.at_call(frame, caller)


def _name_of(event: Event) -> str:
    """Return an event's name, with invalid bytes replaced.

    torch 2.13 keeps no copy of a Python function's name. If the function no longer exists when names are
    read (it came from `exec`, or a module was imported meanwhile), the name may consist of other bytes.
    """
    try:
        name: str = event_name(event)
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


def _runs_hooks(inside: list[Event]) -> bool:
    """Whether hooks run where a gradient is added: its own operators are one, or two that make a copy."""
    if len(inside) < 2:
        return False
    names = [_name_of(event) for event in inside if event_duration(event)]
    return len(names) > (2 if names[:2] == ["aten::new_empty_strided", "aten::copy_"] else 1)


def _entered(start: int, end: int, module_entries: Sequence[int]) -> bool:
    """Whether a module was entered between two times."""
    following = bisect_left(module_entries, start)
    return following < len(module_entries) and module_entries[following] < end


def number_behind_hooks(own: str, inside: Iterable[Event]) -> int:
    """Return a node's sequence number, taken from the event of its own function; -1 for none.

    torch takes the number from the first event inside the node (csrc/profiler/collection.cpp,
    `set_autograd_evaluate`). If a tensor has a hook, that event is the hook's, and the node has no number.
    """
    numbers = (
        fields.sequence_number
        for event in inside
        if isinstance(fields := event.extra_fields, OperatorFields) and event.name == own
    )
    return max(numbers, default=-1)
