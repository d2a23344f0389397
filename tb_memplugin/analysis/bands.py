"""The largest allocations of a stretch as bands over pixel columns, and all others as one band."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.breakdown import sums
from tb_memplugin.analysis.columns import extremes
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64, Rows


@dataclass(frozen=True, slots=True)
class Bands:
    """A device's live bytes in columns, divided into single allocations. Bytes, int64.

    `low`, `high`: the lowest and highest of each column, shape (columns,). A column shows the moment of its
    highest level: allocation `rows[i]` (a row of `trace.allocations`, in order of allocation) is alive in the
    columns `first[i]` to `last[i]`. In each column the bytes of these and `rest` sum to `high`. `small` are
    the allocations in `rest`, alive in the columns `small_first` to `small_last`.
    """

    low: Int64
    high: Int64
    rows: Rows
    first: Int64
    last: Int64
    rest: Int64
    small: Rows
    small_first: npt.NDArray[np.int32]
    small_last: npt.NDArray[np.int32]
    peak_event: int
    peak_column: int


def bands(trace: MemoryTrace, device: int, cuts: Int64, most: int) -> Bands:
    """Divide the live bytes of a stretch into its `most` largest allocations and a rest.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        cuts: how many events come before each edge of the columns, from `time_cuts` or `event_cuts`.
        most: how many allocations get a band of their own.
    """
    low, high, at = extremes(trace.live(device), cuts)
    blocks = trace.allocations
    overlaps = (blocks.device == device) & (blocks.born < at[-1]) & (blocks.freed >= at[0])
    rows = np.flatnonzero(overlaps)
    # A block is alive at a moment `at` if born < at <= freed. `at` never decreases from column to column.
    first = np.searchsorted(at, blocks.born[rows], side="right")
    last = np.searchsorted(at, blocks.freed[rows], side="right") - 1
    drawn = np.flatnonzero(first <= last)
    largest = _largest(blocks.bytes[rows[drawn]], most)
    chosen, small = drawn[largest], np.delete(drawn, largest)
    size = blocks.bytes[rows[chosen]]
    top = int(np.argmax(high))
    return Bands(
        low=low,
        high=high,
        rows=rows[chosen],
        first=first[chosen].astype(np.int64),
        last=last[chosen].astype(np.int64),
        rest=high - _stacked(size, first[chosen], last[chosen], len(at)),
        small=rows[small],
        small_first=first[small].astype(np.int32),
        small_last=last[small].astype(np.int32),
        peak_event=int(at[top]) - 1,
        peak_column=top,
    )


def divided_rest(drawn: Bands, size: Int64, part: Int64, parts: int) -> Int64:
    """Divide the rest of each column into parts. Returns bytes, int64, shape (parts, columns).

    Args:
        drawn: the bands.
        size: bytes of each of `found.small`.
        part: the part of each of `found.small`, from 0 to `parts` - 1.
        parts: how many parts there are.
    """
    width = len(drawn.rest) + 1
    change = sums(part * width + drawn.small_first, size, parts * width)
    change -= sums(part * width + drawn.small_last + 1, size, parts * width)
    divided: Int64 = np.cumsum(change.reshape(parts, width), axis=1)[:, :-1]
    return divided


def _largest(size: Int64, most: int) -> Rows:
    """Return the indices of the `most` largest, in ascending order; of equal ones the first."""
    if len(size) <= most:
        return np.arange(len(size), dtype=np.intp)
    least = np.partition(size, len(size) - most)[len(size) - most]
    larger, equal = np.flatnonzero(size > least), np.flatnonzero(size == least)
    chosen: Rows = np.sort(np.concatenate((larger, equal[: most - len(larger)])))
    return chosen


def _stacked(size: Int64, first: Rows, last: Rows, columns: int) -> Int64:
    """Return the sum of the bands in each column."""
    change = np.zeros(columns + 1, np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    return np.cumsum(change[:-1])
