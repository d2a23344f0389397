"""Stacks and source lines of allocations: which are in use, and which line a stack stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Int64

NO_STACK = "(no stack)"

NEVER = 4
"""The rank of frames that name no line."""

_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib(64)?/python\d|^python\d*\.zip/|^[A-Za-z]:/.*/lib/[^/]+\.py$"
    r"|/torchinductor_|/torch_compile|/ipykernel/|/IPython/"
    r"|(^|/)torch/(nn|optim|autograd|utils|distributed|_\w+|cuda|xpu|fx|func|amp|library|ao|jit|profiler)/"
    r"|(^|/)torch/(_\w+|functional|hub|serialization|storage)\.py$"
)
"""Files that are not the user's: packages, the standard library, PyTorch's own tree, generated code."""


_ALIKE = re.compile(
    r"^torch::unwind::|^torch::CapturedTraceback::|\bgather_with_cpp\b|CachingAllocator\b"
    r"|\b(_?empty(_strided)?(_generic|_cuda|_xpu|_symint)?|create_out|wrapper_\w*empty\w*)\b"
)
"""C++ frames in which every stack ends: they recorded it, allocated, made an empty tensor."""


def is_user_code(text: str) -> bool:
    """Whether a frame's text is a line that the user wrote: Python, outside of packages and `<...>`."""
    frame = read_frame(text)
    if not frame.is_python or (frame.file.startswith("<") and not frame.file.startswith("<ipython")):
        return False
    return _LIBRARY.search(frame.file.replace("\\", "/")) is None


def line_key(text: str) -> str:
    """`file:line (function)` of a frame's text."""
    frame = read_frame(text)
    return f"{frame.file}:{frame.line} ({frame.function})"


def stacks_in_use(trace: MemoryTrace, stack: npt.NDArray[np.int32]) -> tuple[Int64, list[int]]:
    """Rows of `trace.stacks` renumbered without gaps: the new numbers, and the row behind each."""
    used = np.zeros(len(trace.stacks) + 1, bool)
    used[stack] = True  # -1, "no stack", is the last one
    place = np.cumsum(used) - 1
    rows = np.flatnonzero(used)
    rows[rows == len(trace.stacks)] = -1
    return place[stack].astype(np.int64), rows.tolist()


def lines_of(
    stacks: Sequence[Sequence[str]], rank: Callable[[str], int] | None = None
) -> tuple[Int64, tuple[str, ...]]:
    """The source line that each stack stands for: indices into the tuple of line keys.

    It is the innermost frame of user code, else the innermost Python frame, else the innermost that
    not every stack has (C++ that records stacks and allocates); `NO_STACK` for an empty stack.

    Args:
        stacks: innermost frame first.
        rank: another order: 0 for frames that go first, up to 3; `NEVER` for those that name no line.
    """
    ranks: dict[str, int] = {}
    keys: dict[str, int] = {}
    found = np.empty(len(stacks), np.int64)
    for row, stack in enumerate(stacks):
        text = _chosen(stack, ranks, rank or frame_rank)
        key = NO_STACK if text is None else line_key(text)
        found[row] = keys.setdefault(key, len(keys))
    return found, tuple(keys)


def leading_frame(stack: Iterable[str]) -> str | None:
    """The frame that a stack, innermost first, goes by, chosen as in `lines_of`; None for an empty one."""
    return _chosen(stack, {}, frame_rank)


def _chosen(stack: Iterable[str], ranks: dict[str, int], rank_of: Callable[[str], int]) -> str | None:
    """The innermost of the frames with the best rank. Ranks of frames are kept in `ranks`."""
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


def frame_rank(text: str) -> int:
    """How well a frame names a line: 0 user code, 1 other Python, 2 C++, 3 C++ in which every stack ends."""
    if is_user_code(text):
        return 0
    if read_frame(text).is_python:
        return 1
    return 3 if _ALIKE.search(text) else 2
