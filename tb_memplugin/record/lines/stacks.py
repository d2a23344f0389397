"""Record Python call stacks quickly: as code objects while tracing, converted to texts at the end."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tb_memplugin.read.python_frames import MOST_FRAMES
from tb_memplugin.record.torch_private.autograd import NO_SEQUENCE, node_number, run_backward
from tb_memplugin.record.torch_private.dispatch import DISPATCH_FILES, schema_of
from tb_memplugin.trace.frames import BACKWARD, THREAD

NO_ROW = -1
NOT_KEPT = 0
"""The row of the empty stack, for allocations whose stack was not recorded or not kept."""

MOST_STACKS = 200_000
"""The largest number of distinct stacks; allocations from further stacks have none."""

_MOST_NODES = 400_000

_OURS = str(Path(__file__).parents[1])
_ENGINE: CodeType | None = getattr(run_backward, "__code__", None)

Key = tuple[Any, ...]


class PythonStacks:
    """Call stacks by row. A stack is stored as the addresses of its code objects, which are kept alive.

    In backward, the frames inside autograd's engine are followed by `(backward of NODE)` and then by the
    stack of the forward call that made the node, if that is known.

    Attributes:
        left_out: how many stacks were not kept, because there were `MOST_STACKS`.
        cut: how many of those kept were deeper than `MOST_FRAMES`.
    """

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {("", None, NO_ROW): NOT_KEPT}
        self._codes: dict[int, CodeType] = {}
        self.left_out = self.cut = 0

    def here(self, thread: str = "", node: str = "", forward: int = NO_ROW) -> int:
        """Return the row of the current stack without tb_memplugin's own frames; `NOT_KEPT` if not kept.

        Args:
            thread: the thread's name, "" for the main thread.
            node: the name of the autograd node that runs now, "" for none.
            forward: the row of the stack that made that node.
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
        row = self._rows.get(stack := (*key, thread, *ended))
        return row if row is not None else self._add(stack, innermost)

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
        """Return all stacks in row order: `function file:line`, innermost first, then the thread's name."""
        frames: dict[tuple[int, int], str] = {}
        stacks: list[tuple[str, ...]] = []
        for *called, thread, node, forward in self._rows:
            stack = [self._text(frames, code, at) for code, at in zip(called[::2], called[1::2], strict=True)]
            if node is not None:
                stack += [f"{BACKWARD}{node})", *stacks[forward]]
            kept = [text for text in stack if text and not text.startswith(THREAD)]
            self.cut += len(kept) > MOST_FRAMES
            stacks.append((*kept[:MOST_FRAMES], *([f"{THREAD}{thread})"] if thread else [])))
        return tuple(stacks)

    def _text(self, frames: dict[tuple[int, int], str], code: int, at: int) -> str:
        text = frames.get((code, at))
        if text is None:
            text = frames[code, at] = _text(self._codes[code], at)
        return text


def _is_dispatch(file: str) -> bool:
    return file.startswith(_OURS) or file in DISPATCH_FILES


def _text(code: CodeType, at: int) -> str:
    """Return a frame's text from its code object and instruction offset; "" for dispatch and ours."""
    if _is_dispatch(code.co_filename):
        return ""
    lines = (line for first, end, line in code.co_lines() if first <= at < end)
    return f"{code.co_name} {code.co_filename}:{next(lines, None) or code.co_firstlineno}"


class NodeStacks:
    """The stacks that made the autograd nodes of one thread, by sequence number.

    Each thread counts its own sequence numbers: an operator's node gets the next one just before the
    operator is dispatched.
    """

    def __init__(self, sequence: int) -> None:
        self._until = array("q", [sequence])
        self._rows = array("q", [NO_ROW])
        self._made_by: list[Any] = [None]
        self.last = sequence

    def add(self, sequence: int, row: int, made_by: Any) -> None:
        """Record that an operator made the nodes from the last number to before `sequence`."""
        self.last = sequence
        self._until.append(sequence)
        self._rows.append(row)
        self._made_by.append(made_by)
        if len(self._rows) > _MOST_NODES:
            half = _MOST_NODES // 2
            del self._until[:half], self._rows[:half], self._made_by[:half]

    def maker_of(self, sequence: int) -> tuple[int, Any]:
        """Return the row of the stack that made a node, and the operator; (`NO_ROW`, None) if not known."""
        index = bisect_right(self._until, sequence)
        if 0 < index < len(self._rows):
            return self._rows[index], self._made_by[index]
        return NO_ROW, None


def forward_of(node: Any, mine: NodeStacks, every: list[NodeStacks]) -> int:
    """Return the row of the stack of the forward call that made an autograd node, `NO_ROW` if not known.

    A node does not know its thread. If several threads made nodes, the operator whose name matches the
    node's is searched, first on this thread.
    """
    sequence = node_number(node)
    if sequence == NO_SEQUENCE:
        return NO_ROW
    if len(every) == 1:
        return mine.maker_of(sequence)[0]
    name = node.name()
    here = mine.maker_of(sequence)
    if _fits(name, here[1]):
        return here[0]
    elsewhere = [stacks.maker_of(sequence) for stacks in every if stacks is not mine]
    rows = [row for row, made_by in elsewhere if _fits(name, made_by)]
    return rows[0] if len(rows) == 1 else NO_ROW


def _fits(name: str, made_by: Any) -> bool:
    """Whether a node's name (`LogSoftmaxBackward0`) matches an operator's (`aten::_log_softmax`)."""
    operator = str(getattr(schema_of(made_by), "name", "")).rpartition("::")[2].replace("_", "").lower()
    return bool(operator) and name.lower().partition("backward")[0] == operator
