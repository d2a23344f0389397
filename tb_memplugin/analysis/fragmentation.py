"""Fragmentation over time, reduced to the pixel columns of a chart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.allocator import Levels, knows_segments, levels
from tb_memplugin.analysis.columns import Cuts, highest, time_cuts
from tb_memplugin.analysis.layout import Placement
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64

Ratio = npt.NDArray[np.float64]

SAMPLED_MOMENTS = 200
"""How many layouts a curve computes at most: 200 layouts of a million events take less than a second."""


@dataclass(frozen=True, slots=True)
class FragmentationCurve:
    """Two measures of waste over `[t0_ns, t1_ns]`; ratios of 0 to 1, float64.

    Attributes:
        unused: shape (columns,): the highest (reserved - allocated) / reserved among all events of each
            column. None if the reserved bytes are not reported; NaN in a column where they are 0.
        events: int64, shape (moments,), ascending: the events after which the layout was computed, each the
            last of a column. Use `fragmentation` for any other moment.
        free_bytes, largest_free_bytes: int64, shape (moments,): all free bytes in the segments, and the
            longest free stretch.
    """

    t0_ns: int
    t1_ns: int
    unused: Ratio | None
    events: Int64
    free_bytes: Int64
    largest_free_bytes: Int64

    @property
    def split(self) -> Ratio:
        """1 - largest free / all free at each moment, shape (moments,); NaN if nothing is free."""
        split = np.full(len(self.events), np.nan)
        np.divide(self.largest_free_bytes, self.free_bytes, out=split, where=self.free_bytes > 0)
        return 1 - split


def fragmentation_curve(
    trace: MemoryTrace,
    device: int,
    t0_ns: int,
    t1_ns: int,
    columns: int,
    *,
    moments: int = SAMPLED_MOMENTS,
) -> FragmentationCurve:
    """Return the fragmentation of a device's reserved memory in pixel columns.

    Args:
        trace: any trace; without segments there are no moments.
        device: row in `trace.devices`.
        t0_ns, t1_ns: epoch nanoseconds, t0 < t1. Column c covers the c-th of `columns` equal parts.
        columns: how many pixel columns.
        moments: in how many columns, at most, to compute the layout.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    cuts = time_cuts(trace, t0_ns, t1_ns, columns)
    unused = unused_levels(levels(trace, device))
    has_segments = knows_segments(trace, device)
    events = sampled_events(cuts, moments) if has_segments else np.empty(0, np.int64)
    free, largest = _free_after(trace, device, events)
    unused_columns = None if unused is None else highest_unused(unused, cuts)
    return FragmentationCurve(t0_ns, t1_ns, unused_columns, events, free, largest)


def unused_levels(memory: Levels) -> Ratio | None:
    """Return (reserved - allocated) / reserved after every event; -inf if nothing is reserved then."""
    if memory.reserved is None:
        return None
    ratio = np.full(len(memory.reserved), -np.inf)
    np.divide(memory.reserved - memory.allocated, memory.reserved, out=ratio, where=memory.reserved > 0)
    return ratio


def highest_unused(ratio: Ratio, cuts: Cuts) -> Ratio:
    """Return the highest of `unused_levels` in each column; NaN where nothing is reserved."""
    top = highest(ratio, cuts)
    return np.where(np.isneginf(top), np.nan, top)


def sampled_events(cuts: Cuts, moments: int = SAMPLED_MOMENTS) -> Int64:
    """Return the last event of at most `moments` columns, evenly chosen: int64, ascending, each once."""
    last = np.unique(cuts[1:] - 1)
    if len(last) <= moments:
        return last
    chosen: Int64 = last[np.linspace(0, len(last) - 1, moments).astype(np.int64)]
    return chosen


def _free_after(trace: MemoryTrace, device: int, events: Int64) -> tuple[Int64, Int64]:
    """Return all free bytes in the segments, and the longest free stretch, after each of some events."""
    free, largest = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)
    if len(events):
        placement = Placement(trace, device)
        for index, event in enumerate(events.tolist()):
            sizes = placement.at(event).free_bytes
            free[index], largest[index] = sizes.sum(), sizes.max(initial=0)
    return free, largest
