"""`stacks`: the call tree of allocations, as far as a screen can show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, get_args

from tb_memplugin.analysis.stacks import Flame, Frames, StackRow, flame, label_of
from tb_memplugin.server.allocated import Whole, allocated
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.frames import Finder, Frame, FrameTable
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Sum

FRAMES: tuple[Frames, ...] = get_args(Frames)
DEFAULT_COLUMNS = 1_000
NARROWEST = 0.5
"""Nodes narrower than this part of a pixel column are left out."""

ROOT, WITHOUT = -1, -2


class Nodes(TypedDict):
    """Nodes of the tree, as columns of equal length: parents first, siblings largest first, `(no stack)`
    last. The root and what is above `node` are always among them.
    """

    id: list[int]
    """Number of the node."""
    parent: list[int]
    """A place in these columns, -1 for the root."""
    label: list[int]
    """The frame that it goes by (a place in `frames`), -1 for the root, -2 for `(no stack)`."""
    run: list[list[int]]
    """All its frames, outermost first."""
    bytes: list[int]
    count: list[int]
    """With its children."""
    own: list[int]
    """Bytes of the stacks that end here."""
    tensor: list[str | None]
    """What lies in each of its allocations; null where they differ or it is not known of all."""
    found: list[int]
    """1 if `find` finds one of its frames."""


class _Tree(TypedDict):
    frames: list[Frame]
    nodes: Nodes
    omitted: int


class StacksAnswer(Whole):
    """The tree of calls."""

    knows_stacks: bool
    """Whether any allocation of the device has a stack."""
    frames: list[Frame]
    """All frames of the nodes."""
    node: int
    """The node that is looked at."""
    nodes: Nodes
    """Those that a screen can show."""
    omitted: int
    """How many nodes are left out."""


def answer(session: Session, request: Request) -> StacksAnswer:
    """Answer from the side file."""
    frames = request.choice("frames", FRAMES, "folded")
    opened = session.opened(session.chosen(request))
    chosen = allocated(request, opened)
    rows = chosen.stacks()
    tree = chosen.cached(frames, lambda: flame(rows, frames))
    node = request.number("node", 0, 0)
    node = node if node < len(tree.runs) else 0  # a link may name a node of another moment's tree
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    finder = Finder(request.text("find", ""))
    return {
        **chosen.shape(rows, matches_shape(rows, finder)),
        "knows_stacks": knows_stacks(opened),
        "node": node,
        **_tree_shape(tree, node, columns, finder),
    }


def matches_shape(rows: Sequence[StackRow], finder: Finder) -> Sum | None:
    """Return the sum of the stacks that contain the text; None if the text is empty."""
    if not finder:
        return None
    matching = [row for row in rows if finder.has(row.frames)]
    return {"bytes": sum(row.bytes for row in matching), "count": sum(row.calls for row in matching)}


def knows_stacks(opened: Opened) -> bool:
    """Return whether any allocation of the device has a stack."""
    blocks, device = opened.trace.allocations, opened.device
    return RESULTS.of_window(
        opened.trace,
        ("knows stacks", device),
        lambda: bool((blocks.stack[blocks.device == device] >= 0).any()),
    )


def _tree_shape(tree: Flame, root: int, columns: int, finder: Finder) -> _Tree:
    nodes, omitted = tree.in_sight(root, float(tree.bytes[root]) / columns * NARROWEST)
    shown = nodes.tolist()
    column = {node: row for row, node in enumerate(shown)}
    table = FrameTable()
    return {
        "nodes": {
            "id": shown,
            "parent": [column.get(above, -1) for above in tree.parent[nodes].tolist()],
            "label": [_label(tree, node, table) for node in shown],
            "run": [[] if node in (0, tree.without) else table.rows(tree.runs[node]) for node in shown],
            "bytes": tree.bytes[nodes].tolist(),
            "count": tree.count[nodes].tolist(),
            "own": tree.own[nodes].tolist(),
            "tensor": [tree.tensors[node] for node in shown],
            "found": [int(bool(finder) and finder.has(tree.runs[node])) for node in shown],
        },
        "frames": table.shape(),
        "omitted": omitted,
    }


def _label(tree: Flame, node: int, table: FrameTable) -> int:
    if node in (0, tree.without):
        return ROOT if node == 0 else WITHOUT
    return table.row(label_of(tree.runs[node]))
