"""Read the operators, annotations and Python frames of a Kineto trace, and how they nest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tb_memplugin.read.kineto.events import MemoryRows, Threads, Written, arguments_of, indices
from tb_memplugin.read.kineto.fields import time_column, whole_column
from tb_memplugin.trace.tables import Bool, Int64

OPERATOR_CATEGORIES = ("cpu_op", "Operator")
ANNOTATION_CATEGORIES = ("user_annotation",)
FRAME_CATEGORIES = ("python_function", "Python function")
CATEGORIES = (*OPERATOR_CATEGORIES, *ANNOTATION_CATEGORIES, *FRAME_CATEGORIES)
"""The values of `cat` that are read. Where there are two for a kind, the second is from old traces."""

STEP_PREFIX = "ProfilerStep#"
OPTIMIZER_PREFIX = "Optimizer.step#"
NODE_PREFIX = "autograd::engine::evaluate_function: "
MODULE_PREFIX = "nn.Module: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The function of nodes that add a gradient to that of a parameter."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges on all threads: columns of equal length, parents before the ranges that they enclose.

    `parent` is the row of the innermost range around each range on its thread, -1 for none. The masks mark
    operators, annotations, steps, Python frames, modules' frames, autograd nodes and optimizer steps;
    `frame` excludes modules, and `annotation` excludes steps but includes optimizer steps. `sequence` is
    the autograd sequence number of operators, -1 for none; `forward_thread` is the profiler's number of the
    thread that made what autograd runs, 0 or -1 for others. `invalid` counts those that were left out.
    """

    name: list[str]
    start_ns: Int64
    end_ns: Int64
    thread: Int64
    parent: Int64
    operator: Bool
    annotation: Bool
    step: Bool
    frame: Bool
    module: Bool
    node: Bool
    optimizer: Bool
    sequence: Int64
    forward_thread: Int64
    invalid: int = 0

    def __len__(self) -> int:
        return len(self.name)


def read_ranges(written: Sequence[Written], threads: Threads, memory: MemoryRows) -> tuple[Ranges, Int64]:
    """Return the ranges of a trace, and the innermost range around each memory row, -1 for none."""
    start, has_start = time_column([event.get("ts") for event in written])
    length, has_length = time_column([event.get("dur", 0) for event in written])
    named = np.array([type(event.get("name")) is str for event in written], bool)
    good = has_start & has_length & (length >= 0) & named
    thread = threads.rows(written)
    rows = np.flatnonzero(good)
    index = indices(list(map(arguments_of, written)))  # for those with the same time and length
    rows = rows[np.lexsort((index[rows], -length[rows], start[rows], thread[rows]))]
    start, end, thread = start[rows], (start + length)[rows], thread[rows]
    kept = [written[row] for row in rows.tolist()]
    parent, around = nested(start, end, thread, memory)
    ranges = _classified(kept, start, end, thread, parent)
    return replace(ranges, invalid=len(good) - len(rows)), around


def nested(start: Int64, end: Int64, thread: Int64, memory: MemoryRows) -> tuple[Int64, Int64]:
    """Return each range's parent, and the innermost range around each memory row, in one pass over time.

    The innermost range is the one that began last and has not ended. Times in old traces are whole
    microseconds, so both edges belong to a range.
    """
    count = len(start)
    times = np.concatenate((start, memory.time_ns))
    threads = np.concatenate((thread, memory.thread))
    later = np.arange(len(times)) >= count  # a memory row comes after the ranges that begin with it
    order = np.lexsort((later, times, threads))
    enclosing = np.empty(len(times), np.int64)
    inner = []
    until = end.tolist()
    open_rows: list[int] = []
    last_thread = -1
    for row, time, where in zip(order.tolist(), times[order].tolist(), threads[order].tolist(), strict=True):
        if where != last_thread:
            open_rows, last_thread = [], where
        while open_rows and until[open_rows[-1]] < time:
            open_rows.pop()
        inner.append(open_rows[-1] if open_rows else -1)
        if row < count:
            open_rows.append(row)
    enclosing[order] = inner
    return enclosing[:count], enclosing[count:]


def _classified(kept: list[Written], start: Int64, end: Int64, thread: Int64, parent: Int64) -> Ranges:
    names: list[str] = [event["name"] for event in kept]
    categories: list[Any] = [event.get("cat") for event in kept]
    operator = np.array([category in OPERATOR_CATEGORIES for category in categories], bool)
    python = np.array([category in FRAME_CATEGORIES for category in categories], bool)
    step = _prefixed(names, STEP_PREFIX) & ~python
    optimizer = _prefixed(names, OPTIMIZER_PREFIX) & ~python
    module = _prefixed(names, MODULE_PREFIX) & python
    operator &= ~step & ~optimizer
    sequence = _numbers(kept, operator, "Sequence number")
    node = _prefixed(names, NODE_PREFIX) & operator
    _number_behind_hooks(names, node, parent, sequence)
    return Ranges(
        name=names,
        start_ns=start,
        end_ns=end,
        thread=thread,
        parent=parent,
        operator=operator,
        annotation=~operator & ~python & ~step,
        step=step,
        frame=python & ~module,
        module=module,
        node=node,
        optimizer=optimizer,
        sequence=sequence,
        forward_thread=_numbers(kept, operator, "Fwd thread id"),
    )


def _numbers(kept: Sequence[Written], rows: Bool, name: str) -> Int64:
    """Return an argument of some events, as a column of all; -1 where it is not recorded."""
    numbers = np.full(len(kept), -1, np.int64)
    number, there = whole_column(
        [arguments_of(kept[row]).get(name, -1) for row in np.flatnonzero(rows).tolist()]
    )
    numbers[rows] = np.where(there, number, -1)
    return numbers


def _number_behind_hooks(names: Sequence[str], node: Bool, parent: Int64, sequence: Int64) -> None:
    """Give nodes without a sequence number that of their own function.

    torch takes a node's number from the first event inside it, which is that of a hook if a tensor has one
    (csrc/profiler/collection.cpp, `set_autograd_evaluate`).
    """
    inner = np.flatnonzero((sequence >= 0) & np.append(node, False)[parent])
    inner = inner[sequence[parent[inner]] < 0]
    for row in inner.tolist():
        if names[parent[row]] == NODE_PREFIX + names[row]:
            sequence[parent[row]] = sequence[row]


def _prefixed(names: Sequence[str], prefix: str) -> Bool:
    return np.array([name.startswith(prefix) for name in names], bool)


def innermost(parent: Int64, wanted: Bool) -> Int64:
    """Return, for each range, the innermost wanted range at or around it, -1 for none: int64.

    This uses pointer doubling: the number of passes is the number of bits of the depth.
    """
    none = len(parent)
    up = np.append(np.where(wanted, np.arange(none), np.where(parent < 0, none, parent)), none)
    return _followed(up, none)


def outermost(parent: Int64, wanted: Bool) -> Int64:
    """Return, for each range, the outermost wanted range at or around it, -1 for none: int64."""
    none = len(parent)
    inner = np.append(innermost(parent, wanted), -1)
    above = inner[np.where(parent < 0, none, parent)]  # the innermost wanted range around it
    up = np.append(np.where(above >= 0, above, np.arange(none)), none)
    top = np.append(_followed(up, none), -1)
    return top[np.where(inner[:-1] < 0, none, inner[:-1])]


def _followed(up: Int64, none: int) -> Int64:
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return np.where(up[:-1] == none, -1, up[:-1])
        up = further
