"""Tests for what sorting allocates on a GPU; the figures are those of PyTorch's own code on the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.sorting import segmented_sort_bytes, sort_bytes
from tests.estimate.fake_runs import estimated, sizes

A100, H100, T4 = GpuSpec.named("a100"), GpuSpec.named("h100"), GpuSpec.named("t4")


def taken(program: Callable[[], Any], operator: str) -> list[int]:
    return sizes(estimated(program, gpu="a100"), operator)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype)


def test_a_block_sorts_few_pairs_without_storage() -> None:
    """256 threads sort 9 pairs of 4 and 8 bytes each."""
    assert sort_bytes(2304, 4, 8, A100) == 1
    assert sort_bytes(2305, 4, 8, A100) > 1


def test_pairs_are_sorted_in_a_copy_of_both() -> None:
    """128,000 keys of 4 bytes and values of 8: a copy of both, 4 passes that count 256 digits in 8 bytes,
    256 counters for each block, a counter for each pass in 256 bytes, and 255 bytes to align it all.

    A block of an A100 sorts 384 x 8 pairs, so there are 42; one of an H100 sorts 384 x 14, so there are 24;
    one of a T4 sorts 256 x 11, so there are 46.
    """
    whole = 128_000 * 12 + 4 * 256 * 8 + 256 + 255
    assert sort_bytes(128_000, 4, 8, A100) == whole + 42 * 1024
    assert sort_bytes(128_000, 4, 8, H100) == whole + 24 * 1024
    assert sort_bytes(128_000, 4, 8, T4) == whole + 46 * 1024


def test_one_pass_needs_no_copy() -> None:
    """Blocks of 384 x 10 keys of 8 bytes: 34 for 128,000."""
    assert sort_bytes(128_000, 8, 0, A100, bits=2) == 256 * 8 + 34 * 1024 + 256 + 255


def test_before_hopper_short_keys_count_digits_for_each_block() -> None:
    """5 times 8 blocks for each of 108 processors count 128 digits each; 512 x 11 more are summed at once.

    The copy of 100,000 keys of 2 bytes takes 200,192 bytes.
    """
    assert sort_bytes(100_000, 2, 8, A100) == 8 * (108 * 8 * 5 * 128 + 512 * 11) + 200_192 + 800_000 + 255


def test_segments_are_sorted_in_a_copy() -> None:
    assert segmented_sort_bytes(1000, 4, 8) == 4096 + 8192 + 255


def test_short_rows_are_sorted_in_place_from_the_numbers_of_one_row() -> None:
    """64 rows of 512 floats: the values, the indices, and 512 numbers of 8 bytes."""
    assert taken(lambda: rows(64, 512).sort(-1), "sort") == [64 * 512 * 4, 64 * 512 * 8, 512 * 8]


def test_a_long_row_is_sorted_by_its_keys() -> None:
    """16,384 numbers of experts: values, indices, their numbers before; 8 passes of 5 blocks in a copy."""
    storage = 2 * 131_072 + 8 * 2048 + 5 * 1024 + 256 + 255
    done = taken(lambda: rows(16384, dtype=torch.long).argsort(stable=True), "sort")
    assert done == [131_072, 131_072, 131_072, storage]


def test_a_few_long_rows_are_sorted_together_and_then_by_row() -> None:
    """4 rows of 32,000 logits: pairs of row and place before and after, keys, and storage twice."""
    done = taken(lambda: rows(4, 32_000).sort(-1), "sort")
    assert done == [512_000, 1_024_000, 1_024_000, 1_024_000, 512_000, 1_587_711, 37_375]


def test_many_long_rows_are_sorted_as_segments() -> None:
    """128 rows of 8,000 floats: values, indices, their numbers before, and a copy of both."""
    done = taken(lambda: rows(128, 8000).sort(-1), "sort")
    assert done == [4_096_000, 8_192_000, 8_192_000, 12_288_000 + 255]


def test_long_columns_are_copied_first() -> None:
    """The columns become rows, and so do values and indices."""
    done = taken(lambda: rows(8000, 128).sort(0), "sort")
    copied = [4_096_000, 4_096_000, 8_192_000]
    assert done == [4_096_000, 8_192_000, *copied, 8_192_000, 12_288_255]


def test_the_largest_of_long_rows_are_found_by_several_blocks() -> None:
    """4 rows of 32,000 have 32 blocks of 1,024 each, which count 256 digits in 2 bytes; 4 bytes a row and
    digit, and two numbers of 4 bytes a block. Before these, a row has 4, 8 and 8 bytes.
    """
    done = taken(lambda: rows(4, 32_000).topk(50), "topk")
    counts = [4 * 32 * 256 * 2, 4 * 256 * 4, 4 * 32 * 4, 4 * 32 * 4]
    assert done == [800, 1600, 16, 32, 32, *counts, 1279]


def test_the_largest_of_short_rows_are_found_without() -> None:
    assert taken(lambda: rows(16384, 64).topk(2), "topk") == [16384 * 8, 16384 * 16]


def test_what_is_not_contiguous_is_copied_for_topk() -> None:
    assert taken(lambda: rows(64, 512).t().topk(2), "topk") == [512 * 8, 512 * 16, 64 * 512 * 4]


def test_a_permutation_sorts_random_keys() -> None:
    """100,000 numbers in order, twice as many keys of 8 bytes, of which 40 bits are sorted in 5 passes."""
    storage = 1_600_000 + 5 * 2048 + 27 * 1024 + 256 + 255
    assert taken(lambda: torch.randperm(100_000, device="cuda"), "randperm") == [*[800_000] * 4, storage]


@pytest.mark.parametrize("program", [lambda: torch.randperm(1000), lambda: torch.zeros(9).sort()])
def test_the_cpu_sorts_without(program: Callable[[], Any]) -> None:
    done = estimated(program, device="cpu")
    assert len(sizes(done, "sort")) + len(sizes(done, "randperm")) <= 2
