"""Find the module that made each autograd node, by sequence numbers, which each thread counts by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tb_memplugin.record.profiler.calls import Calls
from tb_memplugin.record.profiler.roles import NODE_PREFIX
from tb_memplugin.record.profiler.tree_columns import ProfilerTree
from tb_memplugin.trace.tables import Int64

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
