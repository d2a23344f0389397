"""Pixel columns over time or over events, and the exact lowest and highest level in each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.runs import RUN, Number, Runs
from tb_memplugin.trace.tables import Int64, ranges

Cuts = npt.NDArray[np.int64]

SHORT = 4
"""Columns of fewer runs on average are read value by value."""


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


def extremes(
    level: npt.NDArray[Number], cuts: Int64, runs: Runs[Number] | None = None
) -> tuple[npt.NDArray[Number], npt.NDArray[Number], Int64]:
    """Return the lowest level, the highest, and the first index of the highest in each column.

    A column includes the levels from its beginning (`level[cuts[c]]`, the level after the event before it) to
    the level after its last event.

    Args:
        level: shape (events + 1,).
        cuts: int64, shape (columns + 1,), ascending, from 0 to the number of events.
        runs: the level's, if they are known: then long columns are not read value by value.
    """
    first, end = cuts[:-1], cuts[1:] + 1
    if runs is not None and end[-1] - first[0] > SHORT * RUN * len(first):
        return _extremes_by_runs(level, first, end, runs)
    index = ranges(first, end)
    values, starts = level[index], np.cumsum(end - first) - (end - first)
    high = np.maximum.reduceat(values, starts)
    return np.minimum.reduceat(values, starts), high, index[_first_indices(values, starts, high)]


def _extremes_by_runs(
    level: npt.NDArray[Number], first: Int64, end: Int64, runs: Runs[Number]
) -> tuple[npt.NDArray[Number], npt.NDArray[Number], Int64]:
    """Return `extremes` of the values from each `first` to before its `end`.

    Each column is three ranges, of which two may be empty: values, whole runs of values, and values.
    """
    run, run_end = -(-first // RUN), end // RUN
    has_run = run < run_end
    run, run_end = np.where(has_run, run, 0), np.where(has_run, run_end, 0)
    values_end, values_begin = np.where(has_run, run * RUN, end), np.where(has_run, run_end * RUN, end)
    begin = np.stack((first, run, values_begin), axis=1).ravel()
    count = np.stack((values_end, run_end, end), axis=1).ravel() - begin
    index = ranges(begin, begin + count)
    is_run = np.repeat(np.tile([False, True, False], len(first)), count)
    starts = (np.cumsum(count) - count)[::3]
    low = level[np.where(is_run, 0, index)]
    high = low.copy()
    low[is_run], high[is_run] = runs.low[index[is_run]], runs.high[index[is_run]]
    top = np.maximum.reduceat(high, starts)
    position = _first_indices(high, starts, top)
    at: Int64 = index[position]
    in_run = np.flatnonzero(is_run[position])
    run_at = at[in_run] * RUN
    at[in_run] = run_at + level[run_at[:, None] + np.arange(RUN)].argmax(axis=1)
    return np.minimum.reduceat(low, starts), top, at


def _first_indices(values: npt.NDArray[Number], starts: Int64, highest: npt.NDArray[Number]) -> Int64:
    """Return the first index in each group, which begin at `starts`, of the group's highest value."""
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(values))))
    hits = np.flatnonzero(values == highest[group])
    owner = group[hits]  # ascending, so the first hit of a group is where the owner changes
    first: Int64 = hits[np.flatnonzero(np.diff(owner, prepend=-1))]
    return first


def highest(level: npt.NDArray[Number], cuts: Int64, runs: Runs[Number] | None = None) -> npt.NDArray[Number]:
    """Return the highest level in each column, as `extremes` does; same dtype as `level`."""
    return extremes(level, cuts, runs)[1]
