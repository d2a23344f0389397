"""Very many steps in few columns: nothing that was highest is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tb_memplugin.analysis.step_series import highest_row, step_series
from tests.step_figures import figures

EIGHT = figures([3, 1, 4, 1, 5, 9, 2, 6], first=10)


def test_where_there_is_room_each_step_is_a_column():
    drawn = step_series(EIGHT, 0, 0, 100, 50)
    assert drawn.high.tolist() == drawn.low.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]
    assert drawn.first.tolist() == drawn.last.tolist() == drawn.high_step.tolist() == list(range(10, 18))


def test_columns_keep_the_highest_the_lowest_and_the_step_of_the_highest():
    drawn = step_series(EIGHT, 0, 10, 17, 3)
    assert drawn.first.tolist() == [10, 12, 15]
    assert drawn.last.tolist() == [11, 14, 17]
    assert drawn.high.tolist() == [3, 5, 9]
    assert drawn.low.tolist() == [1, 1, 2]
    assert drawn.high_step.tolist() == [10, 14, 15]
    assert drawn.reserved is not None
    assert drawn.reserved.tolist() == [6, 10, 18]
    assert drawn.count == 8


def test_a_stretch_of_steps():
    assert step_series(EIGHT, 0, 12, 13, 10).high.tolist() == [4, 1]
    assert step_series(EIGHT, 0, 50, 60, 10).count == 0


def test_of_equal_peaks_a_column_names_the_first_and_the_whole_the_last():
    flat = figures([7, 7, 7, 7])
    assert step_series(flat, 0, 0, 9, 2).high_step.tolist() == [0, 2]
    assert highest_row(flat, 0) == 3


def test_a_million_steps_agree_with_a_plain_loop():
    peaks = np.random.default_rng(0).integers(0, 1 << 40, 1_000_000)
    drawn = step_series(figures(peaks), 0, 0, 1 << 30, 997)
    edges = [column * len(peaks) // 997 for column in range(998)]
    parts = [peaks[first:end] for first, end in pairwise(edges)]
    assert drawn.high.tolist() == [part.max() for part in parts]
    assert drawn.low.tolist() == [part.min() for part in parts]
    assert peaks[drawn.high_step].tolist() == drawn.high.tolist()
