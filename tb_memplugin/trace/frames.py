"""Call stack frames as texts `function file:line`, followed by torch.fx information where it is recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tb_memplugin.trace.tables import Int64

FX = " [fx "
"""The mark in a frame's text after which the torch.fx information begins; `]` ends it."""

THREAD = "(thread "
"""Prefix of a stack's last text if a thread other than the main thread is known to have run it; the thread's
name and `)` follow. This text is not a code frame and names no source line."""

BACKWARD = "(backward of "
"""Prefix of a text that separates the frames of a backward call from those of its forward call; the name of
the autograd node and `)` follow."""

MODULE_CALL = "_call_impl "
"""What the text of a call of an `nn.Module` begins with."""

_LOCATION = re.compile(r"(?P<text>.*):(?P<line>-?\d{1,18})", re.DOTALL)
_PYTHON_FILE = re.compile(r".*\.pyx?(:codegen\(\w*\))?", re.DOTALL)
"""What names a Python file. From 2.13, torch names the code that it writes for a compiled function after the
file that writes it, and `:codegen(function)` (torch/_functorch/_aot_autograd/subclass_codegen.py)."""


class Frame(NamedTuple):
    """One frame. `fx` is "" where not recorded.

    The line is 0 where it is not known: in C++, whose file is `??` or "", and in Python code that was running
    when a profile began.
    """

    function: str
    file: str
    line: int
    fx: str = ""

    @property
    def is_python(self) -> bool:
        """Whether this is a Python frame: its file ends in `.py` or `.pyx`, or is written as `<...>`."""
        return self.file.startswith("<") or _PYTHON_FILE.fullmatch(self.file) is not None

    @property
    def place(self) -> str:
        """The file and the line, `train.py:20`; of Python code whose line is not known, the file alone."""
        return f"{self.file}:{self.line}" if self.line or not self.is_python else self.file


def read_frame(text: str) -> Frame:
    """Split a frame's text into its parts. A text of another form becomes the function as a whole.

    A path of a Python file and a signature of a C++ function may contain spaces. So in the text of a
    Python frame the function ends at the first space, in any other text at the last.
    """
    written, mark, fx = text.rpartition(FX) if text.endswith("]") else ("", "", "")
    location = _LOCATION.fullmatch(written if mark else text)
    if location is None:
        return Frame(text, "", 0)
    function, _, file = location["text"].partition(" ")
    if not _is_python_file(file):
        function, _, file = location["text"].rpartition(" ")
    return Frame(function, file, int(location["line"]), fx[:-1] if mark else "")


def _is_python_file(name: str) -> bool:
    """Whether a text names a Python file, or is a placeholder like `<string>` or `<eval_with_key>.3`."""
    if name.startswith("<") and ">" in name:
        return not any(map(str.isspace, name.rpartition(">")[2]))
    return _PYTHON_FILE.fullmatch(name) is not None


def lowest_in_stacks(rank: dict[str, int], stacks: Iterable[Sequence[str]], none: int) -> Int64:
    """Return the lowest rank among each stack's frames: int64, shape (stacks,); `none` for an empty stack."""
    lookup = rank.__getitem__
    return np.array([min(map(lookup, stack), default=none) for stack in stacks], np.int64)


def distinct(stacks: Iterable[Sequence[str]]) -> set[str]:
    """Return the set of frames that occur in the stacks."""
    return set().union(*stacks)
