"""Frames of call stacks: texts `function file:line`, with what torch.fx knew behind them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tb_memplugin.trace.tables import Int64

FX = " [fx "
"""Where what torch.fx knew begins in a frame's text; `]` ends it."""

THREAD = "(thread "
"""What a stack's last text begins with, where it is known that another thread than the main one ran it; the
thread's name and `)` follow. It is no frame of code, and names no place."""

BACKWARD = "(backward of "
"""What a text begins with that stands between the frames inside a backward and those of the forward call of
which it is the backward; the autograd node's name and `)` follow."""

_PLACE = re.compile(r"(?P<text>.*):(?P<line>-?\d{1,18})", re.DOTALL)


class Frame(NamedTuple):
    """One frame. C++ frames have the file `??` or an empty one, and line 0. `fx` is "" where not recorded."""

    function: str
    file: str
    line: int
    fx: str = ""

    @property
    def is_python(self) -> bool:
        """Whether Python's interpreter ran it: C++ frames end in no `.py`, and are in no `<...>`."""
        return self.file.endswith((".py", ".pyx")) or self.file.startswith("<")


def read_frame(text: str) -> Frame:
    """The parts of a frame's text. What is no such text becomes the function, whole.

    A Python file may have spaces in its path, a C++ function in its signature: where the text ends as a
    Python file does, the function is all before the first space, else all before the last.
    """
    written, mark, fx = text.rpartition(FX) if text.endswith("]") else ("", "", "")
    place = _PLACE.fullmatch(written if mark else text)
    if place is None:
        return Frame(text, "", 0)
    function, _, file = place["text"].partition(" ")
    if not _is_python_file(file):
        function, _, file = place["text"].rpartition(" ")
    return Frame(function, file, int(place["line"]), fx[:-1] if mark else "")


def _is_python_file(name: str) -> bool:
    """Whether a text is a Python file, or like `<string>` or `<eval_with_key>.3` stands for none."""
    if name.startswith("<") and ">" in name:
        return not any(map(str.isspace, name.rpartition(">")[2]))
    return name.endswith((".py", ".pyx"))


def lowest_in_stacks(rank: dict[str, int], stacks: Iterable[Sequence[str]], none: int) -> Int64:
    """The lowest rank of any frame of each stack: int64, shape (stacks,); `none` for an empty stack.

    Args:
        rank: of every frame's text that occurs.
    """
    lookup = rank.__getitem__
    return np.array([min(map(lookup, stack), default=none) for stack in stacks], np.int64)


def distinct(stacks: Iterable[Sequence[str]]) -> set[str]:
    """The frames that occur in stacks, each once."""
    return set().union(*stacks)
