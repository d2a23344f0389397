"""The walk over torch.profiler's event tree: the only loop that runs once per event.

Making a Python object for each event is about half the time that `tensorboard_trace_handler` takes,
so the loop asks as little as it can: the children of every event, the name of events without children
(is it an allocation?), and more only of the outermost operators. Everything else is numpy afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from torch._C import _profiler

from tb_memplugin.trace.tables import Int64

Event = Any
"""A `torch._C._profiler._ProfilerEvent`; the class is not typed upstream."""

_get_children = _profiler._ProfilerEvent.children.fget
_get_name = _profiler._ProfilerEvent.name.fget
_get_start = _profiler._ProfilerEvent.start_time_ns.fget
_get_end = _profiler._ProfilerEvent.end_time_ns.fget
_get_thread = _profiler._ProfilerEvent.start_tid.fget
_get_fields = _profiler._ProfilerEvent.extra_fields.fget

NODE_PREFIX = "autograd::engine::evaluate_function: "
STEP_PREFIX = "ProfilerStep#"
OPTIMIZER_PREFIX = "Optimizer.step#"
MODULE_PREFIX = "nn.Module: "
MEMORY_NAME = "[memory]"
OOM_NAME = "[OutOfMemory]"
_NOT_CALLING_BACK = ("aten::", "prims::", "quantized::", "c10d::")
"""Operators of these namespaces never call a module, so their insides need no second look."""


class Role(IntEnum):
    """What an event means to us."""

    MEMORY = 0
    OPERATOR = 1
    NODE = 2
    """An autograd node being evaluated."""
    STEP = 3
    OPTIMIZER = 4
    MODULE = 5
    """A module's Python frame (only with `with_stack`)."""
    FRAME = 6
    """A Python frame, or a range that the user opened: what is inside it counts as not enclosed."""
    OOM = 7


@dataclass(slots=True)
class ProfilerTree:
    """What the walk found. `memory`, `operators`, ... hold the profiler's event objects.

    `memory_operator` and `memory_node` are rows in `operators` and `nodes`, -1 for none: the
    outermost operator and the innermost autograd node around an allocation. `operator_node` is the
    same for operators. Threads are the profiler's own numbers.
    """

    memory: list[Event] = field(default_factory=list)
    memory_operator: list[int] = field(default_factory=list)
    memory_node: list[int] = field(default_factory=list)
    memory_thread: list[int] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)
    operator_names: list[str] = field(default_factory=list)
    operator_node: list[int] = field(default_factory=list)
    operator_thread: list[int] = field(default_factory=list)
    nodes: list[Event] = field(default_factory=list)
    node_names: list[str] = field(default_factory=list)
    node_parent: list[int] = field(default_factory=list)
    node_thread: list[int] = field(default_factory=list)
    steps: list[tuple[str, Event]] = field(default_factory=list)
    optimizer_steps: list[tuple[str, Event]] = field(default_factory=list)
    modules: list[tuple[str, Event, int]] = field(default_factory=list)
    out_of_memory: list[Event] = field(default_factory=list)


def walk(roots: Iterable[Event], module_entries: Sequence[int] = ()) -> ProfilerTree:
    """Visit every event once.

    Args:
        roots: `prof.profiler.kineto_results.experimental_event_tree()`.
        module_entries: epoch nanoseconds at which modules were entered, ascending. An operator during
            which a module was entered (activation checkpointing, say) is looked into, so that
            allocations are named by the operators inside it.
    """
    tree = ProfilerTree()
    roles: dict[str, Role] = {MEMORY_NAME: Role.MEMORY, OOM_NAME: Role.OOM}
    pending: list[tuple[list[Event], int, int, int]] = []
    by_thread: dict[int, list[Event]] = {}
    for root in roots:
        by_thread.setdefault(_get_thread(root), []).append(root)
    for thread, events in by_thread.items():
        pending.append((events, -1, -1, thread))
        while pending:
            children, operator, node, thread = pending.pop()
            for event in children:
                name = _get_name(event)
                role = roles.get(name)
                if role is None:
                    role = roles[name] = _role(name, event)
                if role is Role.MEMORY:
                    tree.memory.append(event)
                    tree.memory_operator.append(operator)
                    tree.memory_node.append(node)
                    tree.memory_thread.append(thread)
                    continue
                inner = _get_children(event)
                if role is Role.OPERATOR:
                    row = len(tree.operators)
                    tree.operators.append(event)
                    tree.operator_names.append(name)
                    tree.operator_node.append(node)
                    tree.operator_thread.append(thread)
                    if not inner:
                        continue
                    if not name.startswith(_NOT_CALLING_BACK) and _encloses(event, module_entries):
                        pending.append((inner, row, node, thread))
                    else:
                        _inside(inner, tree, row, node, thread)
                elif role is Role.NODE:
                    tree.nodes.append(event)
                    tree.node_names.append(name)
                    tree.node_parent.append(node)
                    tree.node_thread.append(thread)
                    pending.append((inner, -1, len(tree.nodes) - 1, thread))
                else:
                    if role is Role.STEP:
                        tree.steps.append((name, event))
                    elif role is Role.OPTIMIZER:
                        tree.optimizer_steps.append((name, event))
                    elif role is Role.MODULE:
                        tree.modules.append((name, event, thread))
                    elif role is Role.OOM:
                        tree.out_of_memory.append(event)
                    if inner:
                        pending.append((inner, operator, node, thread))
    return tree


def _inside(children: list[Event], tree: ProfilerTree, operator: int, node: int, thread: int) -> None:
    """Collect the allocations anywhere inside an operator."""
    memory, found = tree.memory, 0
    pending = [children]
    while pending:
        for event in pending.pop():
            inner = _get_children(event)
            if inner:
                pending.append(inner)
            elif _get_name(event) == MEMORY_NAME:
                memory.append(event)
                found += 1
    tree.memory_operator.extend([operator] * found)
    tree.memory_node.extend([node] * found)
    tree.memory_thread.extend([thread] * found)


def _encloses(event: Event, module_entries: Sequence[int]) -> bool:
    """Whether a module was entered while the event ran."""
    following = bisect_left(module_entries, _get_start(event))
    return following < len(module_entries) and module_entries[following] < _get_end(event)


def _role(name: str, event: Event) -> Role:
    if name.startswith(NODE_PREFIX):
        return Role.NODE
    if name.startswith(STEP_PREFIX):
        return Role.STEP
    if name.startswith(OPTIMIZER_PREFIX):
        return Role.OPTIMIZER
    if name.startswith("aten::"):
        return Role.OPERATOR
    fields = _get_fields(event)
    if isinstance(fields, _profiler._ExtraFields_TorchOp):
        user = fields.scope == _profiler.RecordScope.USER_SCOPE and not name.startswith("Torch-Compiled Region")
        return Role.FRAME if user else Role.OPERATOR
    return Role.MODULE if name.startswith(MODULE_PREFIX) else Role.FRAME


def spans(events: Sequence[Event]) -> tuple[Int64, Int64]:
    """Start and end of events: two int64 arrays, epoch nanoseconds."""
    count = len(events)
    return np.fromiter(map(_get_start, events), np.int64, count), np.fromiter(map(_get_end, events), np.int64, count)


def sequence_numbers(events: Sequence[Event]) -> Int64:
    """The autograd sequence number of operators or nodes, int64; -1 where they have none."""
    numbers = (fields.sequence_number for fields in map(_get_fields, events))
    return np.fromiter(numbers, np.int64, len(events))
