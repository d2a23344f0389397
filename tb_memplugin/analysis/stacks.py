"""Call stacks: how much each allocated, as a table and as a tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tb_memplugin.analysis.breakdown import sums
from tb_memplugin.analysis.source_lines import stacks_in_use
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Rows

ROOT = "(all)"


@dataclass(frozen=True, slots=True)
class StackRow:
    """What one call stack allocated: `bytes` in `calls` allocations.

    `row` is the stack's row in `trace.stacks`, -1 for none. `frames` are innermost first, empty without a
    stack. `forward`: the stack of the forward call whose backward allocated; empty if not recorded.
    """

    row: int
    frames: tuple[str, ...]
    bytes: int
    calls: int
    forward: tuple[str, ...] = ()

    @property
    def bytes_per_call(self) -> float:
        """The mean bytes of an allocation."""
        return self.bytes / self.calls


@dataclass(frozen=True, slots=True)
class StackNode:
    """A frame as called from the frames above it, with all that was allocated in it or below it.

    `children`: the frames that it called, largest first. Bytes in none of them were allocated by itself.
    """

    frame: str
    bytes: int
    calls: int
    children: tuple[StackNode, ...]


def chosen_rows(trace: MemoryTrace, device: int, event: int | None) -> Rows:
    """Return the rows of allocations on a device: those alive after an event; None: all made in the trace."""
    if event is not None:
        return trace.allocations.alive_at(event, device)
    blocks = trace.allocations
    return np.flatnonzero((blocks.device == device) & (blocks.born >= 0))


def stack_table(trace: MemoryTrace, device: int, event: int | None = None) -> tuple[StackRow, ...]:
    """Return what each call stack allocated, largest first; the rows sum to the whole.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        event: count the blocks alive after this event (-1: before the first); None counts every allocation
            of the trace.
    """
    return stacks_of(trace, chosen_rows(trace, device, event))


def stacks_of(trace: MemoryTrace, rows: Rows) -> tuple[StackRow, ...]:
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
    columns = (used[order].tolist(), size[order].tolist(), calls[order].tolist())
    table = []
    for pair, bytes_, times in zip(*columns, strict=True):
        stack, forward = stacks[pair // len(forwards)], forwards[pair % len(forwards)]
        table.append(StackRow(stack, trace.stack(stack), bytes_, times, trace.stack(forward)))
    return tuple(table)


@dataclass(slots=True)
class _Node:
    frame: str
    bytes: int = 0
    calls: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


def stack_tree(trace: MemoryTrace, device: int, event: int | None = None) -> StackNode:
    """Return `stack_table` as a tree, merged from the outermost frame on; the root `ROOT` holds the whole.

    Allocations without a stack count to the root only.

    Args:
        trace, device, event: as in `stack_table`.
    """
    rows = chosen_rows(trace, device, event)
    blocks = trace.allocations
    part, stacks = stacks_in_use(trace, blocks.stack[rows])
    size = sums(part, blocks.bytes[rows], len(stacks)).tolist()
    calls = np.bincount(part, minlength=len(stacks)).tolist()
    nodes = [_Node(ROOT)]
    for row, bytes_, times in zip(stacks, size, calls, strict=True):
        node = nodes[0]
        _add(node, bytes_, times)
        for text in reversed(trace.stack(row)):
            if text not in node.children:
                node.children[text] = _Node(text)
                nodes.append(node.children[text])
            node = node.children[text]
            _add(node, bytes_, times)
    return _frozen(nodes)


def _add(node: _Node, bytes_: int, calls: int) -> None:
    node.bytes += bytes_
    node.calls += calls


def _frozen(nodes: list[_Node]) -> StackNode:
    """Freeze the nodes (parents first) and return the root, without recursion: stacks may be very deep."""
    done: dict[int, StackNode] = {}
    for node in reversed(nodes):
        children = sorted((done.pop(id(child)) for child in node.children.values()), key=lambda n: -n.bytes)
        done[id(node)] = StackNode(node.frame, node.bytes, node.calls, tuple(children))
    return done[id(nodes[0])]
