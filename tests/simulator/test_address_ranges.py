"""Tests for sets of address ranges that grow and shrink."""

from __future__ import annotations

import pytest

from tb_memplugin.simulator.simulated_trace import Ranges


def of(*spans: tuple[int, int]) -> Ranges[str]:
    ranges: Ranges[str] = Ranges()
    for start, end in spans:
        assert ranges.add(start, end, "old") == 0
    return ranges


def spans(ranges: Ranges[str]) -> list[tuple[int, int, str]]:
    return [(part.start, part.end, part.owner) for part in ranges]


def test_ranges_stand_in_address_order() -> None:
    assert spans(of((30, 40), (10, 20), (20, 30))) == [(10, 20, "old"), (20, 30, "old"), (30, 40, "old")]


def test_what_is_there_already_stays_and_is_counted() -> None:
    ranges = of((10, 20), (30, 40))
    assert ranges.add(15, 45, "new") == 5 + 10
    assert spans(ranges) == [(10, 20, "old"), (20, 30, "new"), (30, 40, "old"), (40, 45, "new")]


@pytest.mark.parametrize(
    ("start", "end", "missing", "left"),
    [
        (10, 20, 0, [(30, 40)]),
        (12, 14, 0, [(10, 12), (14, 20), (30, 40)]),
        (15, 35, 10, [(10, 15), (35, 40)]),
        (20, 30, 10, [(10, 20), (30, 40)]),
        (0, 50, 30, []),
        (50, 60, 10, [(10, 20), (30, 40)]),
        (5, 5, 0, [(10, 20), (30, 40)]),
    ],
)
def test_a_range_is_cut_out(start: int, end: int, missing: int, left: list[tuple[int, int]]) -> None:
    ranges = of((10, 20), (30, 40))
    assert ranges.remove(start, end) == missing
    assert [(part.start, part.end) for part in ranges] == left


def test_an_address_finds_its_range() -> None:
    ranges = of((10, 20), (30, 40))
    found = ranges.at(19)
    assert found is not None
    assert found.start == 10
    assert [ranges.at(address) for address in (9, 20, 29, 40)] == [None] * 4
