"""The Python call stacks of a profile's allocations, in backward also those of the forward call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.record.profiler.memory_events import MemoryEvents
from tb_memplugin.record.profiler.tree_columns import ProfilerTree
from tb_memplugin.trace.tables import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class ProfiledStacks:
    """Columns for the allocs of a window, in time order: rows of `stacks`, -1 for none.

    `stack` is the Python frames around the alloc. `forward` is, for an alloc in an autograd node, the frames
    around the operator that made the node. Autograd's own threads (on GPUs) run no Python: there `stack` is
    the forward stack. `cut` counts stacks whose outer frames are left out.
    """

    stack: Int32
    forward: Int32
    stacks: tuple[tuple[str, ...], ...]
    cut: int


def stacks_of(tree: ProfilerTree, memory: MemoryEvents, main: int) -> ProfiledStacks:
    """Return the stacks of every alloc; there are none if the profile recorded no Python frames.

    Args:
        memory: its memory events, in time order.
        main: the profiler's number of the thread that runs the forward.
    """
    row = np.flatnonzero(memory.bytes > 0)
    forward = np.append(_frames_of_makers(tree, main), -1)[memory.node[row]]
    around = memory.frame[row]
    around = np.where(around < 0, forward, around)
    rows, stacks, cut = tree.frames.stacks(np.concatenate((around, forward)))
    return ProfiledStacks(rows[: len(row)], rows[len(row) :], stacks, cut)


def _frames_of_makers(tree: ProfilerTree, main: int) -> Int64:
    """Return the frame around the operator that made each autograd node, -1 if not known.

    Autograd numbers nodes per thread. A node inside another one (reentrant checkpointing) was made on its
    own thread, every other node on the main thread, in forward.
    """
    frames = np.full(len(tree.node_names), -1, np.int64)
    of_maker = tree.thread_of(3)
    made_on = np.where(tree.nodes.parent < 0, main, tree.nodes.thread)
    for number in np.unique(made_on).tolist():
        nodes = made_on == number
        frames[nodes] = _made_by(tree, of_maker == number, nodes)
    return frames


def _made_by(tree: ProfilerTree, makers: Bool, nodes: Bool) -> Int64:
    """Return the frames for the masked nodes, which operators of one thread made.

    An operator's number is that of the next node on the thread. So the operator made the nodes from its own
    number up to, but not including, the number of the next operator.
    """
    start, sequence, frame = (column[makers] for column in tree.maker_columns())
    order = np.argsort(start, kind="stable")
    start, sequence, frame = start[order], np.maximum.accumulate(sequence[order]), frame[order]
    wanted = tree.nodes.sequence[nodes]
    following = np.append(sequence[1:], np.max(wanted, initial=-1) + 1)[: len(sequence)]
    some = following > sequence
    start, sequence, frame = start[some], sequence[some], frame[some]
    index = np.searchsorted(sequence, wanted, side="right") - 1
    has_maker = (wanted >= 0) & (index >= 0)
    has_maker &= np.append(start, 0)[index] <= tree.nodes.start_ns[nodes]
    return np.where(has_maker, np.append(frame, -1)[index], -1)
