"""Ranks side by side: the highest bytes of each in columns of steps, and the median rank for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
        highest_bytes, highest_step: the most bytes, and the last step that has them.
        lowest_bytes, lowest_step: the fewest bytes, and the first step that has them.
        count: how many steps the rank has.
        median_rank, median_bytes: the median rank among those that have the highest step, and its bytes in
            it. It is always one of the ranks: of an even number, the lower of the two in the middle. None
            if no other rank has the step.
    """

    highest_bytes: int
    highest_step: int
    lowest_bytes: int
    lowest_step: int
    count: int
    median_rank: int | None
    median_bytes: int | None


def rank_columns(
    ranks: Sequence[RankSteps], first: int | None, last: int | None, columns: int
) -> RankColumns:
    """Return the steps from `first` to `last`, inclusive, in at most `columns` columns.

    Args:
        ranks: the ranks.
        first, last: numbers of steps; None means no limit.
        columns: at least 1.
    """
    steps = _steps_of(ranks)
    begin = 0 if first is None else int(np.searchsorted(steps, first))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, side="right"))
    steps = steps[begin:end]
    wide = min(columns, len(steps))
    starts = np.arange(wide) * len(steps) // max(wide, 1)
    high = np.full((len(ranks), wide), MISSING, np.int64)
    high_step = high.copy()
    if wide:
        for row, rank in enumerate(ranks):
            _fill(rank, steps, starts, high[row], high_step[row])
    ends = np.append(starts[1:], len(steps)) - 1
    return RankColumns(steps[starts], steps[ends] if wide else steps, high, high_step, len(steps))


def _steps_of(ranks: Sequence[RankSteps]) -> Int64:
    """Return all steps that any rank has. Ranks with the same steps are merged only once, to save time."""
    kinds: list[Int64] = []
    for rank in ranks:
        if not any(np.array_equal(rank.steps, other) for other in kinds[:4]):
            kinds.append(rank.steps)
    return np.unique(np.concatenate(kinds)) if kinds else np.zeros(0, np.int64)


def _fill(rank: RankSteps, steps: Int64, starts: Int64, high: Int64, high_step: Int64) -> None:
    begin = int(np.searchsorted(rank.steps, steps[0]))
    end = int(np.searchsorted(rank.steps, steps[-1], side="right"))
    own, peaks = rank.steps[begin:end], rank.bytes[begin:end]
    column = np.searchsorted(steps[starts], own, side="right") - 1
    np.maximum.at(high, column, peaks)
    highest = np.flatnonzero(peaks == high[column])
    filled, where = np.unique(column[highest], return_index=True)
    high_step[filled] = own[highest[where]]


def rank_peaks(ranks: Sequence[RankSteps]) -> list[RankPeak]:
    """Return each rank's highest and lowest step, and the median rank at its highest step."""
    highest = [len(rank.bytes) - 1 - int(np.argmax(rank.bytes[::-1])) for rank in ranks]
    steps = np.array([rank.steps[row] for rank, row in zip(ranks, highest, strict=True)], np.int64)
    asked, which = np.unique(steps, return_inverse=True)
    medians = _medians(ranks, asked)
    found = []
    for rank, row, step in zip(ranks, highest, which, strict=True):
        lowest = int(np.argmin(rank.bytes))
        found.append(
            RankPeak(
                int(rank.bytes[row]),
                int(rank.steps[row]),
                int(rank.bytes[lowest]),
                int(rank.steps[lowest]),
                len(rank.steps),
                *medians[step],
            )
        )
    return found


def _medians(ranks: Sequence[RankSteps], steps: Int64) -> list[tuple[int, int] | tuple[None, None]]:
    """Return the median rank at each of these steps, and its bytes there; the first of equal ranks."""
    at = np.full((len(ranks), len(steps)), MISSING, np.int64)
    for row, rank in enumerate(ranks):
        place = np.minimum(np.searchsorted(rank.steps, steps), len(rank.steps) - 1)
        there = rank.steps[place] == steps
        at[row, there] = rank.bytes[place[there]]
    order = np.argsort(at, axis=0, kind="stable")
    absent = (at == MISSING).sum(axis=0)
    found: list[tuple[int, int] | tuple[None, None]] = []
    for column, none in enumerate(absent):
        known = len(ranks) - int(none)
        row = int(order[int(none) + (known - 1) // 2, column])
        found.append((row, int(at[row, column])) if known > 1 else (None, None))
    return found
