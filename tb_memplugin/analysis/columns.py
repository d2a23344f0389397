"""Pixel columns over time or over events, and the exact lowest and highest level in each."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64

Cuts = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)


def time_cuts(trace: MemoryTrace, t0_ns: int, t1_ns: int, columns: int) -> Cuts:
    """Return how many events come before each edge of equally wide time columns: int64, (columns + 1,)."""
    edges = t0_ns + _shares(t1_ns - t0_ns, columns)
    cuts = np.searchsorted(trace.events.time_ns, edges, side="left").astype(np.int64)
    cuts[-1] = np.searchsorted(trace.events.time_ns, t1_ns, side="right")
    return cuts


def event_cuts(trace: MemoryTrace, first: int, end: int, columns: int) -> Cuts:
    """Return `time_cuts` for columns over an axis of events, where event e spans e to e + 1."""
    edges = end - _shares(end - first, columns)[::-1]  # rounded up: an event counts where it begins
    cuts: Cuts = np.clip(edges, 0, len(trace.events))
    return cuts


def _shares(length: int, columns: int) -> Int64:
    """Return `length * c // columns` for c = 0 to `columns`; the product itself could exceed an int64."""
    column = np.arange(columns + 1, dtype=np.int64)
    width, rest = divmod(length, columns)
    return column * width + column * rest // columns


def step_columns(steps: int, most: int) -> tuple[Int64, Int64]:
    """Divide steps into at most `most` columns of nearly equally many.

    Returns:
        The index of the first and of the last step of each column: int64, shape (columns,).
    """
    columns = min(most, steps)
    first = np.arange(columns, dtype=np.int64) * steps // max(columns, 1)
    return first, np.append(first[1:], steps)[:columns] - 1


def extremes(level: Int64, cuts: Int64) -> tuple[Int64, Int64, Int64]:
    """Return the lowest level, the highest, and the index of the highest in each column.

    A column includes the levels from its beginning (`level[cuts[c]]`, the level after the event before it) to
    the level after its last event. `level` has one entry more than there are events.
    """
    first, last = cuts[:-1], cuts[1:]
    low, high, at = level[first].copy(), level[first].copy(), first.astype(np.int64)
    busy = np.flatnonzero(last > first)
    if not len(busy):
        return low, high, at
    inside = level[first[busy[0]] : last[busy[-1]] + 1]
    base = first[busy[0]]
    starts = first[busy] - base
    low[busy] = np.minimum(np.minimum.reduceat(inside, starts), level[last[busy]])
    high[busy] = np.maximum(np.maximum.reduceat(inside, starts), level[last[busy]])
    at[busy] = _first_indices(inside, starts, last[busy] - base, high[busy]) + base
    return low, high, at


def highest(level: npt.NDArray[Number], cuts: Int64) -> npt.NDArray[Number]:
    """Return the highest level in each column, as `extremes` does; same dtype as `level`."""
    first, last = cuts[:-1], cuts[1:]
    ranges = np.stack((first, last), axis=1).ravel()
    inside = level[: last[-1] + 1]
    top: npt.NDArray[Number] = np.maximum(np.maximum.reduceat(inside, ranges)[::2], level[last])
    return top


def _first_indices(level: Int64, starts: Int64, ends: Int64, value: Int64) -> Int64:
    """Return the first index in each closed range [starts, ends] at which the level equals `value`."""
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, ends[-1] + 1)))
    hits = np.flatnonzero(level[: len(group)] == value[group])
    owner = group[hits]  # ascending, so the first hit of a group is where the owner changes
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    indices: Int64 = ends.astype(np.int64).copy()
    indices[owner[first]] = hits[first]
    return indices
