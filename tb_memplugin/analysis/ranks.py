"""Ranks side by side: the highest bytes of each in columns of steps, and the median rank for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.steps import step_columns
from tb_memplugin.trace.tables import Int64

MISSING = -1
"""Stands for bytes and steps if a rank has no step in a column."""


@dataclass(frozen=True, slots=True, eq=False)
class RankSteps:
    """The steps of one rank: their numbers, ascending, and the bytes of each. There is at least one step."""

    steps: Int64
    bytes: Int64


@dataclass(frozen=True, slots=True, eq=False)
class RankColumns:
    """All ranks in columns of (nearly) equally many steps.

    Attributes:
        first, last: the first and last step of each column, inclusive; int64, shape (columns,).
        high: the highest bytes of each rank in each column, or MISSING; int64, shape (ranks, columns).
        high_step: the first step of the column with that many bytes, or MISSING; same shape.
        count: how many different steps all columns contain.
    """

    first: Int64
    last: Int64
    high: Int64
    high_step: Int64
    count: int


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The extremes of one rank's steps, and the median of all ranks at the rank's highest step.

    Attributes:
        highest_bytes, highest_step: the most bytes, and the first step that has them.
        lowest_bytes, lowest_step: the same of the fewest bytes.
        median_rank, median_bytes: the median rank among those that have the highest step, and its bytes in
            it. It is always one of the ranks: of an even number, the lower of the two in the middle. None
            if no other rank has the step.
    """

    highest_bytes: int
    highest_step: int
    lowest_bytes: int
    lowest_step: int
    median_rank: int | None
    median_bytes: int | None


def rank_columns(
    ranks: Sequence[RankSteps], first: int | None, last: int | None, columns: int
) -> RankColumns:
    """Return the steps from `first` to `last`, inclusive, in at most `columns` columns.

    Args:
        first, last: numbers of steps; None means no limit.
        columns: at least 1.
    """
    steps = _steps_of(ranks)
    begin = 0 if first is None else int(np.searchsorted(steps, first))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
    steps = steps[begin:end]
    starts, ends = step_columns(len(steps), columns)
    high = np.full((len(ranks), len(starts)), MISSING, np.int64)
    high_step = high.copy()
    if len(steps):
        for row, rank in enumerate(ranks):
            _fill(rank, steps, starts, high[row], high_step[row])
    return RankColumns(steps[starts], steps[ends], high, high_step, len(steps))


def _steps_of(ranks: Sequence[RankSteps]) -> Int64:
    """Return all steps that any rank has. Most ranks have the same steps: those are merged only once."""
    different: list[Int64] = []
    for rank in ranks:
        if not any(np.array_equal(rank.steps, steps) for steps in different[:4]):
            different.append(rank.steps)
    return np.unique(np.concatenate(different)) if different else np.zeros(0, np.int64)


def _fill(rank: RankSteps, steps: Int64, starts: Int64, high: Int64, high_step: Int64) -> None:
    """Write a rank's highest bytes of each column into `high`, and the first step that has them."""
    begin = int(np.searchsorted(rank.steps, steps[0]))
    end = int(np.searchsorted(rank.steps, steps[-1], side="right"))
    own, peaks = rank.steps[begin:end], rank.bytes[begin:end]
    column = np.searchsorted(steps[starts], own, side="right") - 1
    np.maximum.at(high, column, peaks)
    highest = np.flatnonzero(peaks == high[column])
    filled, first_highest = np.unique(column[highest], return_index=True)
    high_step[filled] = own[highest[first_highest]]


def rank_peaks(ranks: Sequence[RankSteps]) -> list[RankPeak]:
    """Return each rank's highest and lowest step, and the median rank at its highest step."""
    highest = [int(np.argmax(rank.bytes)) for rank in ranks]
    steps = np.array([rank.steps[row] for rank, row in zip(ranks, highest, strict=True)], np.int64)
    distinct_steps, index = np.unique(steps, return_inverse=True)
    medians = _medians(ranks, distinct_steps)
    peaks = []
    for rank, row, step in zip(ranks, highest, index, strict=True):
        lowest = int(np.argmin(rank.bytes))
        peaks.append(
            RankPeak(
                int(rank.bytes[row]),
                int(rank.steps[row]),
                int(rank.bytes[lowest]),
                int(rank.steps[lowest]),
                *medians[step],
            )
        )
    return peaks


def _medians(ranks: Sequence[RankSteps], steps: Int64) -> list[tuple[int, int] | tuple[None, None]]:
    """Return the median rank at each of these steps, and its bytes there; the first of equal ranks."""
    size = np.full((len(ranks), len(steps)), MISSING, np.int64)
    for row, rank in enumerate(ranks):
        index = np.minimum(np.searchsorted(rank.steps, steps), len(rank.steps) - 1)
        has = rank.steps[index] == steps
        size[row, has] = rank.bytes[index[has]]
    order = np.argsort(size, axis=0, kind="stable")  # ranks without the step come first
    medians: list[tuple[int, int] | tuple[None, None]] = []
    for column, absent in enumerate((size == MISSING).sum(axis=0).tolist()):
        present = len(ranks) - absent
        row = int(order[absent + (present - 1) // 2, column])
        medians.append((row, int(size[row, column])) if present > 1 else (None, None))
    return medians
