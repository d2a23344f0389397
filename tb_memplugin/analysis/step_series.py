"""The peaks of many steps, reduced to the columns of a chart: the highest in each, and which step has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.columns import step_columns
from tb_memplugin.trace.step_figures import StepFigures
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class StepSeries:
    """A device's steps in columns of (nearly) equally many steps; int64, shape (columns,); bytes.

    Attributes:
        first, last: the first and last step of each column, inclusive.
        low, high: the lowest and the highest peak in the column.
        high_step: the first step of the column with the highest peak.
        reserved: the highest reserved bytes in the column; None if not recorded.
        count: how many steps all columns contain.
    """

    first: Int64
    last: Int64
    low: Int64
    high: Int64
    high_step: Int64
    reserved: Int64 | None
    count: int


def step_series(figures: StepFigures, device: int, first: int, last: int, columns: int) -> StepSeries:
    """Return the steps from `first` to `last`, inclusive, in at most `columns` columns.

    Args:
        figures: the step figures of a whole run.
        device: row in `figures.devices`.
        first, last: numbers of steps, which need not exist.
        columns: at least 1.
    """
    begin, end = np.searchsorted(figures.steps, [first, last + 1])
    steps = figures.steps[begin:end]
    if not len(steps):
        none = np.zeros(0, np.int64)
        return StepSeries(none, none, none, none, none, None, 0)
    peak, reserved = figures.devices[device].peak, figures.devices[device].peak_reserved
    peak = peak[begin:end]
    starts, ends = step_columns(len(steps), columns)
    high = np.maximum.reduceat(peak, starts)
    column = np.repeat(np.arange(len(starts)), ends + 1 - starts)
    highest = np.flatnonzero(peak == high[column])
    _, first_highest = np.unique(column[highest], return_index=True)
    return StepSeries(
        first=steps[starts],
        last=steps[ends],
        low=np.minimum.reduceat(peak, starts),
        high=high,
        high_step=steps[highest[first_highest]],
        reserved=None if reserved is None else np.maximum.reduceat(reserved[begin:end], starts),
        count=len(steps),
    )


def highest_row(figures: StepFigures, device: int) -> int:
    """Return the last row with a device's highest peak."""
    peak = figures.devices[device].peak
    return len(peak) - 1 - int(np.argmax(peak[::-1]))
