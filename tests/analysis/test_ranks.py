"""Ranks side by side: columns keep each rank's exact highest, and the median is always a rank."""

from __future__ import annotations

import numpy as np
import pytest

from tb_memplugin.analysis.ranks import MISSING, RankPeak, RankSteps, rank_columns, rank_peaks


def rank(peaks, first=0):
    return RankSteps(np.arange(first, first + len(peaks)), np.array(peaks, np.int64))


def test_each_step_is_a_column_and_what_a_rank_lacks_is_missing():
    found = rank_columns([rank([5, 7, 6]), rank([9, 8], first=1), rank([3], first=4)], None, None, 100)
    assert found.first.tolist() == found.last.tolist() == [0, 1, 2, 4]
    assert found.count == 4
    assert found.high.tolist() == [[5, 7, 6, MISSING], [MISSING, 9, 8, MISSING], [MISSING] * 3 + [3]]
    assert found.high_step.tolist() == [[0, 1, 2, MISSING], [MISSING, 1, 2, MISSING], [MISSING] * 3 + [4]]


def test_of_many_steps_a_column_keeps_the_highest_and_the_first_step_that_has_it():
    found = rank_columns([rank([1, 4, 4, 2, 8, 3]), rank([9, 1], first=4)], None, None, 2)
    assert list(zip(found.first.tolist(), found.last.tolist(), strict=True)) == [(0, 2), (3, 5)]
    assert found.high.tolist() == [[4, 8], [MISSING, 9]]
    assert found.high_step.tolist() == [[1, 4], [MISSING, 4]]


def test_a_stretch_holds_its_own_steps_alone():
    ranks = [rank([1, 4, 4, 2, 8, 3]), rank([7], first=5)]
    found = rank_columns(ranks, 3, 4, 100)
    assert found.high.tolist() == [[2, 8], [MISSING, MISSING]]
    assert rank_columns(ranks, 6, 9, 100).count == 0


@pytest.mark.parametrize("columns", [1, 7, 100, 1000])
def test_columns_agree_with_a_look_at_every_step(columns):
    random = np.random.default_rng(columns)
    ranks = [RankSteps(np.flatnonzero(random.random(300) < 0.8), np.zeros(0, np.int64)) for _ in range(5)]
    ranks = [RankSteps(one.steps, random.integers(0, 50, len(one.steps))) for one in ranks]
    found = rank_columns(ranks, None, None, columns)
    for row, one in enumerate(ranks):
        for column, (first, last) in enumerate(zip(found.first, found.last, strict=True)):
            own = {
                int(step): int(size)
                for step, size in zip(one.steps, one.bytes, strict=True)
                if first <= step <= last
            }
            high = max(own.values(), default=MISSING)
            step = next((step for step, size in own.items() if size == high), MISSING)
            assert (found.high[row, column], found.high_step[row, column]) == (high, step)


def test_the_median_is_a_rank_at_the_step_of_the_highest():
    peaks = rank_peaks([rank([10, 90]), rank([20, 50]), rank([30, 70])])
    assert peaks[0] == RankPeak(90, 1, 10, 0, median_rank=2, median_bytes=70)
    assert [peak.median_rank for peak in peaks] == [2, 2, 2]


def test_of_an_even_number_the_lower_of_the_two_in_the_middle_counts():
    peaks = rank_peaks([rank([40]), rank([10]), rank([30]), rank([20])])
    assert {(peak.median_rank, peak.median_bytes) for peak in peaks} == {(3, 20)}


def test_only_ranks_that_have_the_step_count_and_one_alone_has_no_median():
    peaks = rank_peaks([rank([50, 90]), rank([60]), rank([70])])
    assert (peaks[0].highest_step, peaks[0].median_rank) == (1, None)
    assert (peaks[2].median_rank, peaks[2].median_bytes) == (1, 60)


def test_of_equal_steps_the_first_is_the_highest_and_the_lowest():
    (peak, _) = rank_peaks([rank([3, 8, 3, 8]), rank([1, 1, 1, 1])])
    assert (peak.highest_step, peak.lowest_step) == (1, 0)
