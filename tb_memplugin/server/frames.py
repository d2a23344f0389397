"""Frames of call stacks in answers: each occurs once, with its parts and the kind of its code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, TypedDict

from tb_memplugin.analysis.curves import OTHERS
from tb_memplugin.analysis.source_lines import NO_STACK, frame_of_line, is_user_code, lines_of
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame

LONGEST = 4_000
"""The most characters of a frame's text in an answer. C++ functions can have names of several thousand."""


class Frame(TypedDict):
    """A frame of a call stack."""

    text: str
    """The frame as it was recorded."""
    function: str
    file: str
    line: int
    """Its parts."""
    kind: Literal["user", "library", "native"]
    """`user`: Python that the user wrote; `library`: other Python."""
    fx: str
    """The node of a compiled graph, or ""."""


class FrameTable:
    """Collects the frames to which an answer refers."""

    def __init__(self) -> None:
        self._row_of: dict[str, int] = {}

    def row(self, text: str) -> int:
        """Return the row of a frame in `shape()`."""
        return self._row_of.setdefault(text, len(self._row_of))

    def rows(self, texts: Sequence[str]) -> list[int]:
        """Return the rows of a stack's frames."""
        return [self.row(text) for text in texts]

    def shape(self) -> list[Frame]:
        """Return the frames, in order of their rows."""
        return [frame_shape(text) for text in self._row_of]


KindOfLine = Literal["user", "library", "native", "none"]


def kind_of_line(line: str) -> KindOfLine:
    """Return the kind of code of a line `file:line (function)`: `user`, `library`, `native` or `none`."""
    if line == NO_STACK:
        return "none"
    frame = frame_of_line(line)
    text = line if frame is None else f"{frame.function} {frame.file}:{frame.line}"
    return frame_shape(text)["kind"]


@lru_cache(maxsize=65_536)
def frame_shape(text: str) -> Frame:
    """Return the parts of a frame."""
    frame = read_frame(text)
    return {
        "text": text[:LONGEST],
        "function": frame.function[:LONGEST],
        "file": frame.file[:LONGEST],
        "line": frame.line,
        "kind": "native" if not frame.is_python else "user" if is_user_code(text) else "library",
        "fx": frame.fx[:LONGEST],
    }


def labels_of(keys: Sequence[str], by: str) -> list[str]:
    """Return display names for the parts of a division: for a stack its leading line, else the key."""
    if by != "stack":
        return [key[:LONGEST] for key in keys]
    line, names = lines_of([key.split("\n") for key in keys])
    return [
        key if key in (NO_STACK, OTHERS) else names[row][:LONGEST]
        for key, row in zip(keys, line.tolist(), strict=True)
    ]


def lines_at(trace: MemoryTrace, rows: Sequence[int]) -> list[str | None]:
    """Return the leading source line of each allocation's stack, None if it has no stack."""
    stacks = trace.allocations.stack[list(rows)].tolist()
    line, names = lines_of([trace.stack(row) for row in stacks])
    return [
        names[row][:LONGEST] if stack >= 0 else None for stack, row in zip(stacks, line.tolist(), strict=True)
    ]


class Finder:
    """A text to search for in frames, ignoring case. An empty text finds nothing and is falsy."""

    def __init__(self, text: str) -> None:
        self.text = text.casefold()
        self._contains: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.text)

    def has(self, frames: Sequence[str]) -> bool:
        """Return whether any of the frames contains the text."""
        return any(self._in(text) for text in frames)

    def _in(self, text: str) -> bool:
        if text not in self._contains:
            self._contains[text] = self.text in text.casefold()
        return self._contains[text]
