"""Python call stacks taken at full speed, each once: code objects while tracing, texts at the end."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tb_memplugin.trace.frames import BACKWARD, THREAD

NO_ROW = -1
NOT_KEPT = 0
"""The row of the empty stack: of allocations whose stack was not taken, or not kept."""

MOST_FRAMES = 256
"""Frames of a stack that are kept, the innermost."""

MOST_STACKS = 200_000
"""Different stacks that are kept: what allocates from further ones has no stack."""

_MOST_NODES = 400_000
_NO_SEQUENCE = (1 << 64) - 1
"""The sequence number of nodes that no operator made: those that put a gradient into its parameter."""

_OURS = str(Path(__file__).parents[1])
_DISPATCH = frozenset(
    str(Path(torch.__file__).parent / name)
    for name in (
        "_compile.py",
        "_dynamo/eval_frame.py",
        "_ops.py",
        "overrides.py",
        "utils/_device.py",
        "utils/_python_dispatch.py",
    )
)
"""torch's own way from Python to a kernel: it stands between a line and what the line allocates."""

_ENGINE: CodeType | None = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)

Key = tuple[Any, ...]


class PythonStacks:
    """Call stacks by row. A stack is written down as the addresses of its code objects, which are kept alive.

    In a backward that autograd's engine runs, the frames inside the engine are followed by the stack of
    the forward call that made the node, where that is known, and `(backward of NODE)` stands between.

    Attributes:
        left_out: how many stacks were not kept, because there were `MOST_STACKS`.
        cut: how many of those kept were deeper than `MOST_FRAMES`.
    """

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {("", None, NO_ROW): NOT_KEPT}
        self._codes: dict[int, CodeType] = {}
        self.left_out = self.cut = 0

    def here(self, thread: str = "", node: str = "", forward: int = NO_ROW) -> int:
        """The row of the stack of this moment, without our own frames; `NOT_KEPT` where it is not kept.

        Args:
            thread: the thread's name, "" for the main one.
            node: what autograd computes now; `forward` is the row of the stack that made that.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_dispatch(frame.f_code.co_filename):
            frame = frame.f_back
        innermost, engine = frame, _ENGINE if forward > NOT_KEPT else None
        key: list[Any] = []
        while frame is not None:
            code = frame.f_code
            if code is engine:
                break
            key.append(id(code))
            key.append(frame.f_lasti)
            frame = frame.f_back
        # Strings and None end a key, and never occur in its middle.
        ended = (node, forward) if frame is not None else (None, NO_ROW)
        row = self._rows.get(found := (*key, thread, *ended))
        return row if row is not None else self._add(found, innermost)

    def _add(self, key: Key, frame: FrameType | None) -> int:
        if len(self._rows) >= MOST_STACKS:
            self.left_out += 1
            return NOT_KEPT
        for _ in range(len(key) // 2 - 1):
            if frame is not None:
                self._codes[id(frame.f_code)] = frame.f_code
                frame = frame.f_back
        row = self._rows[key] = len(self._rows)
        return row

    def texts(self) -> tuple[tuple[str, ...], ...]:
        """All stacks in row order: `function file:line`, innermost first, and last the thread's name."""
        frames: dict[tuple[int, int], str] = {}
        found: list[tuple[str, ...]] = []
        for *called, thread, node, forward in self._rows:
            stack = [self._text(frames, code, at) for code, at in zip(called[::2], called[1::2], strict=True)]
            if node is not None:
                stack += [f"{BACKWARD}{node})", *found[forward]]
            kept = [text for text in stack if text and not text.startswith(THREAD)]
            self.cut += len(kept) > MOST_FRAMES
            found.append((*kept[:MOST_FRAMES], *([f"{THREAD}{thread})"] if thread else [])))
        return tuple(found)

    def _text(self, frames: dict[tuple[int, int], str], code: int, at: int) -> str:
        text = frames.get((code, at))
        if text is None:
            text = frames[code, at] = _text(self._codes[code], at)
        return text


def _is_dispatch(file: str) -> bool:
    return file.startswith(_OURS) or file in _DISPATCH


def _text(code: CodeType, at: int) -> str:
    """A frame by its code object and the offset of its instruction in bytes; "" for torch's dispatch."""
    if code.co_filename in _DISPATCH:
        return ""
    lines = (line for first, end, line in code.co_lines() if first <= at < end)
    return f"{code.co_name} {code.co_filename}:{next(lines, None) or code.co_firstlineno}"


class NodeStacks:
    """Which stack made which autograd nodes of one thread, by their sequence numbers.

    Sequence numbers count on each thread by itself: an operator's node gets the next one just before the
    operator is dispatched.
    """

    def __init__(self, sequence: int) -> None:
        self._until = array("q", [sequence])
        self._rows = array("q", [NO_ROW])
        self._made_by: list[Any] = [None]
        self.last = sequence

    def add(self, sequence: int, row: int, made_by: Any) -> None:
        """An operator made the nodes from the last number on up to `sequence`, which is not one of them."""
        self.last = sequence
        self._until.append(sequence)
        self._rows.append(row)
        self._made_by.append(made_by)
        if len(self._rows) > _MOST_NODES:
            half = _MOST_NODES // 2
            del self._until[:half], self._rows[:half], self._made_by[:half]

    def made(self, sequence: int) -> tuple[int, Any]:
        """The row of the stack that made a node, and by which operator; `NO_ROW` where not known."""
        place = bisect_right(self._until, sequence)
        if 0 < place < len(self._rows):
            return self._rows[place], self._made_by[place]
        return NO_ROW, None


def forward_of(node: Any, mine: NodeStacks, every: list[NodeStacks]) -> int:
    """The row of the stack of the forward call that made an autograd node, `NO_ROW` where not known.

    A node does not tell its thread. Where several threads made nodes, one whose operator bears the node's
    name is looked for, first on this thread.
    """
    sequence = node._sequence_nr()
    if sequence == _NO_SEQUENCE:
        return NO_ROW
    if len(every) == 1:
        return mine.made(sequence)[0]
    name = node.name()
    here = mine.made(sequence)
    if _fits(name, here[1]):
        return here[0]
    elsewhere = [one.made(sequence) for one in every if one is not mine]
    rows = [row for row, made_by in elsewhere if _fits(name, made_by)]
    return rows[0] if len(rows) == 1 else NO_ROW


def _fits(name: str, made_by: Any) -> bool:
    """Whether a node's name (`LogSoftmaxBackward0`) is that of an operator (`aten::_log_softmax`)."""
    schema = getattr(made_by, "_schema", None)
    operator = str(getattr(schema, "name", "")).rpartition("::")[2].replace("_", "").lower()
    return bool(operator) and name.lower().partition("backward")[0] == operator
