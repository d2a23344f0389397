"""Fragmentation over time, reduced to the pixel columns of a chart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.allocator import knows_segments, levels
from tb_memplugin.analysis.columns import Cuts, time_cuts
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
    asked = np.unique(cuts[1:] - 1) if knows_segments(trace, device) else np.empty(0, np.int64)
    if len(asked) > moments:
        asked = asked[np.linspace(0, len(asked) - 1, moments).astype(np.int64)]
    free, largest = _sampled(trace, device, asked)
    return FragmentationCurve(t0_ns, t1_ns, _unused(trace, device, cuts), asked, free, largest)


def _unused(trace: MemoryTrace, device: int, cuts: Cuts) -> Ratio | None:
    """Return the highest ratio in each column, from its level on entry to that after its last event."""
    now = levels(trace, device)
    if now.reserved is None:
        return None
    ratio = np.full(len(now.reserved), -np.inf)
    np.divide(now.reserved - now.allocated, now.reserved, out=ratio, where=now.reserved > 0)
    first, last = cuts[:-1], cuts[1:]
    ranges = np.stack((first, last), axis=1).ravel()
    highest = np.maximum(np.maximum.reduceat(ratio, ranges)[::2], ratio[last])
    return np.where(np.isneginf(highest), np.nan, highest)


def _sampled(trace: MemoryTrace, device: int, asked: Int64) -> tuple[Int64, Int64]:
    free, largest = np.zeros(len(asked), np.int64), np.zeros(len(asked), np.int64)
    placement = Placement(trace, device) if len(asked) else None
    for place, event in enumerate(asked.tolist()):
        if placement is not None:
            sizes = placement.at(event).free_bytes
            free[place], largest[place] = sizes.sum(), sizes.max(initial=0)
    return free, largest
