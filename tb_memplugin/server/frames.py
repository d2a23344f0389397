"""Frames of call stacks as answers tell them: each once, with its parts and whose code it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tb_memplugin.analysis.curve import OTHERS
from tb_memplugin.analysis.source_lines import NO_STACK, is_user_code, lines_of
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace.frames import read_frame

LONGEST = 4_000
"""Characters of a frame's text in an answer. A C++ function may have a name of several thousand."""


class FrameTable:
    """Gathers the frames that an answer speaks of."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    def row(self, text: str) -> int:
        """The row of a frame in `shape()`."""
        return self._place.setdefault(text, len(self._place))

    def rows(self, texts: Sequence[str]) -> list[int]:
        """The rows of a stack."""
        return [self.row(text) for text in texts]

    def shape(self) -> list[Json]:
        """FRAMEs, in order of their rows."""
        return [dict(_frame_shape(text)) for text in self._place]


def kind_of(text: str) -> str:
    """Whose code a frame is: `user`, `library` or `native`."""
    return str(_frame_shape(text)["kind"])


@lru_cache(maxsize=65_536)
def _frame_shape(text: str) -> Json:
    frame = read_frame(text)
    kind = "native" if not frame.is_python else "user" if is_user_code(text) else "library"
    return {
        "text": text[:LONGEST],
        "function": frame.function[:LONGEST],
        "file": frame.file[:LONGEST],
        "line": frame.line,
        "kind": kind,
        "fx": frame.fx[:LONGEST],
    }


def labels_of(keys: Sequence[str], by: str) -> list[str]:
    """What parts of a division go by: a stack by the line of it that people know, others by their key."""
    if by != "stack":
        return [key[:LONGEST] for key in keys]
    line, names = lines_of([key.split("\n") for key in keys])
    return [
        key if key in (NO_STACK, OTHERS) else names[row][:LONGEST]
        for key, row in zip(keys, line.tolist(), strict=True)
    ]


class Finder:
    """A text that a person looks for in frames, case aside. One that is empty finds nothing."""

    def __init__(self, text: str) -> None:
        self.text = text.casefold()
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.text)

    def has(self, frames: Sequence[str]) -> bool:
        """Whether any of the frames holds the text."""
        return any(self._in(text) for text in frames)

    def _in(self, text: str) -> bool:
        if text not in self._known:
            self._known[text] = self.text in text.casefold()
        return self._known[text]
