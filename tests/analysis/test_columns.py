"""Pixel columns over time, over events and over steps: where each begins, however long the axis is."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.columns import event_cuts, highest, step_columns, time_cuts
from tests.traces import EPOCH, MICROSECOND, trace

THREE = ("alloc 1 a", "alloc 2 b", "alloc 4 c")
"""Events half a microsecond, one and a half, and two and a half after `EPOCH`."""


def test_time_columns_begin_behind_the_events_before_them() -> None:
    assert time_cuts(trace(*THREE), EPOCH, EPOCH + 4 * MICROSECOND, 4).tolist() == [0, 1, 2, 3, 3]


def test_columns_of_a_century_are_as_exact_as_those_of_a_step() -> None:
    century = 1 << 61  # times 4,000 columns it is more than an int64 holds
    over_time = time_cuts(trace(*THREE), EPOCH - century, EPOCH + century, 4_000)
    over_events = event_cuts(trace(*THREE), -century, century, 4_000)
    for cuts in (over_time, over_events):
        assert cuts[[0, 1_999, 2_000, 2_001, -1]].tolist() == [0, 0, 0, 3, 3]


def test_an_event_that_an_edge_cuts_counts_to_the_column_in_which_it_begins() -> None:
    assert event_cuts(trace(*THREE), 0, 3, 2).tolist() == [0, 2, 3]
    assert event_cuts(trace(*THREE), 1, 2, 4).tolist() == [1, 2, 2, 2, 2]


def test_the_highest_of_a_column_counts_the_level_at_both_of_its_ends() -> None:
    level = np.array([0, 5, 3, 9])
    assert highest(level, np.array([0, 0, 2, 3])).tolist() == [0, 5, 9]


def test_steps_are_spread_evenly_over_columns_without_an_empty_one() -> None:
    first, last = step_columns(5, 2)
    assert (first.tolist(), last.tolist()) == ([0, 2], [1, 4])
    first, last = step_columns(2, 500)
    assert (first.tolist(), last.tolist()) == ([0, 1], [0, 1])
    assert [len(edge) for edge in step_columns(0, 500)] == [0, 0]
