"""Read the operators, annotations and Python frames of a Kineto trace, and how they nest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import intern
from typing import NamedTuple

import numpy as np

from tb_memplugin.read.kineto.events import MemoryRows, Threads, Written, arguments_of, indices, threads_of
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
INPUTS = ("Concrete Inputs", "Input type", "Input Dims", "Input Strides")
"""The arguments of an operator that say what it was given."""

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The function of nodes that add a gradient to that of a parameter."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges on all threads: columns of equal length, parents before the ranges that they enclose.

    `parent` is the row of the innermost range around each range on its thread, -1 for none. The masks mark
    operators, annotations, steps, Python frames, modules' frames, autograd nodes and optimizer steps;
    `frame` excludes modules, and `annotation` excludes steps but includes optimizer steps. `sequence` is
    the autograd sequence number of operators, -1 for none; `forward_thread` is the profiler's number of the
    thread that made what autograd runs, 0 or -1 for others; `inputs` are each range's arguments about inputs.
    `invalid` counts those that were left out.
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
    inputs: list[Written]
    invalid: int = 0

    def __len__(self) -> int:
        return len(self.name)


class WrittenRanges(NamedTuple):
    """Operators, annotations and frames of a trace, as columns in the file's order.

    `good` marks those with a name and a time. `sequence` and `forward_thread` are -1 where they are not
    recorded. `inputs` has the arguments about inputs.
    """

    start_ns: Int64
    length_ns: Int64
    good: Bool
    name: list[str]
    category: list[str]
    thread: list[str]
    event_index: Int64
    sequence: Int64
    forward_thread: Int64
    inputs: list[Written]


def range_columns(events: Sequence[Written], known: dict[str, Written]) -> WrittenRanges:
    """Return the columns of ranges.

    Args:
        known: inputs by their text, so that equal ones are one object; those of the events are added.
    """
    start, has_start = time_column([event.get("ts") for event in events])
    length, has_length = time_column([event.get("dur", 0) for event in events])
    names = [event.get("name") for event in events]
    named = np.array([type(name) is str for name in names], bool)
    arguments = list(map(arguments_of, events))
    return WrittenRanges(
        start,
        length,
        has_start & has_length & (length >= 0) & named,
        name=[intern(name) if type(name) is str else "" for name in names],
        category=[intern(event["cat"]) for event in events],
        thread=threads_of(events),
        event_index=indices(arguments),
        sequence=_numbers(arguments, "Sequence number"),
        forward_thread=_numbers(arguments, "Fwd thread id"),
        inputs=[_inputs(args, known) for args in arguments],
    )


def _inputs(arguments: Written, known: dict[str, Written]) -> Written:
    inputs = {key: arguments[key] for key in INPUTS if key in arguments}
    return known.setdefault(repr(inputs), inputs)


def read_ranges(written: WrittenRanges, threads: Threads, memory: MemoryRows) -> tuple[Ranges, Int64]:
    """Return the ranges of a trace, and the innermost range around each memory row, -1 for none."""
    start, length = written.start_ns, written.length_ns
    thread = threads.rows(written.thread)
    rows = np.flatnonzero(written.good)
    # The index is for those with the same time and length.
    rows = rows[np.lexsort((written.event_index[rows], -length[rows], start[rows], thread[rows]))]
    start, end, thread = start[rows], (start + length)[rows], thread[rows]
    parent, around = nested(start, end, thread, memory)
    ranges = _classified(written, rows, start, end, thread, parent)
    return replace(ranges, invalid=len(written.good) - len(rows)), around


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


def _classified(
    written: WrittenRanges, rows: Int64, start: Int64, end: Int64, thread: Int64, parent: Int64
) -> Ranges:
    names = [written.name[row] for row in rows.tolist()]
    categories = [written.category[row] for row in rows.tolist()]
    operator = np.array([category in OPERATOR_CATEGORIES for category in categories], bool)
    python = np.array([category in FRAME_CATEGORIES for category in categories], bool)
    step = _prefixed(names, STEP_PREFIX) & ~python
    optimizer = _prefixed(names, OPTIMIZER_PREFIX) & ~python
    module = _prefixed(names, MODULE_PREFIX) & python
    operator &= ~step & ~optimizer
    sequence = np.where(operator, written.sequence[rows], -1)
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
        forward_thread=np.where(operator, written.forward_thread[rows], -1),
        inputs=[written.inputs[row] for row in rows.tolist()],
    )


def _numbers(arguments: Sequence[Written], name: str) -> Int64:
    """Return a number among the arguments of each event; -1 where it is not recorded."""
    number, there = whole_column([args.get(name, -1) for args in arguments])
    return np.where(there, number, -1)


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
