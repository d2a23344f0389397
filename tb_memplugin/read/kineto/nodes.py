"""Find the operator that made each autograd node of a Kineto trace, by sequence numbers."""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.kineto.ranges import ACCUMULATE, NODE_PREFIX, Ranges, innermost
from tb_memplugin.trace.tables import Bool, Int64


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
    """Return the last operator with each node's number that began before it; -1 for none.

    Args:
        ranges: what ran.
        operators: operators of one thread, sorted by number and start.
        nodes: nodes.
    """
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
        ranges: what ran.
        maker: what `makers` returns.
        module: the module (a row) of each range.
    """
    of_node = np.where(maker >= 0, np.append(module, -1)[maker], -1)
    nodes = np.flatnonzero(ranges.node)  # by thread and time
    accumulates = np.array([ranges.name[row] == NODE_PREFIX + ACCUMULATE for row in nodes.tolist()], bool)
    before = np.maximum.accumulate(np.where(accumulates, -1, np.arange(len(nodes))))
    last = np.append(nodes, -1)[before]
    same_thread = (before >= 0) & (ranges.thread[last] == ranges.thread[nodes])
    of_node[nodes] = np.where(accumulates & ~same_thread, -1, of_node[last])
    return np.append(of_node, -1)[innermost(ranges.parent, ranges.node)]
