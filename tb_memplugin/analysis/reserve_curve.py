"""What the allocator held over time or over events, in columns for a screen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.allocator import Levels
from tb_memplugin.analysis.curve import extremes, highest
from tb_memplugin.analysis.fragmentation import SAMPLED_MOMENTS, Ratio
from tb_memplugin.analysis.layout import Placement
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64

Cuts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReserveCurve:
    """A device's levels in pixel columns: int64, shape (columns,), bytes.

    `low`: the lowest active. `allocated`, `pending`: at the moment of the highest active, which they sum
    to. `reserved`: the highest, None where none is told. `unused`: the highest (reserved - allocated) /
    reserved, 0 to 1, NaN where nothing is reserved.
    """

    low: Int64
    allocated: Int64
    pending: Int64
    reserved: Int64 | None
    unused: Ratio | None


def time_cuts(trace: MemoryTrace, t0_ns: int, t1_ns: int, columns: int) -> Cuts:
    """How many events come before each edge of equal columns of time: int64, shape (columns + 1,)."""
    edges = t0_ns + (np.arange(columns + 1, dtype=np.int64) * (t1_ns - t0_ns)) // columns
    cuts = np.searchsorted(trace.events.time_ns, edges, side="left").astype(np.int64)
    cuts[-1] = np.searchsorted(trace.events.time_ns, t1_ns, side="right")
    return cuts


def event_cuts(trace: MemoryTrace, first: int, end: int, columns: int) -> Cuts:
    """The same for equal columns of events, of which event e takes the stretch from e to e + 1."""
    edges = first - (-(np.arange(columns + 1, dtype=np.int64) * (end - first)) // columns)
    cuts: Cuts = np.clip(edges, 0, len(trace.events))
    return cuts


def reserve_curve(now: Levels, cuts: Cuts) -> ReserveCurve:
    """Reduce a device's levels to columns without losing a highest or lowest one.

    Args:
        now: every level, as `levels` gives them.
        cuts: from `time_cuts` or `event_cuts`.
    """
    low, high, at = extremes(now.active, cuts)
    pending = now.pending[at]
    ratio = unused_levels(now)
    return ReserveCurve(
        low=low,
        allocated=high - pending,
        pending=pending,
        reserved=None if now.reserved is None else highest(now.reserved, cuts),
        unused=None if ratio is None else _highest_known(ratio, cuts),
    )


def unused_levels(now: Levels) -> Ratio | None:
    """(reserved - allocated) / reserved after every event, -inf where nothing is reserved."""
    if now.reserved is None:
        return None
    ratio = np.full(len(now.reserved), -np.inf)
    np.divide(now.reserved - now.allocated, now.reserved, out=ratio, where=now.reserved > 0)
    return ratio


def _highest_known(ratio: Ratio, cuts: Cuts) -> Ratio:
    ranges = np.stack((cuts[:-1], cuts[1:]), axis=1).ravel()
    top = np.maximum(np.maximum.reduceat(ratio, ranges)[::2], ratio[cuts[1:]])
    return np.where(np.isneginf(top), np.nan, top)


def split_moments(
    placement: Placement, cuts: Cuts, *, moments: int = SAMPLED_MOMENTS
) -> tuple[tuple[int, float], ...]:
    """1 - largest free block / all that is free, at the ends of some columns: (event, ratio), ascending.

    Moments without anything free are left out.
    """
    asked = np.unique(cuts[1:] - 1)
    if len(asked) > moments:
        asked = asked[np.linspace(0, len(asked) - 1, moments).astype(np.int64)]
    found = []
    for event in asked.tolist():
        free = placement.at(event).free_bytes
        if len(free):
            found.append((event, 1 - int(free.max()) / int(free.sum())))
    return tuple(found)
