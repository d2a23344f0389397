"""Tests for sets of address ranges that grow and shrink."""

from __future__ import annotations

import pytest

from tb_memplugin.simulator.simulated_trace import Ranges

OLD, NEW = (0, 0, 0), (1, 1, 0)


def of(*spans: tuple[int, int]) -> Ranges:
    ranges = Ranges()
    for start, end in spans:
        ranges.add(start, end, OLD)
    return ranges


def test_ranges_stand_in_address_order() -> None:
    assert of((30, 40), (10, 20), (20, 30)).rows == [(10, 20, OLD), (20, 30, OLD), (30, 40, OLD)]


def test_what_is_there_already_stays() -> None:
    ranges = of((10, 20), (30, 40))
    ranges.add(15, 45, NEW)
    assert ranges.rows == [(10, 20, OLD), (20, 30, NEW), (30, 40, OLD), (40, 45, NEW)]


@pytest.mark.parametrize(
    ("start", "end", "left"),
    [
        (10, 20, [(30, 40)]),
        (12, 14, [(10, 12), (14, 20), (30, 40)]),
        (15, 35, [(10, 15), (35, 40)]),
        (20, 30, [(10, 20), (30, 40)]),
        (0, 50, []),
        (50, 60, [(10, 20), (30, 40)]),
        (5, 5, [(10, 20), (30, 40)]),
    ],
)
def test_a_range_is_cut_out(start: int, end: int, left: list[tuple[int, int]]) -> None:
    ranges = of((10, 20), (30, 40))
    ranges.remove(start, end)
    assert ranges.rows == [(start, end, OLD) for start, end in left]
