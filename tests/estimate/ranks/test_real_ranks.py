"""Tests for the comparison of an estimate's allocations with those of a real process."""

from __future__ import annotations

from tests.estimate.ranks.real_ranks import only_sums_more


def test_a_sum_that_autograd_could_not_make_in_place_is_no_difference() -> None:
    assert only_sums_more([8, 8, 8, 4], sums=[0], found=[8, 8, 4])
    assert only_sums_more([8, 8, 4], sums=[0], found=[8, 8, 4])  # the estimate has the sum too


def test_anything_else_that_one_of_the_two_lacks_is_a_difference() -> None:
    assert not only_sums_more([8, 8, 8, 4], sums=[3], found=[8, 8, 4])
    assert not only_sums_more([8, 4], sums=[0], found=[8, 8, 4])
    assert not only_sums_more([8, 8, 2], sums=[0, 1], found=[8, 8, 4])
