"""The allocator's levels over time or over events, reduced to the pixel columns of a chart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.allocator import Levels
from tb_memplugin.analysis.columns import Cuts, extremes, highest
from tb_memplugin.analysis.fragmentation import SAMPLED_MOMENTS, Ratio
from tb_memplugin.analysis.layout import Placement
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class ReserveCurve:
    """A device's levels in pixel columns: int64, shape (columns,), bytes.

    `low`: the lowest active bytes. `allocated`, `pending`: their values at the column's highest active
    bytes, to which they sum. `reserved`: the highest reserved bytes, None if not reported. `unused`: the
    highest (reserved - allocated) / reserved, 0 to 1, NaN if nothing is reserved; None if not reported.
    """

    low: Int64
    allocated: Int64
    pending: Int64
    reserved: Int64 | None
    unused: Ratio | None


def reserve_curve(now: Levels, cuts: Cuts) -> ReserveCurve:
    """Reduce a device's levels to columns that keep the highest and lowest of each.

    Args:
        now: the result of `levels`.
        cuts: the result of `time_cuts` or `event_cuts`.
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
    """Return (reserved - allocated) / reserved after every event; -inf if nothing is reserved then."""
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
    """Return (event, 1 - largest free stretch / all free bytes) at the ends of at most `moments` columns.

    Moments at which nothing is free are left out.
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
