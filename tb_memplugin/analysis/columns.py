"""Pixel columns over time or over events, and the exact lowest and highest level in each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.indexes import RUN, Number, Runs
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
    if runs is not None and _are_long(cuts):
        return _extremes_by_runs(level, cuts[:-1], cuts[1:] + 1, runs)
    values, starts, at = level[cuts[0] : cuts[-1] + 1], cuts[:-1] - cuts[0], cuts[1:].copy()
    low = np.minimum(np.minimum.reduceat(values, starts), level[at])
    high = _highest_values(level, cuts)
    column, position = first_hits(values, starts, high)
    at[column] = cuts[0] + position
    return low, high, at


def _are_long(cuts: Int64) -> bool:
    return bool(cuts[-1] - cuts[0] > SHORT * RUN * (len(cuts) - 1))


def _highest_values(level: npt.NDArray[Number], cuts: Int64) -> npt.NDArray[Number]:
    values = level[cuts[0] : cuts[-1] + 1]
    return np.maximum(np.maximum.reduceat(values, cuts[:-1] - cuts[0]), level[cuts[1:]])


def _extremes_by_runs(
    level: npt.NDArray[Number], first: Int64, end: Int64, runs: Runs[Number]
) -> tuple[npt.NDArray[Number], npt.NDArray[Number], Int64]:
    """Return `extremes` of the values from each `first` to before its `end`.

    Each column is values (one at least), whole runs of values, and values again.
    """
    run, run_end = first // RUN + 1, end // RUN
    long = np.flatnonzero(run < run_end)
    run, run_end = run[long], run_end[long]
    begin, stop = np.stack((first, end), axis=1), np.stack((end, end), axis=1)
    stop[long, 0], begin[long, 1] = run * RUN, run_end * RUN
    index, count = ranges(begin.ravel(), stop.ravel()), (stop - begin).sum(axis=1)
    values, starts = level[index], np.cumsum(count) - count
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    lowest, highest = runs.low[run[0] : run_end[-1]], runs.high[run[0] : run_end[-1]]
    edges = (np.stack((run, run_end), axis=1).ravel() - run[0])[:-1]
    low[long] = np.minimum(low[long], np.minimum.reduceat(lowest, edges)[::2])
    high[long] = np.maximum(high[long], np.maximum.reduceat(highest, edges)[::2])
    at = np.full(len(first), len(level), np.int64)
    column, position = first_hits(values, starts, high)
    at[column] = index[position]
    group, position = first_hits(highest, edges, np.repeat(high[long], 2)[: len(edges)])
    is_column = group % 2 == 0  # every second group are the runs between two columns
    column, begins = long[group[is_column] // 2], (run[0] + position[is_column]) * RUN
    in_run = begins + level[begins[:, None] + np.arange(RUN)].argmax(axis=1)
    at[column] = np.minimum(at[column], in_run)
    return low, high, at


def first_hits(
    values: npt.NDArray[Number], starts: Int64, highest: npt.NDArray[Number]
) -> tuple[Int64, Int64]:
    """Return the groups that reach `highest`, and the index of the first value of each that does.

    Args:
        values: shape (n,).
        starts: int64, shape (groups,): where each group begins; an empty one reaches nothing.
        highest: shape (groups,).
    """
    ends = np.append(starts[1:], len(values))
    hits = np.append(np.flatnonzero(values == np.repeat(highest, ends - starts)), len(values))
    first = hits[np.searchsorted(hits, starts)]
    groups = np.flatnonzero(first < ends)
    return groups, first[groups]


def highest(level: npt.NDArray[Number], cuts: Int64, runs: Runs[Number] | None = None) -> npt.NDArray[Number]:
    """Return the highest level in each column, as `extremes` does; same dtype as `level`."""
    is_read_by_runs = runs is not None and _are_long(cuts)
    return extremes(level, cuts, runs)[1] if is_read_by_runs else _highest_values(level, cuts)
