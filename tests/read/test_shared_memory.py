"""Telling the events of shared memory from the CPU's own, which carry the same fields."""

import numpy as np
import pytest

from tb_memplugin.read.shared_memory import in_shared_memory

HEAP, MAPPED = 0x5555_5540, 0x7F00_0000_3000  # malloc aligns to 64 bytes, mmap to pages


def shared(*events: tuple[int, int, int]) -> list[bool]:
    """Which of (address, bytes, total) are in shared memory, all reported as the CPU's."""
    address, size, total = np.array(events, np.int64).T
    return in_shared_memory(address, size, total, np.ones(len(events), np.bool_)).tolist()


def test_what_is_counted_nowhere_is_shared():
    assert shared((HEAP, 8, 8), (MAPPED, 4096, 0), (MAPPED, -4096, 0), (HEAP, -8, 0)) == [
        False,
        True,
        True,
        False,
    ]


def test_a_batch_of_before_the_window_that_is_freed_first_is_not_the_cpus():
    """A loop over a DataLoader with workers: its last batch dies first, and would pull the sum below zero."""
    assert shared((MAPPED, -4096, 0), (HEAP, 8, 8)) == [True, False]


def test_the_cpus_own_block_of_an_earlier_window_that_is_freed_first_is_the_cpus():
    assert shared((HEAP, -8, 0), (HEAP, 8, 8)) == [False, False]


@pytest.mark.parametrize("before", [8, 16])
def test_a_free_after_which_the_counter_stands_where_it_was_is_shared(before):
    assert shared((HEAP, before, before), (MAPPED + 64, -8, 0), (HEAP + 64, 4, before + 4)) == [
        False,
        True,
        False,
    ]


def test_the_counter_comes_down_to_zero_once():
    assert shared((HEAP, 8, 8), (HEAP, -8, 0), (MAPPED, -8, 0)) == [False, False, True]


def test_other_devices_and_totals_that_are_not_told_are_left_alone():
    nothing = np.zeros(2, np.bool_)
    address, size = np.array([HEAP, HEAP]), np.array([8, -8])
    assert not in_shared_memory(address, size, np.array([0, 0]), nothing).any()
    assert not in_shared_memory(address, size, np.array([-1, -1]), ~nothing).any()
