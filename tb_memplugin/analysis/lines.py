"""Source lines: which lines of the user's code allocated how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.breakdown import codes, sums
from tb_memplugin.analysis.stacks import chosen_rows
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class LineRow:
    """What one line, `file:line (function)`, allocated: `bytes` in `calls` allocations.

    `median_bytes` is the size of the middle allocation, the mean of the two in the middle if calls are even.
    """

    key: str
    bytes: int
    calls: int
    median_bytes: float


def line_table(trace: MemoryTrace, device: int, event: int | None = None) -> tuple[LineRow, ...]:
    """What each source line allocated, largest first; the rows sum to the whole.

    A stack stands for its innermost frame of user code; see `source_lines.lines_of` for the others.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        event: what was alive after this event (-1: before the first); None: every allocation of the trace.
    """
    return lines_made_by(trace, chosen_rows(trace, device, event))


def lines_made_by(trace: MemoryTrace, rows: npt.NDArray[np.intp]) -> tuple[LineRow, ...]:
    """The lines that some allocations (rows of `trace.allocations`) come from, largest first."""
    return tally(*codes(trace, "line", rows), trace.allocations.bytes[rows])


def tally(part: Int64, keys: Sequence[str], size: Int64) -> tuple[LineRow, ...]:
    """What each key's allocations come to, largest first.

    Args:
        part: the key of each allocation, an index into `keys`.
        size: bytes of each allocation.
    """
    calls = np.bincount(part, minlength=len(keys))
    total, median = sums(part, size, len(keys)), _medians(part, size, calls)
    order = np.flatnonzero(calls)
    order = order[np.argsort(-total[order], kind="stable")]
    return tuple(
        LineRow(keys[row], int(total[row]), int(calls[row]), float(median[row])) for row in order.tolist()
    )


def _medians(group: Int64, size: Int64, count: Int64) -> np.ndarray:
    """The median size of each group: float64; 0 for an empty one."""
    if not len(group):
        return np.zeros(len(count))
    ordered = size[np.lexsort((size, group))]
    first = np.cumsum(count) - count
    lower = np.minimum(first + np.maximum(count - 1, 0) // 2, len(size) - 1)
    upper = np.minimum(first + count // 2, len(size) - 1)
    return np.where(count > 0, (ordered[lower] + ordered[upper]) / 2, 0.0)
