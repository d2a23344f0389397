"""Find the module that made each autograd node, by sequence numbers, which each thread counts by itself.

A backward with `create_graph=True` makes nodes, too: operators inside autograd nodes give them numbers. The
walk does not read these numbers, as most profiles have none: a backward without `create_graph` makes no
nodes. So this module looks for nodes whose number may have been given during a backward, and only if there
are some, it reads the operators of that backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tb_memplugin.record.profiler.calls import Calls
from tb_memplugin.record.profiler.roles import NODE_PREFIX
from tb_memplugin.record.profiler.tree_columns import ProfilerTree
from tb_memplugin.record.torch_private.profiler import AllocationFields, Event, OperatorFields, RecordScope
from tb_memplugin.trace.tables import Bool, Int64

ForwardThreads = Callable[[], Mapping[int, int]]
"""A function that returns, by the start (epoch ns) of an autograd node, the profiler's number of the thread
that made the node."""


def forward_threads(events: Iterable[Any]) -> dict[int, int]:
    """Return the profiler's number of the thread that made each autograd node, by the node's start.

    Args:
        events: `prof.profiler.kineto_results.events()`; the events of the tree do not have this thread.
    """
    return {
        event.start_ns(): event.fwd_thread_id()
        for event in events
        if event.fwd_thread_id() and event.name().startswith(NODE_PREFIX)
    }


def making_threads(
    tree: ProfilerTree,
    threads: Mapping[int, Calls],
    first: int,
    first_number: int,
    ask: ForwardThreads,
    elsewhere: bool,
) -> Int64:
    """Return the profiler's number of the thread that made each node of the tree: int64.

    Usually the thread that started the profiler made them all, and `ask` is not needed. Others did if a
    forward runs in threads (`nn.DataParallel`), or if a checkpoint is recomputed in an autograd thread.

    Args:
        threads: the module calls of each thread ident.
        first: the ident of the thread that started the profiler.
        first_number: the profiler's number of that thread.
        ask: returns the thread of each node: see `forward_threads`.
        elsewhere: whether autograd's threads may have made nodes outside of module calls.
    """
    numbers = _other_numbers(tree, threads, first, first_number)
    if not (elsewhere or None in numbers.values() or (numbers and _in_another(tree, first_number))):
        return np.full(len(tree.node_names), first_number)
    thread_of = ask()
    return np.array([thread_of.get(start, first_number) for start in tree.nodes.start_ns.tolist()], np.int64)


def node_modules(
    tree: ProfilerTree, threads: Mapping[int, Calls], first: int, first_number: int, made_on: Int64
) -> Int64:
    """Return the module's row of each node of the tree: int64, -1 for none.

    Each thread numbers the nodes that it makes, so a number belongs to a call on the thread that made the
    node.

    Args:
        first_number: the profiler's number of that thread.
        made_on: the profiler's number of the thread that made each node: see `making_threads`.
    """
    sequence = tree.nodes.sequence
    owner = _owning(threads[first], sequence)
    numbers = _other_numbers(tree, threads, first, first_number)
    elsewhere = made_on[made_on != first_number]
    for number in np.unique(elsewhere).tolist() if len(elsewhere) else ():
        mine = np.flatnonzero(made_on == number)
        calling = [ident for ident, its_number in numbers.items() if its_number == number]
        if not calling and number not in tree.nodes.thread:  # a thread that the profiler does not see
            calling = [ident for ident, its_number in numbers.items() if its_number is None]
        modules = [_owning(threads[ident], sequence[mine]) for ident in calling]
        owner[mine] = max(modules, key=lambda rows: int((rows >= 0).sum()), default=np.int64(-1))
    return owner


def thread_running(calls: Calls, tree: ProfilerTree, first_number: int) -> int | None:
    """Return the profiler's number of a thread, from the node during which it called its first module.

    Return None for threads that the profiler does not see. Nodes of the first thread are ignored: they are
    unrelated to the calls on another thread.
    """
    nodes, first = tree.nodes, calls.start_ns[0]
    around = (nodes.start_ns <= first) & (first < nodes.end_ns) & (nodes.thread != first_number)
    return int(nodes.thread[np.flatnonzero(around)[-1]]) if around.any() else None


def unseen_threads(
    tree: ProfilerTree, threads: Mapping[int, Calls], first: int, first_number: int
) -> list[int]:
    """Return the idents of threads that called modules but whose memory the profiler does not report."""
    numbers = _other_numbers(tree, threads, first, first_number)
    return [ident for ident, number in numbers.items() if number is None]


def _other_numbers(
    tree: ProfilerTree, threads: Mapping[int, Calls], first: int, first_number: int
) -> dict[int, int | None]:
    """Return the profiler's number of each other thread that called modules, by its ident."""
    return {
        ident: thread_running(calls, tree, first_number)
        for ident, calls in threads.items()
        if ident != first and len(calls)
    }


def _owning(calls: Calls, sequence: Int64) -> Int64:
    return calls.module_of(calls.owning(sequence))


def _in_another(tree: ProfilerTree, first_number: int) -> bool:
    """Whether a node ran inside another on a thread other than the first, which then also made it."""
    return bool(np.any((tree.nodes.parent >= 0) & (tree.nodes.thread != first_number)))


Roots = Callable[[], Iterable[Event]]
"""A function that returns the outermost events of the profiler's tree."""


class _Counter(NamedTuple):
    """Moments at which the number of a thread's next autograd node is known: int64, shape (n,), ascending.

    `node` is the row of the autograd node in which the moment is, -1 for none.
    """

    time_ns: Int64
    number: Int64
    node: Int64

    def last_up_to(self, number: Int64) -> Int64:
        """Return the row of the last moment before each number was given, -1 for none."""
        return np.searchsorted(self.number, number, side="right") - 1


def first_order_nodes(
    tree: ProfilerTree, calls: Calls | None, main: int, roots: Roots, owned: Bool, made_on: Int64
) -> Int64:
    """Return, for each node, the row of the node of first order from which it comes: int64, shape (nodes,).

    A node of first order, which an operator outside all nodes made, has its own row. One that was made in
    another node has the row that this other node has.

    Args:
        calls: the module calls of the main thread if hooks logged them, and with them its counter.
        main: the profiler's number of the main thread.
        roots: returns the outermost events; called only if some nodes may be of second order.
        owned: which nodes a module call made, if the main thread did not make them.
        made_on: the profiler's number of the thread that made each node. All that autograd's own threads
            make, outside of module calls, they make in nodes.
    """
    nodes = tree.nodes
    rows, spans = _made_in_backward(tree, _outside_nodes(tree, calls, main), main)
    mine = made_on[rows] == main
    around = np.full(len(nodes.start_ns), -1)
    around[rows[mine]] = _nodes_around(tree, rows[mine], spans[mine], main, roots)
    elsewhere = nodes.thread[nodes.thread != main]
    for thread in np.intersect1d(made_on, elsewhere).tolist() if len(elsewhere) else ():
        rows = np.flatnonzero((made_on == thread) & ~owned & (nodes.sequence >= 0))
        begin = np.full(len(rows), nodes.start_ns[nodes.thread == thread].min())
        spans = np.stack((begin, nodes.start_ns[rows]), axis=1)
        around[rows] = _nodes_around(tree, rows, spans, thread, roots)
    first = np.arange(len(around))
    rows = np.flatnonzero(around >= 0)
    for row in rows[np.argsort(nodes.start_ns[rows], kind="stable")].tolist():  # in the order they ran in
        first[row] = first[around[row]]
    return first


def makes_nodes_elsewhere(tree: ProfilerTree, calls: Calls | None, main: int) -> bool:
    """Whether autograd's own threads, which run the nodes of GPUs, may have made nodes, too.

    Autograd runs the node with the highest number first. So a node with a higher number than the one before
    it has a number of another thread, or was made later on.
    """
    nodes = tree.nodes
    elsewhere = nodes.thread[nodes.thread != main]
    if not len(elsewhere):
        return False
    counter = _outside_nodes(tree, calls, main)
    for thread in np.unique(elsewhere).tolist():
        rows = np.flatnonzero((nodes.sequence >= 0) & (nodes.thread == thread))
        rows = rows[np.argsort(nodes.start_ns[rows], kind="stable")]
        start, number = nodes.start_ns[rows], nodes.sequence[rows]
        made_ns = np.append(counter.time_ns, 0)[counter.last_up_to(number)]
        if np.any((number[1:] > number[:-1]) & (made_ns[1:] < start[:-1])):
            return True
    return False


def _nodes_around(tree: ProfilerTree, rows: Int64, spans: Int64, thread: int, roots: Roots) -> Int64:
    """Return the rows of the nodes in which nodes were made on a thread, within their spans; -1 for none."""
    if not len(rows):
        return np.empty(0, np.int64)
    counter = _read_operators(tree, roots(), spans, thread)
    index = counter.last_up_to(tree.nodes.sequence[rows])
    within = np.append(counter.time_ns, -1)[index] >= spans[:, 0]
    return np.where(within, np.append(counter.node, -1)[index], -1)


def _outside_nodes(tree: ProfilerTree, calls: Calls | None, main: int) -> _Counter:
    """Return what the walk and the hooks know of the main thread's counter."""
    numbered = (tree.operators.sequence >= 0) & (tree.thread_of(2) == main)
    time, number = tree.operators.start_ns[numbered], tree.operators.sequence[numbered]
    if calls is not None:
        time = np.concatenate((time, calls.boundary_ns))
        number = np.concatenate((number, calls.boundary_sequence))
    order = np.argsort(time, kind="stable")
    return _Counter(time[order], np.maximum.accumulate(number[order]), np.full(len(time), -1))


def _made_in_backward(tree: ProfilerTree, counter: _Counter, main: int) -> tuple[Int64, Int64]:
    """Return the rows of nodes that may have been made in a backward, and when each was made.

    The time of a node's making is known from one moment of the counter up to the next. It may be in a
    backward only if another node ran in that time, before it. Of a backward's nodes, those with the highest
    numbers run first. So a node of first order finds only higher numbers before it.

    Returns:
        the rows in the order of their starts, and the spans: int64, shape (rows, 2).
    """
    nodes = tree.nodes
    rows = np.flatnonzero((nodes.sequence >= 0) & (nodes.thread == main))
    rows = rows[np.argsort(nodes.start_ns[rows], kind="stable")]
    start, number = nodes.start_ns[rows], nodes.sequence[rows]
    index = counter.last_up_to(number)
    since = np.append(counter.time_ns, 0)[index]
    until = np.minimum(np.append(counter.time_ns, np.iinfo(np.int64).max)[index + 1], start)
    leading = np.searchsorted(start, since)
    some = (leading < np.searchsorted(start, until)) & (np.append(number, 0)[leading] < number)
    return rows[some], np.stack((since[some], until[some]), axis=1)


def _read_operators(tree: ProfilerTree, roots: Iterable[Event], spans: Int64, thread: int) -> _Counter:
    """Read the numbers of a thread's operators that overlap one of the spans."""
    begins, ends = _merged(spans)
    row_of = dict(zip(tree.nodes.start_ns.tolist(), range(len(tree.node_names)), strict=True))
    rows: list[tuple[int, int, int]] = []
    pending = [(list(roots), -1)]
    while pending:
        events, node = pending.pop()
        for event in events:
            fields = event.extra_fields
            if type(fields) is AllocationFields:
                continue
            start, around = event.start_time_ns, node
            following = bisect_right(ends, start)
            if following == len(ends) or event.end_time_ns < begins[following]:
                continue
            if type(fields) is OperatorFields:
                if event.name.startswith(NODE_PREFIX):
                    around = row_of.get(start, -1)
                # A node's own function has the node's number, which is not that of the next one.
                elif (
                    fields.sequence_number >= 0
                    and fields.scope != RecordScope.BACKWARD_FUNCTION
                    and event.start_tid == thread
                ):
                    rows.append((start, fields.sequence_number, node))
            if children := event.children:
                pending.append((children, around))
    return _Counter(*np.array(sorted(rows), np.int64).reshape(-1, 3).T)


def _merged(spans: Int64) -> tuple[list[int], list[int]]:
    """Return the starts and ends of disjoint spans that cover all the given ones, ascending."""
    begins: list[int] = []
    ends: list[int] = []
    for begin, end in sorted(set(map(tuple, spans.tolist()))):
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return begins, ends
