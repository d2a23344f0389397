"""Pixel columns over time, over events and over steps: where each begins, however long the axis is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tb_memplugin.analysis.columns import event_cuts, extremes, highest, time_cuts
from tb_memplugin.analysis.steps import step_columns
from tb_memplugin.trace.indexes import RUN, runs_of
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


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30_000), st.integers(1, 30), st.booleans())
def test_long_columns_have_the_extremes_that_a_look_at_every_level_finds(seed, events, columns, ratio):
    random = np.random.default_rng(seed)
    level = random.integers(0, random.choice([3, 1 << 40]), events + 1)
    if ratio:
        level = np.where(level == 0, -np.inf, level / (1 << 40))
    cuts = np.sort(random.integers(0, events + 1, columns + 1))
    low, high, at = extremes(level, cuts, runs_of(level))
    inside = [level[first : last + 1] for first, last in pairwise(cuts)]
    assert low.tolist() == [values.min() for values in inside]
    assert high.tolist() == [values.max() for values in inside]
    assert at.tolist() == [first + values.argmax() for first, values in zip(cuts, inside, strict=False)]


def test_a_column_of_many_runs_is_not_read_value_by_value() -> None:
    level = np.zeros(100 * RUN, np.int64)
    runs = runs_of(level)
    runs.high[50] = 7  # what no value says: it can only be read from the runs
    assert highest(level, np.array([0, len(level) - 1]), runs).tolist() == [7]
