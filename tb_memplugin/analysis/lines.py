"""Source lines: what each allocated, and a report of what each holds at the peak, also by thread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import accumulate

import numpy as np

from tb_memplugin.analysis.divisions import codes
from tb_memplugin.analysis.findings import Evidence
from tb_memplugin.analysis.source_lines import (
    NEVER,
    NO_STACK,
    frame_of_line,
    frame_rank,
    lines_of,
    stacks_in_use,
)
from tb_memplugin.analysis.sums import sums
from tb_memplugin.analysis.units import counted
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import BACKWARD, THREAD, Frame, read_frame
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import Int64, Rows

SHOWN_LINES = 4
"""How many source lines are evidence of a finding."""


@dataclass(frozen=True, slots=True)
class LineRow(AnalysisResult):
    """What one line, `file:line (function)`, allocated: `bytes` in `calls` allocations.

    `median_bytes` is the median size; if `calls` is even, the mean of the two sizes in the middle.
    """

    key: str
    bytes: int
    calls: int
    median_bytes: float


def line_table(trace: MemoryTrace, device: int, event: int | None = None) -> ResultTable[LineRow]:
    """Return what each source line allocated, largest first; the rows sum to the whole.

    An allocation counts to the innermost line of user code in its stack; `source_lines.lines_of` says which
    line it is if there is none.

    Args:
        event: count the blocks alive after this event (-1: before the first); None counts every allocation
            of the trace.
    """
    return lines_of_rows(trace, trace.allocations.of_device(device, event))


def lines_of_rows(trace: MemoryTrace, rows: Rows) -> ResultTable[LineRow]:
    """Return what each line allocated of some allocations (rows of `trace.allocations`), largest first."""
    return tally(*codes(trace, "line", rows), trace.allocations.bytes[rows])


def line_evidence(trace: MemoryTrace, rows: Rows, detail: str = "alive at the peak") -> list[Evidence]:
    """Return the lines that allocated most of some blocks (rows of `trace.allocations`), largest first."""
    lines = lines_of_rows(trace, rows)[:SHOWN_LINES]
    return [Evidence(line.key, line.bytes, f"{counted(line.calls, 'block')} {detail}") for line in lines]


def tally(part: Int64, keys: Sequence[str], size: Int64) -> ResultTable[LineRow]:
    """Sum the allocations of each key, largest first.

    Args:
        part: the key of each allocation, as an index into `keys`.
        size: bytes of each allocation.
    """
    calls = np.bincount(part, minlength=len(keys))
    total, median = sums(part, size, len(keys)), _medians(part, size, calls)
    order = np.flatnonzero(calls)
    order = order[np.argsort(-total[order], kind="stable")]
    return ResultTable(
        LineRow(keys[row], int(total[row]), int(calls[row]), float(median[row])) for row in order.tolist()
    )


def _medians(group: Int64, size: Int64, count: Int64) -> np.ndarray:
    """Return the median size in each group: float64; 0 for an empty group."""
    if not len(group):
        return np.zeros(len(count))
    ordered = size[np.lexsort((size, group))]
    first = np.cumsum(count) - count
    lower = np.minimum(first + np.maximum(count - 1, 0) // 2, len(size) - 1)
    upper = np.minimum(first + count // 2, len(size) - 1)
    return np.where(count > 0, (ordered[lower] + ordered[upper]) / 2, 0.0)


UNTRACED = "untraced"
"""Key of blocks that were allocated before tracing began and have no known line."""

EXCLUDED = "(excluded)"
"""Key of allocations whose frames are all excluded."""

MAIN_THREAD = "MainThread"


@dataclass(frozen=True, slots=True)
class LineChoice:
    """Which frame names an allocation; by default the innermost user frame, else the innermost Python frame.

    Attributes:
        library_code: take the innermost Python frame, even if it is in a library.
        include: shell patterns (`*/model.py`); frames in matching files come before all others.
        exclude: shell patterns; frames in matching files are never taken.
    """

    library_code: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def rank(self, text: str) -> int:
        """Return the rank of a frame, for `source_lines.lines_of`."""
        if text.startswith((THREAD, BACKWARD)):
            return NEVER
        file = read_frame(text).file.replace("\\", "/")
        if _matches(file, self.exclude):
            return NEVER
        if _matches(file, self.include):
            return 0
        rank = frame_rank(text)
        if self.library_code and rank == 1:
            rank = 0
        return max(rank, 1) if self.include else rank


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(re.match(translate(pattern), file) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class LineUse(AnalysisResult):
    """What one line holds: `bytes` in `count` blocks; `cumulative_bytes` adds those of all lines before it.

    `location` is `file:line (function)`, or a key such as `UNTRACED`; then `line` is 0.
    """

    bytes: int
    cumulative_bytes: int
    median_bytes: float
    count: int
    location: str
    file: str = ""
    line: int = 0
    function: str = ""


@dataclass(frozen=True, slots=True)
class ThreadLines(AnalysisResult):
    """What the lines of one thread hold, largest first."""

    name: str
    bytes: int
    lines: tuple[LineUse, ...]


@dataclass(frozen=True, slots=True)
class LineReport(AnalysisResult):
    """What was alive at the peak of a device, by line, largest first. Sizes are bytes.

    `max_bytes` is the peak: the last line's `cumulative_bytes`, and the sum of the threads' bytes.
    `total_allocated_bytes` sums all allocations while tracing. `threads` is empty if they are not known.
    """

    device: str
    max_bytes: int
    total_allocated_bytes: int
    untraced_bytes: int
    lines: tuple[LineUse, ...]
    threads: tuple[ThreadLines, ...]
    notes: tuple[str, ...]


def line_uses(trace: MemoryTrace, rows: Rows, choice: LineChoice) -> ResultTable[LineUse]:
    """Return what each line holds of some allocations (rows of `trace.allocations`), largest first."""
    part, stacks = stacks_in_use(trace, trace.allocations.stack[rows])
    frames = [trace.stack(row) for row in stacks]
    line, named = lines_of(frames, choice.rank)
    keys = (*named, UNTRACED, EXCLUDED)
    lost = [bool(stack) and named[key] == NO_STACK for stack, key in zip(frames, line.tolist(), strict=True)]
    line[np.array(lost, bool)] = len(named) + 1
    key = line[part]
    before = (trace.allocations.stack[rows] < 0) & (trace.allocations.born[rows] < 0)
    key[before] = len(named)
    return _uses(tally(key, keys, trace.allocations.bytes[rows]))


def thread_lines(trace: MemoryTrace, rows: Rows, choice: LineChoice) -> tuple[ThreadLines, ...]:
    """Return `line_uses` for each thread, largest first. Blocks without a stack form a thread `UNTRACED`."""
    stack = trace.allocations.stack[rows]
    names = np.array([*map(_thread, trace.stacks), UNTRACED], object)[stack]
    threads = []
    for name in sorted(set(names.tolist())):
        own = rows[names == name]
        threads.append(
            ThreadLines(name, int(trace.allocations.bytes[own].sum()), line_uses(trace, own, choice))
        )
    return tuple(sorted(threads, key=lambda thread: -thread.bytes))


def _thread(stack: Sequence[str]) -> str:
    if not stack:
        return NO_STACK
    return stack[-1][len(THREAD) : -1] if stack[-1].startswith(THREAD) else MAIN_THREAD


def _uses(rows: Sequence[LineRow]) -> ResultTable[LineUse]:
    cumulative = accumulate(row.bytes for row in rows)
    return ResultTable(
        LineUse(
            row.bytes, so_far, row.median_bytes, row.calls, row.key, frame.file, frame.line, frame.function
        )
        for row, so_far in zip(rows, cumulative, strict=True)
        for frame in [frame_of_line(row.key) or Frame("", "", 0)]
    )
