"""Attribute each allocation to a phase, an operator and a module, by time and by autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from tb_memplugin.read.phases import phase_at, phase_spans
from tb_memplugin.read.tables import Names, Owners
from tb_memplugin.record.modules import clean_name
from tb_memplugin.record.profiler.calls import Calls, by_thread, calls_from, crossings_from_spans
from tb_memplugin.record.profiler.memory_events import MemoryEvents
from tb_memplugin.record.profiler.node_owners import (
    ForwardThreads,
    Roots,
    first_order_nodes,
    makes_nodes_elsewhere,
    making_threads,
    node_modules,
    thread_running,
    unseen_threads,
)
from tb_memplugin.record.profiler.roles import ACCUMULATE_GRAD, MODULE_PREFIX, NODE_PREFIX, Role
from tb_memplugin.record.profiler.tree_columns import ProfilerTree
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.trace import Module, Phase, Spans, Step
from tb_memplugin.trace.tables import NO_OPERATOR, Bool, Int32, Int64, UInt8


@dataclass(frozen=True, slots=True)
class Attribution:
    """Columns for the allocs of a window (not the frees), in time order, and the tables that they point into.

    `row` is the index of each alloc among the memory events. `operator_end_ns` is 0 where no operator
    encloses the alloc. `recomputing` marks allocs in a module call that ran during backward, `communicating`
    those made while FSDP2 gathered parameters or reduced gradients. `unseen_calls` are the module calls on
    each thread that the profiler does not see, by its ident.
    """

    row: Int64
    phase: UInt8
    operator: Int32
    module: Int32
    operator_end_ns: Int64
    recomputing: Bool
    communicating: Bool
    operators: Names
    owners: Owners
    phases: Spans
    calls: Spans
    unseen_calls: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Forward:
    """Operators outside autograd nodes and optimizer steps, in time order, with their sequence numbers.

    `creates` marks those that made autograd nodes: the sequence number was higher afterwards.
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    sequence: Int64
    creates: Bool

    def creator(self, sequence: Int64) -> Int64:
        """Return the index (in these columns) of the operator that made each node, -1 if none did."""
        makers = np.flatnonzero(self.creates)
        index = np.searchsorted(self.sequence[makers], sequence, side="right") - 1
        return np.append(makers, -1)[index]  # -1, for before the first, takes the last


def attribute(
    tree: ProfilerTree,
    memory: MemoryEvents,
    window: Window,
    logged: Logged,
    steps: Sequence[Step],
    made_by: ForwardThreads = dict,
    roots: Roots = tuple,
) -> Attribution:
    """Attribute every alloc of a window.

    In forward, the owner is the innermost module call that runs at that time on that thread. In backward, it
    is the module whose call made the autograd node (by the sequence number), or the running call during
    recomputation. A node that was made in another node belongs to the module of that. An alloc without a
    module gets the owner `outside:<operator>`; for a node this is the operator that made the node.
    """
    logged = logged if logged.hooked or not tree.ranges.get(Role.MODULE) else _from_frames(tree, window)
    owners, hooked, threads = logged.owners, logged.hooked, logged.threads
    calls = threads[window.thread]
    main = main_thread(tree)
    node_start, node_end, _, node_sequence, _ = tree.nodes
    forward = _forward_operators(tree, calls, hooked)
    counting = calls if hooked else None
    elsewhere = makes_nodes_elsewhere(tree, counting, main)
    made_on = making_threads(tree, threads, window.thread, main, made_by, elsewhere)
    own_module = node_modules(tree, threads, window.thread, main, made_on)
    owned = (made_on != main) & (own_module >= 0)
    first = first_order_nodes(tree, counting, main, roots, owned, made_on)
    maker = forward.creator(np.where(made_on == main, node_sequence, -1))[first]
    node_module = own_module[first] if hooked else calls.module_of(_call_of_maker(calls, forward, maker))
    phases = _phases(tree, window, steps, calls, forward)

    row = np.flatnonzero(memory.bytes > 0)
    time, operator, node, thread = (
        memory.time_ns[row],
        memory.operator[row],
        memory.node[row],
        memory.thread[row],
    )
    running, call_start = _running_calls(time, thread, main, window.thread, threads, tree)
    in_node = node >= 0
    recomputing = in_node & (running >= 0) & (call_start >= np.append(node_start, 0)[node])
    module = np.where(in_node & ~recomputing, np.append(node_module, -1)[node], running)
    communicating, gathered = _sharding(tree, time, window)
    module = np.where(gathered >= 0, gathered, module)

    operators = Names()
    operator_id = np.append(operators.add_all(tree.operator_names), operators.add(NO_OPERATOR))
    node_names = [name.removeprefix(NODE_PREFIX) for name in tree.node_names]
    node_id = operators.add_all(node_names)
    named = np.where((operator < 0) & in_node, np.append(node_id, 0)[node], operator_id[operator]).astype(
        np.int32
    )
    outside_id = np.where(
        in_node & ~recomputing, _node_names(forward, maker, operator_id, node_id[first])[node], named
    )
    phase = phase_at(phases, time)
    phase[in_node & (phase != Phase.OPTIMIZER)] = Phase.BACKWARD
    in_hook = np.array([*(name == ACCUMULATE_GRAD for name in node_names), False], bool)[node]
    ends = np.where(
        in_node & ((operator < 0) | (in_hook & (phase != Phase.OPTIMIZER))),
        np.append(node_end, 0)[node],
        np.append(tree.operators.end_ns, 0)[operator],
    )
    return Attribution(
        row=row,
        phase=phase,
        operator=named,
        module=owners.with_outside(module, outside_id, operators),
        operator_end_ns=ends,
        recomputing=recomputing,
        communicating=communicating,
        operators=operators,
        owners=owners,
        phases=phases,
        calls=_call_spans(calls, phases, owners, node_module, node_start, node_end),
        unseen_calls={
            ident: len(threads[ident]) for ident in unseen_threads(tree, threads, window.thread, main)
        },
    )


@dataclass(frozen=True, slots=True)
class Logged:
    """The owners of bytes, and the module calls of each thread ident.

    `hooked` is False if no model was given: then the calls come from Python frames, or there are none.
    """

    owners: Owners
    hooked: bool
    threads: dict[int, Calls]

    @classmethod
    def of(cls, window: Window) -> Logged:
        """Return the calls that the hooks logged during a window."""
        logs = by_thread(window.crossings, window.thread)
        calls = {ident: calls_from(log, window.stop_ns) for ident, log in logs.items()}
        return cls(Owners(window.names.modules), window.has_models, calls)

    def outer_calls(self, thread: int) -> tuple[list[int], list[int]]:
        """Return the starts and ends of a thread's outermost calls."""
        calls = self.threads[thread]
        outer = calls.depth == 0
        return calls.start_ns[outer].tolist(), calls.end_ns[outer].tolist()


def _from_frames(tree: ProfilerTree, window: Window) -> Logged:
    """Return the module calls of a profile with stacks but no model, from their Python frames."""
    frames = tree.ranges[Role.MODULE]
    start = np.array([begin for _, begin, _ in frames], np.int64)
    end = np.array([finish for _, _, finish in frames], np.int64)
    modules, rows = _modules_from_frames([name for name, _, _ in frames], start, end)
    log = crossings_from_spans(rows, start, end)
    return Logged(Owners(modules), False, {window.thread: calls_from(log, window.stop_ns)})


def _modules_from_frames(names: Sequence[str], start: Int64, end: Int64) -> tuple[list[Module], list[int]]:
    """Name modules by the nesting of their Python frames: `TransformerLM_0.Block_1.Linear_5`."""
    modules: list[Module] = []
    row_of: dict[str, int] = {}
    rows = [0] * len(names)
    open_frames: list[tuple[int, int]] = []
    for frame in np.lexsort((-end, start)).tolist():
        while open_frames and open_frames[-1][0] <= start[frame]:
            open_frames.pop()
        parent = open_frames[-1][1] if open_frames else -1
        name = names[frame].removeprefix(MODULE_PREFIX)
        key = f"{modules[parent].key}.{name}" if parent >= 0 else name
        if key not in row_of:
            row_of[key] = len(modules)
            modules.append(Module(key, parent, name.rpartition("_")[0] or name))
        rows[frame] = row_of[key]
        open_frames.append((int(end[frame]), rows[frame]))
    return modules, rows


def main_thread(tree: ProfilerTree) -> int:
    """Return the profiler's number of the training loop's thread: that with most operators outside nodes."""
    numbers = {thread for thread, *_ in tree.threads}
    threads = tree.thread_of(2)[tree.operators.node < 0] if len(numbers) > 1 else ()
    if not len(threads):
        return tree.threads[0][0]
    distinct, count = np.unique(threads, return_counts=True)
    return int(distinct[np.argmax(count)])


def _forward_operators(tree: ProfilerTree, calls: Calls, hooked: bool) -> _Forward:
    """Return operators outside autograd nodes and optimizer steps, and outside modules if hooks ran."""
    start, end, _, sequence = tree.operators
    row = np.flatnonzero(sequence > -2)
    row = row[np.argsort(start[row], kind="stable")]
    sequence = sequence[row]
    times = np.concatenate((start[row], calls.boundary_ns if hooked else calls.boundary_ns[:0]))
    numbers = np.concatenate((sequence, calls.boundary_sequence if hooked else calls.boundary_sequence[:0]))
    last = int(max(tree.nodes.sequence.max(initial=-1) + 1, numbers.max(initial=-1)))
    numbered = np.flatnonzero(numbers >= 0)
    numbered = numbered[np.argsort(times[numbered], kind="stable")]
    following = np.full(len(numbers), -1, np.int64)
    following[numbered] = np.append(numbers[numbered[1:]], last)[: len(numbered)]
    return _Forward(row, start[row], end[row], sequence, (following > numbers)[: len(row)] & (sequence >= 0))


def _with(ranges: tuple[Int64, Int64], spans: Sequence[tuple[int, int]]) -> tuple[Int64, Int64]:
    """Return the profiler's ranges and the spans that the hooks recorded.

    An optimizer step inside a hook of backward is not a range in the profiler's tree.
    """
    recorded = np.array(spans, np.int64).reshape(-1, 2)
    return np.concatenate((ranges[0], recorded[:, 0])), np.concatenate((ranges[1], recorded[:, 1]))


def _call_of_maker(calls: Calls, forward: _Forward, maker: Int64) -> Int64:
    return calls.at(np.append(forward.start_ns, -1)[maker])  # no call runs at -1


def _phases(
    tree: ProfilerTree, window: Window, steps: Sequence[Step], calls: Calls, forward: _Forward
) -> Spans:
    in_hooks = [(step.start_ns, step.end_ns) for step in window.optimizer_steps]
    start, end, parent, _, _ = tree.nodes
    is_root = parent < 0
    outer = np.flatnonzero(calls.depth == 0)
    made_nodes = calls.made_nodes(outer)
    return phase_spans(
        _forward_marks(calls, outer, forward),
        (start[is_root], end[is_root]),
        _with(tree.range_spans(Role.OPTIMIZER), in_hooks),
        np.array([step.start_ns for step in steps], np.int64),
        None if made_nodes.all() else _forward_marks(calls, outer[made_nodes], forward),
    )


def _forward_marks(calls: Calls, outer: Int64, forward: _Forward) -> tuple[Int64, Int64]:
    """Return the times of outermost calls, and of the operators that made autograd nodes."""
    return (
        np.concatenate((calls.start_ns[outer], forward.start_ns[forward.creates])),
        np.concatenate((calls.end_ns[outer], forward.end_ns[forward.creates])),
    )


def _running_calls(
    time: Int64, thread: Int64, main: int, main_ident: int, threads: dict[int, Calls], tree: ProfilerTree
) -> tuple[Int64, Int64]:
    """Return, for each alloc, the module's row of the innermost call on its thread, and that call's start."""
    module, entered = np.full(len(time), -1, np.int64), np.zeros(len(time), np.int64)
    for ident, calls in threads.items():
        if not len(calls):
            continue
        number = main if ident == main_ident else thread_running(calls, tree, main)
        mine = np.flatnonzero(thread == number) if number is not None else np.empty(0, np.intp)
        call = calls.at(time[mine])
        module[mine] = calls.module_of(call)
        entered[mine] = np.append(calls.start_ns, 0)[call]
    return module, entered


def _sharding(tree: ProfilerTree, time: Int64, window: Window) -> tuple[Bool, Int64]:
    """Return whether FSDP2 gathered or reduced at each time, and the row of the module it names (-1: none).

    The name is needed because FSDP2 prefetches: during one module's node it gathers the next module's
    parameters.
    """
    ranges = sorted(tree.ranges.get(Role.SHARDING, ()), key=itemgetter(1))
    start = np.array([begin for _, begin, _ in ranges], np.int64)
    end = np.array([finish for *_, finish in ranges] + [0], np.int64)
    index = np.searchsorted(start, time, side="right") - 1
    inside = (index >= 0) & (time < end[index])
    rows = {module.key: row for row, module in enumerate(window.names.modules)}
    named = [rows.get(key, -1) for key in (_module_of_sharding(name) for name, *_ in ranges)]
    return inside, np.where(inside, np.array([*named, -1], np.int64)[index], -1)


def _module_of_sharding(name: str) -> str:
    """Return the FQN in a text like `FSDP::all_gather (layers.0)`; "" for the root."""
    return clean_name(name.partition(" (")[2].partition(")")[0])


def _node_names(forward: _Forward, maker: Int64, operator_id: Int64, node_id: Int64) -> Int64:
    """Return the operator for each node outside all modules: the one that made it, else its own name."""
    made_by = operator_id[np.append(forward.row, -1)[maker]]
    return np.append(np.where(maker >= 0, made_by, node_id), 0)


def _call_spans(
    calls: Calls, phases: Spans, owners: Owners, node_module: Int64, node_start: Int64, node_end: Int64
) -> Spans:
    """Return spans of forward calls and of autograd nodes (named by the owning module), sorted by start."""
    owned = np.flatnonzero(node_module >= 0)
    start = np.concatenate((calls.start_ns, node_start[owned]))
    order = np.argsort(start, kind="stable")
    depth = np.concatenate((calls.depth, owners.depth()[node_module[owned]].astype(np.int32)))
    name = np.concatenate((calls.row, node_module[owned].astype(np.int32)))
    forward = np.where(phase_at(phases, calls.start_ns) == Phase.BACKWARD, Phase.BACKWARD, Phase.FORWARD)
    phase = np.concatenate((forward.astype(np.uint8), np.full(len(owned), Phase.BACKWARD, np.uint8)))
    end = np.concatenate((calls.end_ns, node_end[owned]))
    return Spans(start[order], end[order], name[order], depth[order], phase[order])
