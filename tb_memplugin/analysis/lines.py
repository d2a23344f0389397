"""Source lines: how much each line of the user's code allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.breakdown import codes, sums
from tb_memplugin.analysis.stacks import chosen_rows
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64, Rows


@dataclass(frozen=True, slots=True)
class LineRow:
    """What one line, `file:line (function)`, allocated: `bytes` in `calls` allocations.

    `median_bytes` is the median size; if `calls` is even, the mean of the two sizes in the middle.
    """

    key: str
    bytes: int
    calls: int
    median_bytes: float


def line_table(trace: MemoryTrace, device: int, event: int | None = None) -> tuple[LineRow, ...]:
    """Return what each source line allocated, largest first; the rows sum to the whole.

    An allocation counts to the innermost line of user code in its stack; `source_lines.lines_of` says which
    line it is if there is none.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        event: count the blocks alive after this event (-1: before the first); None counts every allocation
            of the trace.
    """
    return lines_of_rows(trace, chosen_rows(trace, device, event))


def lines_of_rows(trace: MemoryTrace, rows: Rows) -> tuple[LineRow, ...]:
    """Return what each line allocated of some allocations (rows of `trace.allocations`), largest first."""
    return tally(*codes(trace, "line", rows), trace.allocations.bytes[rows])


def tally(part: Int64, keys: Sequence[str], size: Int64) -> tuple[LineRow, ...]:
    """Sum the allocations of each key, largest first.

    Args:
        part: the key of each allocation, as an index into `keys`.
        keys: the keys.
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
    """Return the median size in each group: float64; 0 for an empty group."""
    if not len(group):
        return np.zeros(len(count))
    ordered = size[np.lexsort((size, group))]
    first = np.cumsum(count) - count
    lower = np.minimum(first + np.maximum(count - 1, 0) // 2, len(size) - 1)
    upper = np.minimum(first + count // 2, len(size) - 1)
    return np.where(count > 0, (ordered[lower] + ordered[upper]) / 2, 0.0)
