"""Tests for the comparison of an estimate's allocations with those of a real process."""

from __future__ import annotations

from threading import Thread

import torch

from tests.estimate.ranks.real_ranks import RealRank, only_sums_more, profiled


def test_a_sum_that_autograd_could_not_make_in_place_is_no_difference() -> None:
    assert only_sums_more([8, 8, 8, 4], sums=[0], found=[8, 8, 4])
    assert only_sums_more([8, 8, 4], sums=[0], found=[8, 8, 4])  # the estimate has the sum too


def test_anything_else_that_one_of_the_two_lacks_is_a_difference() -> None:
    assert not only_sums_more([8, 8, 8, 4], sums=[3], found=[8, 8, 4])
    assert not only_sums_more([8, 4], sums=[0], found=[8, 8, 4])
    assert not only_sums_more([8, 8, 2], sums=[0, 1], found=[8, 8, 4])


def test_a_peak_may_leave_rows_out() -> None:
    run = RealRank(sizes=[8, 4, 2], sums=[], late=[0], order=[1, 2, -2, 3])
    assert run.peak() == 8 + 4
    assert run.peak(without=[0]) == 4


def test_what_a_thread_frees_that_is_not_recorded_is_late() -> None:
    """The first of two tensors of 4,096 bytes."""

    def program() -> torch.Tensor:
        held = [torch.empty(1024)]
        thread = Thread(target=held.clear)
        kept = torch.empty(1024)
        thread.start()
        thread.join()
        return kept

    run = profiled(program)
    assert (run.sizes, run.late) == ([4096, 4096], [0])
    assert (run.peak(), run.peak(without=run.late)) == (8192, 4096)
