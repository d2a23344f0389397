"""Whoever resets a peak resets it for himself: the user's reads and ours are both right."""

from __future__ import annotations

import pytest

from tb_memplugin.record.steps.counters import SharedPeaks
from tests.counting_allocator import CountingAllocator


@pytest.fixture
def allocator():
    return CountingAllocator()


def test_each_take_gives_the_highest_since_the_one_before(allocator):
    peaks = SharedPeaks(allocator.doors)
    mine = peaks.open(0)
    allocator.briefly(100)
    assert peaks.take(0, mine)[1:] == (100, 100)
    allocator.briefly(30)
    assert peaks.take(0, mine)[1:] == (30, 100)  # the reserve stays


def test_the_users_peak_is_that_of_the_whole_training_whatever_is_taken(allocator):
    peaks = SharedPeaks(allocator.doors)
    mine = peaks.open(0)
    for size in (50, 100, 30):
        allocator.briefly(size)
        peaks.take(0, mine)
    assert allocator.user_peak() == 100
    assert allocator.module.other_read(0)["allocated_bytes"]["all"]["peak"] == 100
    assert allocator.module.read(0)["allocation"]["all"]["peak"] == 1  # every counter that has a peak
    peaks.close(0, mine)
    assert allocator.user_peak() == 100


def test_the_users_reset_takes_nothing_from_us_and_our_takes_nothing_from_the_user(allocator):
    peaks = SharedPeaks(allocator.doors)
    mine = peaks.open(0)
    allocator.briefly(100)
    allocator.user_resets()
    allocator.briefly(40)
    assert allocator.user_peak() == 40
    assert peaks.take(0, mine)[1] == 100
    assert allocator.user_peak() == 40
    allocator.user_resets()
    assert allocator.user_peak() == 0


def test_a_peak_from_before_we_came_is_the_users_still(allocator):
    allocator.briefly(500)
    peaks = SharedPeaks(allocator.doors)
    mine = peaks.open(0)
    peaks.take(0, mine)
    allocator.briefly(10)
    assert peaks.take(0, mine)[1] == 10
    assert allocator.user_peak() == 500


def test_two_readers_do_not_disturb_each_other(allocator):
    peaks = SharedPeaks(allocator.doors)
    one, other = peaks.open(0), peaks.open(0)
    allocator.briefly(100)
    assert peaks.take(0, one)[1] == 100
    allocator.briefly(20)
    assert peaks.take(0, one)[1] == 20
    assert peaks.take(0, other)[1] == 100
    peaks.close(0, other)
    allocator.briefly(7)
    assert peaks.take(0, one)[1] == 7


def test_without_a_reader_the_users_calls_reach_the_allocator_as_they_are(allocator):
    SharedPeaks(allocator.doors)
    allocator.briefly(9)
    assert allocator.user_peak() == 9
    allocator.user_resets()
    assert (allocator.user_peak(), allocator.resets) == (0, 1)


def test_the_functions_are_restored_as_soon_as_no_peak_of_the_users_is_lost_by_that(allocator):
    plain = dict(vars(allocator.module))
    peaks = SharedPeaks(allocator.doors)
    assert vars(allocator.module) == plain
    allocator.briefly(100)
    peaks.close(0, peaks.open(0))  # nothing was reset
    assert vars(allocator.module) == plain

    for restore in (allocator.user_resets, lambda: (allocator.briefly(101), allocator.user_peak())):
        allocator.briefly(100)
        mine = peaks.open(0)
        peaks.take(0, mine)
        peaks.close(0, mine)
        assert allocator.user_peak() >= 100
        assert vars(allocator.module) != plain
        restore()
        assert vars(allocator.module) == plain


def test_what_somebody_has_wrapped_meanwhile_stays_and_is_not_wrapped_twice(allocator):
    peaks = SharedPeaks(allocator.doors)
    mine, ours = peaks.open(0), allocator.module.read
    allocator.module.read = theirs = lambda index: ours(index)
    peaks.close(0, mine)
    assert allocator.module.read is theirs
    mine = peaks.open(0)
    assert allocator.module.read is theirs
    allocator.briefly(100)
    assert peaks.take(0, mine)[1] == 100
    assert allocator.user_peak() == 100


def test_the_users_peaks_of_private_pools_stay_right_too(allocator):
    """torch 2.13 has counters by pool: `reserved_bytes_by_private_pools`, a name, a pool and a part deep."""
    few, name, pool = allocator.module.read, "reserved_bytes_by_private_pools", (0, 1)
    allocator.module.read = lambda index: {
        **few(index),
        name: {pool: {"all": few(index)["allocated_bytes"]["all"]}},
    }
    peaks = SharedPeaks(allocator.doors)
    mine = peaks.open(0)
    allocator.briefly(100)
    peaks.take(0, mine)
    assert allocator.module.read(0)[name][pool]["all"]["peak"] == 100
