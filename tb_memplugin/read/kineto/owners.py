"""Find the operator, module, phase and call stack of each memory event of a Kineto trace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from tb_memplugin.read.kineto.events import MemoryRows
from tb_memplugin.read.kineto.ranges import (
    ACCUMULATE,
    MODULE_PREFIX,
    NODE_PREFIX,
    Ranges,
    innermost,
    nested,
    outermost,
)
from tb_memplugin.read.phases import phase_at, phase_spans
from tb_memplugin.read.python_frames import CallTree
from tb_memplugin.read.tables import Names, Owners
from tb_memplugin.trace import Module, Phase, Spans
from tb_memplugin.trace.tables import CERTAIN, NO_OPERATOR, Bool, Int32, Int64, UInt8

OWN_PREFIXES = ("aten::", "prims::", "quantized::", "c10d::")

OF_NETWORKS = re.compile(
    r"aten::(conv(_transpose)?[123]d|linear|embedding(_bag)?|(layer|batch|group|instance|rms)_norm|lstm|gru"
    r"|scaled_dot_product_attention|(max|avg|adaptive_avg)_pool[123]d|cross_entropy_loss)"
)
"""Operators that only forwards call: where gradients are off they make no nodes."""

OF_NODE = 98
"""How sure it is that what a node allocates is of the module of its operator, in percent. Measured in
docs/design/kineto_traces.md."""

FORWARD_SUFFIX = ": forward"
MODULE_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class Owned:
    """Columns for the memory rows, and the tables that they point into.

    `operator_end_ns` is when the operator (or autograd node) around a row ended, 0 for none;
    `recomputing` marks rows in a forward that ran again in a node. `module_confidence` is that of `Events`.
    """

    operator: Int32
    module: Int32
    stack: Int32
    phase: UInt8
    operator_end_ns: Int64
    recomputing: Bool
    module_confidence: UInt8
    operators: tuple[str, ...]
    modules: tuple[Module, ...]
    stacks: tuple[tuple[str, ...], ...]
    phases: Spans
    calls: Spans
    cut_stacks: int


def owned(ranges: Ranges, around: Int64, memory: MemoryRows, step_starts: Int64) -> Owned:
    """Attribute every memory row by what encloses it on its thread.

    The operator is the outermost of PyTorch's own inside an autograd node, as in `profiler.tree`; if there
    is none, the innermost operator of any name, or else the innermost annotation. The module is the
    innermost `nn.Module` frame; in an autograd node, that of the operator that made the node. Rows without
    one belong to that operator, or else to the one that was called. Phases follow from autograd nodes,
    optimizer steps, module frames, and operators outside of these that made an autograd node or that only
    forwards call.

    Args:
        around: the innermost range around each memory row, -1 for none.
        memory: the memory rows.
    """
    operators = Names()
    nothing = operators.add(NO_OPERATOR)
    name = np.append(operators.add_all([text.removeprefix(NODE_PREFIX) for text in ranges.name]), nothing)
    inner_operator = _at(innermost(ranges.parent, ranges.operator), around)
    inner_annotation = _at(innermost(ranges.parent, ranges.annotation), around)
    inner = np.where(inner_operator >= 0, inner_operator, inner_annotation)
    maker, again = makers(ranges), recomputing(ranges)
    is_again = np.append(again, False)[around]
    called = _called_operators(ranges, again)
    called_maker = np.append(called, -1)[maker]
    called = _at(called, around)
    node = _at(innermost(ranges.parent, ranges.node), around)
    module, modules, calls_module, depth = _modules(ranges)
    owners = Owners(modules)
    is_inferred = (node >= 0) & ~is_again
    made_by = _at(called_maker, node)
    outer = np.where(is_inferred, np.where(made_by >= 0, made_by, node), np.where(called >= 0, called, inner))
    outside = name[outer]
    of_node, in_module = _at(node_modules(ranges, maker, module), around), _at(module, around)
    owner = owners.with_outside(np.where(is_inferred, of_node, in_module), outside, operators)
    phases = _phases(ranges, step_starts, maker)
    phase = phase_at(phases, memory.time_ns)
    phase[(node >= 0) & (phase != Phase.OPTIMIZER)] = Phase.BACKWARD  # hooks of nodes may be optimizers
    stack, stacks, cut = _stacks(ranges, memory)
    return Owned(
        operator=name[np.where(called >= 0, called, inner)].astype(np.int32),
        module=owner,
        stack=stack,
        phase=phase,
        operator_end_ns=_ends(ranges, called, node),
        recomputing=is_again,
        module_confidence=np.where(is_inferred & (of_node >= 0), OF_NODE, CERTAIN).astype(np.uint8),
        operators=operators.as_tuple(),
        modules=owners.as_tuple(),
        stacks=stacks,
        phases=phases,
        calls=_calls(ranges, calls_module, depth, phases),
        cut_stacks=cut,
    )


def _at(column: Int64, around: Int64) -> Int64:
    """Return a column of the ranges for memory rows; -1 where no range is around them."""
    return np.append(column, -1)[around]


def _called_operators(ranges: Ranges, again: Bool) -> Int64:
    """Return the operator that was called at or around each range, -1 for none.

    That is PyTorch's outermost, inside a node if any, and there inside a forward that runs again. Other names
    are left out because wrappers (`DistributedDataParallel.forward`) are operators for the profiler, but
    enclose whole models.
    """
    own = np.array([text.startswith(OWN_PREFIXES) for text in ranges.name], bool)
    in_again = own & ranges.operator & again
    own |= np.append(ranges.node, False)[ranges.parent]
    called = outermost(ranges.parent, own & ranges.operator & ~ranges.node)
    return np.where(again, outermost(ranges.parent, in_again), called)


def _ends(ranges: Ranges, called: Int64, node: Int64) -> Int64:
    """Return when the operator called, or else the node, ended: 0 for none.

    Hooks, which may be whole optimizers, run in the operator that accumulates a gradient: the node counts.
    """
    in_hook = np.array([*(name == NODE_PREFIX + ACCUMULATE for name in ranges.name), False], bool)[node]
    return np.append(ranges.end_ns, 0)[np.where((called < 0) | in_hook, node, called)]


def _modules(ranges: Ranges) -> tuple[Int64, list[Module], Int64, Int64]:
    """Return each range's innermost module (a row), the modules, and the rows and depths of module calls.

    The profiler numbers the modules of each class, but writes only the last part of the class's name. So
    modules are distinguished by name and `forward`. A module's parent is the module around its first call.
    """
    calls = np.flatnonzero(ranges.module)
    names = [ranges.name[row].removeprefix(MODULE_PREFIX) for row in calls.tolist()]
    enclosing = innermost(ranges.parent, ranges.module)
    above = np.append(enclosing, -1)[ranges.parent[calls]]
    forwards = _forwards(ranges, enclosing)
    rows: dict[tuple[str, str], int] = {}
    files: dict[str, str] = {}
    modules: list[Module] = []
    row_of = np.full(len(ranges) + 1, -1, np.int64)
    depth_of = np.full(len(ranges) + 1, -1, np.int64)
    for call, name, outer in zip(calls.tolist(), names, above.tolist(), strict=True):
        file = forwards.get(call, "")
        if (name, file) not in rows:
            is_first = files.setdefault(name, file) == file
            rows[name, file] = len(modules)
            key = name if is_first else f"{name} ({file})"
            modules.append(Module(key, int(row_of[outer]), MODULE_NUMBER.sub("", name)))
        row_of[call] = rows[name, file]
        depth_of[call] = depth_of[outer] + 1
    return row_of[enclosing], modules, row_of[calls], depth_of[calls]


def _forwards(ranges: Ranges, enclosing: Int64) -> dict[int, str]:
    """Return the file and line of the first `forward` in each module's call, by the call's row."""
    is_forward = np.array([text.endswith(FORWARD_SUFFIX) for text in ranges.name], bool) & ranges.frame
    rows = np.flatnonzero(is_forward & (enclosing >= 0))
    calls, first = np.unique(enclosing[rows], return_index=True)
    texts = [ranges.name[row].removesuffix(FORWARD_SUFFIX) for row in rows[first].tolist()]
    return dict(zip(calls.tolist(), texts, strict=True))


def _calls(ranges: Ranges, row: Int64, depth: Int64, phases: Spans) -> Spans:
    calls = np.flatnonzero(ranges.module)
    order = np.lexsort((depth, ranges.start_ns[calls]))
    calls = calls[order]
    return Spans(
        ranges.start_ns[calls],
        ranges.end_ns[calls],
        row[order].astype(np.int32),
        depth[order].astype(np.int32),
        phase_at(phases, ranges.start_ns[calls]),
    )


def _phases(ranges: Ranges, step_starts: Int64, maker: Int64) -> Spans:
    node = innermost(ranges.parent, ranges.node) >= 0
    optimizer = innermost(ranges.parent, ranges.optimizer) >= 0
    roots = _marks(ranges.node & ~np.append(node, False)[ranges.parent])
    makes = graph_makers(ranges)
    makes[maker[maker >= 0]] = True
    makes |= np.array([OF_NETWORKS.fullmatch(name) is not None for name in ranges.name], bool)
    outer = outermost(ranges.parent, ranges.operator)
    is_forward = ranges.module & ~node & ~optimizer
    is_forward[outer[makes & ~node & ~optimizer]] = True
    outer = outermost(ranges.parent, is_forward)
    return phase_spans(
        _stretch(ranges, np.unique(outer[outer >= 0])),
        _stretch(ranges, roots),
        _stretch(ranges, _marks(ranges.optimizer)),
        step_starts,
    )


def _marks(mask: Bool) -> Int64:
    return np.flatnonzero(mask).astype(np.int64)


def _stretch(ranges: Ranges, rows: Int64) -> tuple[Int64, Int64]:
    return ranges.start_ns[rows], ranges.end_ns[rows]


def _stacks(ranges: Ranges, memory: MemoryRows) -> tuple[Int32, tuple[tuple[str, ...], ...], int]:
    """Return the row of each memory row's Python stack, the stacks, and how many of them were cut.

    Only frames are nested, without other ranges: a range that a function opens and leaves open
    (`__enter__`) ends after the function, and would keep the function in all later stacks.
    """
    rows = np.flatnonzero(ranges.frame)
    outer, around = nested(ranges.start_ns[rows], ranges.end_ns[rows], ranges.thread[rows], memory)
    frames = CallTree()
    names = [ranges.name[row] for row in rows.tolist()]
    starts = ranges.start_ns[rows].tolist()
    frames.were_running([*zip(names, starts, rows.tolist(), strict=True)], partial(_first_call, ranges))
    keys = [-1] * (len(rows) + 1)  # the last is for none, -1
    for index, (name, parent) in enumerate(zip(names, outer.tolist(), strict=True)):
        keys[index] = frames.add(name, keys[parent])
    return frames.stacks(np.array(keys, np.int64)[around])


def _first_call(ranges: Ranges, row: int) -> int:
    """Return when the next range of a row's thread began; when the row ended if that was before."""
    later = (ranges.thread == ranges.thread[row]) & (ranges.start_ns > ranges.start_ns[row])
    return int(np.min(ranges.start_ns[later], initial=ranges.end_ns[row]))


def makers(ranges: Ranges) -> Int64:
    """Return the operator that made each node, for each range: int64, -1 for none and for other ranges.

    An operator's sequence number is that of the next node of its thread, so a node was made by the last
    operator with the node's number. A node has the number of its thread, too, but the profiler's own, which
    operators lack: it is the thread on which the most of its nodes have an operator.
    """
    maker = np.full(len(ranges), -1, np.int64)
    numbered = np.flatnonzero(ranges.node & (ranges.sequence >= 0))
    makers = np.flatnonzero(_may_make(ranges))
    makers = makers[np.lexsort((ranges.start_ns[makers], ranges.sequence[makers], ranges.thread[makers]))]
    threads = [
        makers[ranges.thread[makers] == thread] for thread in np.unique(ranges.thread[makers]).tolist()
    ]
    for forward_thread in np.unique(ranges.forward_thread[numbered]).tolist():
        nodes = numbered[ranges.forward_thread[numbered] == forward_thread]
        by_thread = [_last_with_number(ranges, operators, nodes) for operators in threads]
        if by_thread:
            maker[nodes] = max(by_thread, key=lambda rows: int(np.count_nonzero(rows >= 0)))
    return maker


def _may_make(ranges: Ranges) -> Bool:
    """Return a mask of the operators that ran with gradients on: not those that autograd itself runs."""
    return ranges.operator & ~ranges.node & (ranges.sequence >= 0) & (ranges.forward_thread <= 0)


def _last_with_number(ranges: Ranges, operators: Int64, nodes: Int64) -> Int64:
    """Return the last operator with each node's number that began before it; -1 for none."""
    number = ranges.sequence[operators]
    last = operators[np.searchsorted(number, ranges.sequence[nodes], side="right") - 1]
    fits = (ranges.sequence[last] == ranges.sequence[nodes]) & (
        ranges.start_ns[last] <= ranges.start_ns[nodes]
    )
    return np.where(fits, last, -1)


def graph_makers(ranges: Ranges) -> Bool:
    """Return a mask of the operators after which the sequence number of their thread is higher.

    Each made a node, whether the node ran or not.
    """
    mask = np.zeros(len(ranges), bool)
    rows = np.flatnonzero(_may_make(ranges))
    rows = rows[np.lexsort((ranges.start_ns[rows], ranges.thread[rows]))]
    sequence, thread = ranges.sequence[rows], ranges.thread[rows]
    mask[rows[:-1][(sequence[1:] > sequence[:-1]) & (thread[1:] == thread[:-1])]] = True
    return mask


def recomputing(ranges: Ranges) -> Bool:
    """Return a mask of the ranges within a forward that ran again in a node, as checkpointing does.

    That is a module's call within a node or, without calls, operators with gradients on.
    """
    wanted = ranges.module if ranges.module.any() else _may_make(ranges)
    inner = innermost(ranges.parent, wanted | ranges.node)
    outer_node = np.append(innermost(ranges.parent, ranges.node), -1)[inner]
    mask: Bool = (inner >= 0) & (outer_node >= 0) & (outer_node != inner)
    return mask


def node_modules(ranges: Ranges, maker: Int64, module: Int64) -> Int64:
    """Return the module of each range's innermost node: int64, -1 for none.

    It is that of the node's maker. A gradient is accumulated right after the node that computed it.

    Args:
        maker: what `makers` returns.
        module: the module (a row) of each range.
    """
    of_node = np.append(module, -1)[maker]
    nodes = np.flatnonzero(ranges.node)  # by thread and time
    accumulates = np.array([ranges.name[row] == NODE_PREFIX + ACCUMULATE for row in nodes.tolist()], bool)
    before = np.maximum.accumulate(np.where(accumulates, -1, np.arange(len(nodes))))
    last = np.append(nodes, -1)[before]
    same_thread = (before >= 0) & (ranges.thread[last] == ranges.thread[nodes])
    of_node[nodes] = np.where(accumulates & ~same_thread, -1, of_node[last])
    return np.append(of_node, -1)[innermost(ranges.parent, ranges.node)]
