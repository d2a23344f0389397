"""Source lines: the one that stands for a stack, and what each file and each of its lines holds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.sums import sums
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import MODULE_CALL, Frame, read_frame
from tb_memplugin.trace.tables import Int64, Rows

NO_STACK = "(no stack)"

NEVER, EVERYWHERE = 5, 4
"""The rank of frames that are never chosen, and of those of C++ in which every stack ends."""

_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|(^|/)lib(64)?/python\d|^python\d*\.zip/|^[A-Za-z]:/.*/lib/[^/]+\.py$"
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

_NODE = re.compile(r"::(\w+Backward\d*)::apply\b")
"""The C++ frame that says which backward it is; those inside it have names of the code that was generated."""


_LINE_KEY = re.compile(
    r"(?P<file>.*?)(?::(?P<line>-?\d{1,18})|(?<=\.py)|(?<=\.pyx)|(?<=>)) \((?P<function>.*)\)", re.DOTALL
)


def is_user_code(text: str) -> bool:
    """Return whether a frame is the user's code: Python, outside packages and files named `<...>`."""
    frame = read_frame(text)
    if not frame.is_python or (frame.file.startswith("<") and not frame.file.startswith("<ipython")):
        return False
    return _LIBRARY.search(frame.file.replace("\\", "/")) is None


def line_key(text: str) -> str:
    """Return `file:line (function)` for a frame's text; `file (function)` where the line is not known."""
    return key_of_line(read_frame(text))


def key_of_line(frame: Frame) -> str:
    """Return `file:line (function)` for a frame; `file (function)` where the line is not known.

    The function of a node of autograd is the node's name: `MmBackward0`.
    """
    node = None if frame.is_python else _NODE.search(frame.function)
    return f"{frame.place} ({node[1] if node else frame.function})"


def frame_of_line(key: str) -> Frame | None:
    """Return the frame of a line's key; None for a key that names no line."""
    match = _LINE_KEY.fullmatch(key)
    return Frame(match["function"], match["file"], int(match["line"] or 0)) if match else None


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

    It is the innermost frame of user code, else the innermost Python frame, else the node of autograd, else
    the innermost C++ frame, preferring those outside the allocator (`_ALIKE`); `NO_STACK` for an empty stack.

    Args:
        stacks: innermost frame first.
        rank: returns the rank of a frame, from 0 (chosen first) to `NEVER`; default: `frame_rank`.
    """
    ranks: dict[str, int] = {}
    keys: dict[str, int] = {}
    line = np.empty(len(stacks), np.int64)
    for row, stack in enumerate(stacks):
        text = _chosen(stack, ranks, rank or frame_rank)
        key = NO_STACK if text is None else line_key(text)
        line[row] = keys.setdefault(key, len(keys))
    return line, tuple(keys)


def runs_library_model(stack: Sequence[str]) -> bool:
    """Return whether the line of a stack is outside of all module calls, and one of a library runs in it."""
    line, calls = leading_frame(stack), [text.startswith(MODULE_CALL) for text in stack]
    return line is not None and any(calls) and not any(calls[stack.index(line) :])


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
    """Return the rank of a frame: 0 user code, 1 other Python, 2 a node, 3 other C++, `EVERYWHERE`."""
    if is_user_code(text):
        return 0
    if read_frame(text).is_python:
        return 1
    if _NODE.search(text):
        return 2
    return EVERYWHERE if _ALIKE.search(text) else 3


@dataclass(frozen=True, slots=True)
class FileUse:
    """A source file, and the bytes and number of blocks whose stacks pass through it.

    A stack passes through several files, so the files do not sum to the whole.
    """

    file: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class LineUse:
    """A line of a source file. `functions` are those that the stacks name at this line.

    `bytes` and `count` are of blocks for which it is the innermost line of the file: the lines of a file sum
    to the bytes that pass through it. `through_bytes` are of all blocks whose stacks pass through the line.
    """

    line: int
    functions: tuple[str, ...]
    bytes: int
    count: int
    through_bytes: int


def source_files(trace: MemoryTrace, rows: Rows) -> tuple[FileUse, ...]:
    """Return the Python files in the stacks of some allocations (their rows), largest first."""
    total: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row, own_bytes, own_count in _stacks(trace, rows):
        for file in {frame.file for frame in map(read_frame, trace.stack(row)) if frame.is_python}:
            total[file][0] += own_bytes
            total[file][1] += own_count
    files = [FileUse(file, own_bytes, own_count) for file, (own_bytes, own_count) in total.items()]
    return tuple(sorted(files, key=lambda use: (-use.bytes, use.file)))


def _stacks(trace: MemoryTrace, rows: Rows) -> Iterable[tuple[int, int, int]]:
    """Return each stack of some allocations (their rows), with their bytes and their number."""
    part, stacks = stacks_in_use(trace, trace.allocations.stack[rows])
    size = sums(part, trace.allocations.bytes[rows], len(stacks))
    return zip(stacks, size.tolist(), np.bincount(part, minlength=len(stacks)).tolist(), strict=True)


def recorded_file(names: Collection[str], path: str) -> str:
    """Return the recorded file that a path names: the one with the longest common end, from its name on.

    Args:
        path: a path on this machine, or its end, such as `models/llama.py`.

    Raises:
        NotRecordedError: no recorded file has this name.
        MemPluginError: several have an equally long common end.
    """
    common = {name: _common_end(_parts(name), _parts(path)) for name in names}
    longest = max(common.values(), default=0)
    if not longest:
        raise NotRecordedError(
            f"No stack passes through a file named {_parts(path)[-1][:80]!r}.",
            where=path,
            fix="List the files: leave the source file out.",
        )
    best = [name for name, length in common.items() if length == longest]
    if len(best) > 1:
        raise MemPluginError(
            f"{len(best):,} recorded files end like this.",
            where=path,
            fix=f"Give more of the path: {', '.join(sorted(best)[:5])}.",
        )
    return best[0]


def _parts(path: str) -> list[str]:
    return path.replace("\\", "/").split("/")


def _common_end(left: list[str], right: list[str]) -> int:
    length = 0
    for part, other in zip(reversed(left), reversed(right), strict=False):
        if part != other:
            break
        length += 1
    return length


def source_lines_of(trace: MemoryTrace, rows: Rows, file: str) -> tuple[LineUse, ...]:
    """Return what the lines of a recorded file hold of some allocations, in order of lines.

    Args:
        rows: rows of `trace.allocations`.
    """
    held: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    functions: defaultdict[int, set[str]] = defaultdict(set)
    for row, own_bytes, own_count in _stacks(trace, rows):
        frames = [frame for frame in map(read_frame, trace.stack(row)) if frame.file == file]
        for line in {frame.line for frame in frames}:
            held[line][2] += own_bytes
        for frame in frames:
            functions[frame.line].add(frame.function)
        if frames:
            held[frames[0].line][0] += own_bytes
            held[frames[0].line][1] += own_count
    return tuple(LineUse(line, tuple(sorted(functions[line])), *held[line]) for line in sorted(held))
