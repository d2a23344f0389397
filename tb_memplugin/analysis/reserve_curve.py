"""The allocator's levels over time or over events, reduced to the pixel columns of a chart."""

from __future__ import annotations

from dataclasses import dataclass

from tb_memplugin.analysis.allocator import Levels
from tb_memplugin.analysis.columns import Cuts, extremes, highest
from tb_memplugin.analysis.fragmentation import Ratio, highest_unused, sampled_events
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


def reserve_curve(memory: Levels, unused: Ratio | None, cuts: Cuts) -> ReserveCurve:
    """Reduce a device's levels to columns that keep the highest and lowest of each.

    Args:
        memory: the result of `levels`.
        unused: the result of `unused_levels` for it.
        cuts: the result of `time_cuts` or `event_cuts`.
    """
    low, high, at = extremes(memory.active, cuts)
    pending = memory.pending[at]
    return ReserveCurve(
        low=low,
        allocated=high - pending,
        pending=pending,
        reserved=None if memory.reserved is None else highest(memory.reserved, cuts),
        unused=None if unused is None else highest_unused(unused, cuts),
    )


def split_moments(placement: Placement, cuts: Cuts) -> tuple[tuple[int, float], ...]:
    """Return (event, 1 - largest free stretch / all free bytes) at the events of `sampled_events`.

    Moments at which nothing is free are left out.
    """
    splits = []
    for event in sampled_events(cuts).tolist():
        free = placement.at(event).free_bytes
        if len(free):
            splits.append((event, 1 - int(free.max()) / int(free.sum())))
    return tuple(splits)
