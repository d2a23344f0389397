"""Many steps: their figures, and their peaks as columns of a chart."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tb_memplugin.analysis.moments import peak
from tb_memplugin.analysis.steps import stats_of_step, step_series, step_stats
from tb_memplugin.trace import Device, Kind, MemoryTrace, Step, events, start_state
from tests.step_figures import figures

STEPS = 3000


def of_many_steps() -> MemoryTrace:
    """Step n allocates n bytes, reserves n more, and gives the bytes back."""
    size = np.repeat(np.arange(STEPS), 2)
    return MemoryTrace(
        source="test",
        events=events(
            10 * np.arange(2 * STEPS),
            kind=np.tile([Kind.ALLOC, Kind.FREE_COMPLETED], STEPS).astype(np.uint8),
            bytes=size,
            address=np.full(2 * STEPS, 512, np.uint64),
            reserved=size,
        ),
        start=start_state([]),
        devices=(Device("cuda:0", reserved_at_start=0),),
        steps=tuple(Step(number, 20 * number, 20 * number + 20) for number in range(STEPS)),
    )


def test_the_peak_of_thousands_of_steps_is_found_at_once():
    trace = of_many_steps()
    begin = time.process_time()
    top = peak(trace)
    assert (top.bytes, top.event) == (STEPS - 1, 2 * STEPS - 2)
    assert time.process_time() - begin < 5


def test_the_figures_of_one_step_are_those_among_all():
    trace = of_many_steps()
    kept = events(
        trace.events.time_ns,
        bytes=trace.events.bytes,
        address=512 + 4096 * np.arange(2 * STEPS, dtype=np.uint64),
    )
    keeps = replace(trace, events=kept)  # step n begins with the n * (n - 1) bytes of those before
    for of in (trace, keeps):
        every = step_stats(of, 0)
        for row in (0, 1, 700, STEPS - 1):
            assert stats_of_step(of, 0, row) == every[row]
    assert stats_of_step(keeps, 0, 700).window_peak_bytes == 700 * 699 + 2 * 700


def test_each_step_has_its_own_reserve_and_begins_with_that_of_the_step_before():
    trace = of_many_steps()
    assert [stats.peak_reserved_bytes for stats in step_stats(trace, 0)] == list(range(STEPS))
    falling = replace(trace, events=replace(trace.events, reserved=trace.events.reserved[::-1]))
    found = [stats.peak_reserved_bytes for stats in step_stats(falling, 0)]
    assert found[:3] == [STEPS - 1, STEPS - 1, STEPS - 2]


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


def test_of_equal_peaks_a_column_names_the_first():
    assert step_series(figures([7, 7, 7, 7]), 0, 0, 9, 2).high_step.tolist() == [0, 2]


def test_a_million_steps_agree_with_a_plain_loop():
    peaks = np.random.default_rng(0).integers(0, 1 << 40, 1_000_000)
    drawn = step_series(figures(peaks), 0, 0, 1 << 30, 997)
    edges = [column * len(peaks) // 997 for column in range(998)]
    parts = [peaks[first:end] for first, end in pairwise(edges)]
    assert drawn.high.tolist() == [part.max() for part in parts]
    assert drawn.low.tolist() == [part.min() for part in parts]
    assert peaks[drawn.high_step].tolist() == drawn.high.tolist()
