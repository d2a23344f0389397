"""Bands of the largest allocations: with the rest they are the live curve, to the byte, in any width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_memplugin.analysis.bands import bands, divided_rest
from tb_memplugin.analysis.columns import event_cuts, time_cuts
from tb_memplugin.analysis.curve import curve
from tests.traces import trace

SMALL = trace("start 400 w", "alloc 100 a", "alloc 20 b", "free b", "alloc 60 g", "free a")
"""Live: 400, 500, 520, 500, 560, 460."""


def test_bands_by_hand():
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most=2)
    assert found.high.tolist() == [500, 520, 520, 560, 560]
    assert SMALL.allocations.bytes[found.rows].tolist() == [400, 100]
    assert list(zip(found.first.tolist(), found.last.tolist(), strict=True)) == [(0, 4), (0, 4)]
    assert found.rest.tolist() == [0, 20, 20, 60, 60]
    assert SMALL.allocations.bytes[found.small].tolist() == [20, 60]
    assert (found.peak_event, found.peak_column) == (3, 3)


def test_the_rest_is_divided_by_what_its_blocks_belong_to():
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most=2)
    divided = divided_rest(found, np.array([20, 60]), np.array([1, 0]), 2)
    assert divided.tolist() == [[0, 0, 0, 60, 60], [0, 20, 20, 0, 0]]


def test_a_block_is_drawn_in_the_columns_at_whose_moment_it_lives():
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most=9)
    lives = zip(
        SMALL.allocations.bytes[found.rows].tolist(), found.first.tolist(), found.last.tolist(), strict=True
    )
    assert list(lives) == [(400, 0, 4), (100, 0, 4), (20, 1, 2), (60, 3, 4)]
    assert found.rest.tolist() == [0] * 5


def test_of_equal_blocks_the_first_are_drawn():
    same = trace(*(f"alloc 8 b{number}" for number in range(6)))
    found = bands(same, 0, event_cuts(same, 0, 6, 3), most=4)
    assert found.rows.tolist() == [0, 1, 2, 3]
    assert (found.rest.tolist(), found.small.tolist()) == ([0, 0, 16], [4, 5])


def test_only_what_lives_in_a_zoom_is_drawn():
    found = bands(SMALL, 0, event_cuts(SMALL, 3, 5, 4), most=9)
    assert SMALL.allocations.bytes[found.rows].tolist() == [400, 100, 60]


@st.composite
def histories(draw):
    """Blocks that come and go, of two devices."""
    lines: list[str] = []
    live: list[str] = []
    for number in range(draw(st.integers(0, 40))):
        if live and draw(st.booleans()):
            lines.append(f"free {live.pop(draw(st.integers(0, len(live) - 1)))}")
        else:
            device = draw(st.sampled_from(["cpu", "cuda:0"]))
            lines.append(f"alloc {draw(st.integers(0, 99))} b{number} device={device}")
            live.append(f"b{number}")
    return trace("start 50 w", "start 7 v", *lines)


@given(histories(), st.integers(1, 60), st.integers(1, 30), st.booleans())
def test_bands_and_the_rest_sum_to_the_curve(history, columns, most, over_time):
    if over_time:
        start, end = history.steps[0].start_ns, history.steps[-1].end_ns
        cuts = time_cuts(history, start, end, columns)
        wanted = curve(history, 0, start, end, columns).high
    else:
        cuts = event_cuts(history, 0, max(len(history.events), 1), columns)
        wanted = None
    found = bands(history, 0, cuts, most)
    total = found.rest.copy()
    for row, first, last in zip(found.rows, found.first, found.last, strict=True):
        total[first : last + 1] += history.allocations.bytes[row]
    assert total.tolist() == found.high.tolist()
    assert (found.rest >= 0).all()
    small = history.allocations.bytes[found.small]
    divided = divided_rest(found, small, found.small % 3, 3)
    assert divided.sum(axis=0).tolist() == found.rest.tolist()
    assert (divided >= 0).all()
    assert len(found.rows) <= most
    assert np.all(np.diff(found.rows) > 0)
    if wanted is not None:
        assert found.high.tolist() == wanted.tolist()


@pytest.mark.parametrize("most", [1, 3])
def test_no_block_of_the_rest_is_larger_than_one_that_is_drawn(most):
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most)
    everything = set(range(len(SMALL.allocations)))
    rest = everything - set(found.rows.tolist())
    assert min(SMALL.allocations.bytes[found.rows]) >= max(SMALL.allocations.bytes[list(rest)])
