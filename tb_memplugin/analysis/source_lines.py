"""Stacks and source lines of allocations, and the choice of the line that stands for a stack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Int64

NO_STACK = "(no stack)"

NEVER = 4
"""The rank of frames that are never chosen."""

_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib(64)?/python\d|^python\d*\.zip/|^[A-Za-z]:/.*/lib/[^/]+\.py$"
    r"|/torchinductor_|/torch_compile|/ipykernel/|/IPython/"
    r"|(^|/)torch/(nn|optim|autograd|utils|distributed|_\w+|cuda|xpu|fx|func|amp|library|ao|jit|profiler)/"
    r"|(^|/)torch/(_\w+|functional|hub|serialization|storage)\.py$"
)
"""Files that are not user code: packages, the standard library, PyTorch's own tree, generated code."""


_ALIKE = re.compile(
    r"^torch::unwind::|^torch::CapturedTraceback::|\bgather_with_cpp\b|CachingAllocator\b"
    r"|\b(_?empty(_strided)?(_generic|_cuda|_xpu|_symint)?|create_out|wrapper_\w*empty\w*)\b"
)
"""C++ frames in which every stack ends: they record the stack, allocate, or create an empty tensor."""


def is_user_code(text: str) -> bool:
    """Return whether a frame is the user's code: Python, outside packages and files named `<...>`."""
    frame = read_frame(text)
    if not frame.is_python or (frame.file.startswith("<") and not frame.file.startswith("<ipython")):
        return False
    return _LIBRARY.search(frame.file.replace("\\", "/")) is None


def line_key(text: str) -> str:
    """Return `file:line (function)` for a frame's text."""
    frame = read_frame(text)
    return f"{frame.file}:{frame.line} ({frame.function})"


def stacks_in_use(trace: MemoryTrace, stack: npt.NDArray[np.int32]) -> tuple[Int64, list[int]]:
    """Renumber rows of `trace.stacks` without gaps; return the new numbers, and the row of each number.

    The row -1 stands for "no stack".
    """
    used = np.zeros(len(trace.stacks) + 1, bool)
    used[stack] = True  # index -1 ("no stack") is the last entry
    number = np.cumsum(used) - 1
    rows = np.flatnonzero(used)
    rows[rows == len(trace.stacks)] = -1
    return number[stack].astype(np.int64), rows.tolist()


def lines_of(
    stacks: Sequence[Sequence[str]], rank: Callable[[str], int] | None = None
) -> tuple[Int64, tuple[str, ...]]:
    """Choose the source line that stands for each stack: indices into a tuple of line keys, and the tuple.

    It is the innermost frame of user code, else the innermost Python frame, else the innermost C++ frame,
    preferring those outside the allocator (`_ALIKE`); `NO_STACK` for an empty stack.

    Args:
        stacks: innermost frame first.
        rank: returns the rank of a frame, from 0 (chosen first) to 3, or `NEVER`; default: `frame_rank`.
    """
    ranks: dict[str, int] = {}
    keys: dict[str, int] = {}
    line = np.empty(len(stacks), np.int64)
    for row, stack in enumerate(stacks):
        text = _chosen(stack, ranks, rank or frame_rank)
        key = NO_STACK if text is None else line_key(text)
        line[row] = keys.setdefault(key, len(keys))
    return line, tuple(keys)


def leading_frame(stack: Iterable[str]) -> str | None:
    """Return the frame that stands for a stack (innermost first), as in `lines_of`; None if it is empty."""
    return _chosen(stack, {}, frame_rank)


def _chosen(stack: Iterable[str], ranks: dict[str, int], rank_of: Callable[[str], int]) -> str | None:
    """Return the innermost of the frames with the lowest rank. `ranks` caches the rank of each frame."""
    best, best_rank = None, NEVER
    for text in stack:
        rank = ranks.get(text)
        if rank is None:
            rank = ranks[text] = rank_of(text)
        if rank < best_rank:
            best, best_rank = text, rank
            if rank == 0:
                break
    return best


@lru_cache(maxsize=16_384)
def frame_rank(text: str) -> int:
    """Return the rank of a frame: 0 user code, 1 other Python, 2 C++, 3 C++ in which every stack ends."""
    if is_user_code(text):
        return 0
    if read_frame(text).is_python:
        return 1
    return 3 if _ALIKE.search(text) else 2
