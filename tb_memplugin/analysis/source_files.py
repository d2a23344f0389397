"""Source files in the stacks of live blocks: what each file and each of its lines holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.source_lines import stacks_in_use
from tb_memplugin.analysis.sums import sums
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Rows


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
    part, stacks = stacks_in_use(trace, trace.allocations.stack[rows])
    size, count = (
        sums(part, trace.allocations.bytes[rows], len(stacks)),
        np.bincount(part, minlength=len(stacks)),
    )
    total: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row, own_bytes, own_count in zip(stacks, size.tolist(), count.tolist(), strict=True):
        for file in {frame.file for frame in map(read_frame, trace.stack(row)) if frame.is_python}:
            total[file][0] += own_bytes
            total[file][1] += own_count
    files = [FileUse(file, own_bytes, own_count) for file, (own_bytes, own_count) in total.items()]
    return tuple(sorted(files, key=lambda use: (-use.bytes, use.file)))


def recorded_file(names: Collection[str], path: str) -> str:
    """Return the recorded file that a path names: the one with the longest common end, from its name on.

    Args:
        names: the recorded files.
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


def _common_end(one: list[str], other: list[str]) -> int:
    length = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        length += 1
    return length


def source_lines_of(trace: MemoryTrace, rows: Rows, file: str) -> tuple[LineUse, ...]:
    """Return what the lines of a recorded file hold of some allocations, in order of lines.

    Args:
        trace: any trace with stacks.
        rows: rows of `trace.allocations`.
        file: a name in `source_files`.
    """
    part, stacks = stacks_in_use(trace, trace.allocations.stack[rows])
    size, count = (
        sums(part, trace.allocations.bytes[rows], len(stacks)),
        np.bincount(part, minlength=len(stacks)),
    )
    held: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    functions: defaultdict[int, set[str]] = defaultdict(set)
    for row, own_bytes, own_count in zip(stacks, size.tolist(), count.tolist(), strict=True):
        frames = [frame for frame in map(read_frame, trace.stack(row)) if frame.file == file]
        for line in {frame.line for frame in frames}:
            held[line][2] += own_bytes
        for frame in frames:
            functions[frame.line].add(frame.function)
        if frames:
            held[frames[0].line][0] += own_bytes
            held[frames[0].line][1] += own_count
    return tuple(LineUse(line, tuple(sorted(functions[line])), *held[line]) for line in sorted(held))
