"""Call stacks: how much each allocated, as a table, as a tree, and as columns for a flame graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.analysis.source_lines import NO_STACK, is_user_code, leading_frame, stacks_in_use
from tb_memplugin.analysis.sums import sums
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import Int32, Int64, Rows


@dataclass(frozen=True, slots=True)
class StackRow(AnalysisResult):
    """What one call stack allocated: `bytes` in `calls` allocations.

    `row` is the stack's row in `trace.stacks`, -1 for none. `frames` are innermost first, empty without a
    stack. `forward`: the stack of the forward call whose backward allocated; empty if not recorded.
    `tensor`: what lies in each of the allocations; None if they differ or it is not known of all.
    """

    row: int
    frames: tuple[str, ...]
    bytes: int
    calls: int
    forward: tuple[str, ...] = ()
    tensor: str | None = None

    @property
    def bytes_per_call(self) -> float:
        """The mean bytes of an allocation."""
        return self.bytes / self.calls


def stack_table(trace: MemoryTrace, device: int, event: int | None = None) -> ResultTable[StackRow]:
    """Return what each call stack allocated, largest first; the rows sum to the whole.

    Args:
        event: count the blocks alive after this event (-1: before the first); None counts every allocation
            of the trace.
    """
    return stacks_of(trace, trace.allocations.of_device(device, event))


def stacks_of(trace: MemoryTrace, rows: Rows) -> ResultTable[StackRow]:
    """Return what each stack allocated of some allocations (rows of `trace.allocations`), largest first."""
    blocks = trace.allocations
    part, stacks = stacks_in_use(trace, blocks.stack[rows])
    onward, forwards = stacks_in_use(trace, blocks.forward[rows])
    group, count = part * len(forwards) + onward, len(stacks) * len(forwards)
    if count > len(rows):
        used, group = np.unique(group, return_inverse=True)
    else:
        used = np.arange(count)
    size = sums(group, blocks.bytes[rows], len(used))
    calls = np.bincount(group, minlength=len(used))
    order = np.flatnonzero(calls)
    order = order[np.lexsort((-calls[order], -size[order]))]
    tensor = _same_tensor(blocks.tensor[rows], group, len(used))
    columns = (used[order].tolist(), size[order].tolist(), calls[order].tolist(), tensor[order].tolist())
    table = []
    for pair, bytes_, times, only in zip(*columns, strict=True):
        stack, forward = stacks[pair // len(forwards)], forwards[pair % len(forwards)]
        name = str(trace.tensors[only]) if only >= 0 else None
        table.append(StackRow(stack, trace.stack(stack), bytes_, times, trace.stack(forward), name))
    return ResultTable(table)


def _same_tensor(tensor: Int32, group: Int64, groups: int) -> Int64:
    """Return the tensor (a row) that all blocks of a group have, -1 where they differ or it is not known."""
    lowest, highest = np.full(groups, np.iinfo(np.int32).max, np.int64), np.full(groups, -1, np.int64)
    np.minimum.at(lowest, group, tensor)
    np.maximum.at(highest, group, tensor)
    return np.where(lowest == highest, highest, -1)


class _Node:
    """A frame, with what was allocated in it or below it, and `own`: bytes of the stacks that end in it."""

    __slots__ = ("bytes", "calls", "children", "frame", "own", "tensors")

    def __init__(self, frame: str) -> None:
        self.frame, self.bytes, self.calls, self.own = frame, 0, 0, 0
        self.children: dict[str, _Node] = {}
        self.tensors: set[str | None] = set()

    def add(self, bytes_: int, calls: int, tensor: str | None = None) -> None:
        self.bytes += bytes_
        self.calls += calls
        self.tensors.add(tensor)


Frames = Literal["folded", "all", "user"]


@dataclass(frozen=True, slots=True)
class Flame:
    """A call tree in preorder: parents before children, siblings largest first, each subtree contiguous.

    `runs`: the frames that a node stands for, outermost first; () for the root, which is node 0.
    `parent`: int64, -1 for the root. `bytes` and `count` of allocations include the subtree. `own`: bytes
    of stacks that end in the node. `end`: the subtree of node n is the range n to end[n], end excluded.
    `without`: the node of allocations without a stack, which is the last; -1 if there are none. `tensors`:
    what lies in every allocation of the subtree; None if they differ or it is not known of all.
    """

    runs: tuple[tuple[str, ...], ...]
    parent: Int64
    bytes: Int64
    count: Int64
    own: Int64
    end: Int64
    without: int
    tensors: tuple[str | None, ...]

    def path(self, node: int) -> list[int]:
        """Return the node and its ancestors, root first."""
        nodes = [node]
        while self.parent[nodes[-1]] >= 0:
            nodes.append(int(self.parent[nodes[-1]]))
        return nodes[::-1]

    def in_sight(self, node: int, least_bytes: float) -> tuple[Rows, int]:
        """Return a node, its ancestors and its large enough descendants; and how many descendants are not."""
        below = np.arange(node + 1, self.end[node], dtype=np.intp)
        large = below[self.bytes[below] >= least_bytes]
        return np.concatenate((np.array(self.path(node), np.intp), large)), len(below) - len(large)


def flame(rows: Sequence[StackRow], frames: Frames = "all") -> Flame:
    """Merge the rows of a `stack_table` into a tree. The root's children and its own bytes sum to the total.

    Args:
        frames: "all" keeps every frame; "user" leaves out frames of libraries; "folded" keeps every frame,
            but joins a frame into one node with the frame below it if all its allocations pass through that.
    """
    root, without = _Node(""), _Node(NO_STACK)
    users: dict[str, bool] = {}
    for row in rows:
        root.add(row.bytes, row.calls, row.tensor)
        if not row.frames:
            without.add(row.bytes, row.calls, row.tensor)
            without.own += row.bytes
            continue
        node = root
        for text in reversed(_shortened(row.frames, users) if frames == "user" else row.frames):
            node = node.children.setdefault(text, _Node(text))
            node.add(row.bytes, row.calls, row.tensor)
        node.own += row.bytes
    return _columns(root, without if without.calls else None, fold=frames == "folded")


def _shortened(frames: tuple[str, ...], users: dict[str, bool]) -> tuple[str, ...]:
    """Return the user's frames, else the innermost Python frame, else the innermost frame.

    `users` caches whether a frame is user code.
    """
    for text in frames:
        if text not in users:
            users[text] = is_user_code(text)
    user_frames = tuple(text for text in frames if users[text])
    return user_frames or (next((text for text in frames if read_frame(text).is_python), frames[0]),)


def _columns(root: _Node, without: _Node | None, *, fold: bool) -> Flame:
    """List the nodes in preorder, without recursion: stacks may be deeper than Python's recursion limit."""
    runs: list[tuple[str, ...]] = []
    nodes: list[_Node] = []
    parent: list[int] = []
    waiting: list[tuple[_Node, int]] = [(root, -1)]
    while waiting:
        first, above = waiting.pop()
        run, last = _run(first, fold=fold and first is not root)
        index = len(nodes)
        runs.append(run if first is not root else ())
        nodes.append(last)
        parent.append(above)
        waiting += [(without, index)] if without and first is root else []
        below = sorted(last.children.values(), key=lambda child: (child.bytes, child.frame))
        waiting += [(child, index) for child in below]
    return Flame(
        runs=tuple(runs),
        parent=np.array(parent, np.int64),
        bytes=np.array([node.bytes for node in nodes], np.int64),
        count=np.array([node.calls for node in nodes], np.int64),
        own=np.array([node.own for node in nodes], np.int64),
        end=_ends(parent),
        without=next((index for index, node in enumerate(nodes) if node is without), -1),
        tensors=tuple(next(iter(node.tensors)) if len(node.tensors) == 1 else None for node in nodes),
    )


def _run(node: _Node, *, fold: bool) -> tuple[tuple[str, ...], _Node]:
    """Return the frames that are joined into one node, beginning with `node`, and the last of their nodes."""
    run = [node.frame]
    while fold and len(node.children) == 1:
        (only,) = node.children.values()
        if only.calls != node.calls:
            break
        node = only
        run.append(node.frame)
    return tuple(run), node


def _ends(parent: list[int]) -> Int64:
    end = list(range(1, len(parent) + 1))
    for node in range(len(parent) - 1, 0, -1):
        end[parent[node]] = max(end[parent[node]], end[node])
    return np.array(end, np.int64)


def label_of(run: Sequence[str]) -> str:
    """Return the leading frame of a run (outermost first), which is its label; see `leading_frame`."""
    return leading_frame(reversed(run)) or NO_STACK
