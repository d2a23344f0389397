"""Tests for copies and buffers that kernels of a GPU make of what they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.estimate.fake_runs import KIB, MIB, allocations, estimated, sizes

IMAGES = (8, 64, 32, 32)
"""2 MiB in float32."""


def train(function: Any, *shapes: tuple[int, ...], wide: bool = False) -> Any:
    """Run forward and backward; with `wide` the gradient is one number expanded to a shape."""

    def run() -> None:
        inputs = [torch.ones(shape, device="cuda", requires_grad=True) for shape in shapes]
        result = function(*inputs)
        one = torch.ones((), device="cuda").expand(result.shape)
        result.backward(one if wide else torch.empty_like(result))

    return estimated(run)


def test_the_derivative_of_softmax_multiplies_gradient_and_result_first() -> None:
    done = train(lambda x: x.softmax(-1), (1024, 1024))
    assert sizes(done, "_softmax_backward_data") == [4 * MIB, 4 * MIB]


def convolved(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(given, weight, bias, padding=1)


LAYER = (IMAGES, (128, 64, 3, 3), (128,))
WEIGHT = 128 * 64 * 9 * 4


def test_a_convolution_reads_gradients_in_one_piece() -> None:
    """Results are the gradients of input, weight and bias; the gradient that comes in has 4 MiB.

    A block of 32 x 16 threads sums channels: 128 channels of 8,192 numbers have a partial result for each of
    8 blocks.
    """
    found = sizes(train(convolved, *LAYER, wide=True), "convolution_backward")
    assert found[:4] == [2 * MIB, WEIGHT, 4 * MIB, 512]
    assert sizes(train(convolved, *LAYER), "convolution_backward")[:3] == [2 * MIB, WEIGHT, 512]


def test_a_channels_last_input_has_the_weight_copied() -> None:
    def run(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return convolved(given.contiguous(memory_format=torch.channels_last), weight, bias)

    assert sizes(train(run, *LAYER), "convolution") == [4 * MIB, WEIGHT]


def test_a_transposed_sequence_is_copied_before_it_is_convolved() -> None:
    """8 sequences of 1,024 x 64 numbers give 8 of 128 x 1,024."""

    def run(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.conv1d(given.transpose(1, 2), weight, padding=1)

    done = train(run, (8, 1024, 64), (128, 64, 3))
    assert sizes(done, "convolution") == [4 * MIB, 2 * MIB]


@pytest.mark.parametrize(
    ("function", "operator", "read"),
    [
        (lambda x: functional.max_pool2d(x, 2), "max_pool2d_with_indices_backward", MIB // 2),
        (lambda x: functional.avg_pool2d(x, 2), "avg_pool2d_backward", MIB // 2),
        (lambda x: functional.interpolate(x, scale_factor=2), "upsample_nearest2d_backward", 8 * MIB),
        (lambda x: functional.pad(x, (2, 2, 2, 2), mode="reflect"), "reflection_pad2d_backward", 2_654_208),
    ],
    ids=["max_pool", "avg_pool", "interpolate", "pad"],
)
def test_an_expanded_gradient_is_copied(function: Any, operator: str, read: int) -> None:
    """The gradient of padded images has 8 x 64 x 36 x 36 numbers."""
    assert sizes(train(function, IMAGES, wide=True), operator) == [2 * MIB, read]
    assert sizes(train(function, IMAGES), operator) == [2 * MIB]


def test_what_is_summed_along_strides_is_copied() -> None:
    done = estimated(lambda: torch.ones(64, 32, device="cuda").t().cumsum(-1))
    assert sizes(done, "cumsum") == [8 * KIB, 8 * KIB]


def test_the_derivative_of_indexing_sorts_the_indices() -> None:
    """1,000 indices: as offsets, sorted, their order, and their numbers before; a byte for CUB."""
    done = train(lambda x: x[torch.zeros(1000, dtype=torch.long, device="cuda")], (5000, 64))
    assert sizes(done, "index_put") == [8000] * 4 + [1]


def test_the_derivative_of_many_indices_sorts_in_a_buffer() -> None:
    """8,192 indices and their order have 16 bytes each."""
    done = train(lambda x: x[torch.zeros(8192, dtype=torch.long, device="cuda")], (5000, 64))
    assert sizes(done, "index_put") == [64 * KIB] * 4 + [128 * KIB]


def bags(kind: str) -> list[int]:
    """Return what the derivative of 512 bags of 32 embeddings of 64 numbers allocates."""

    def run(table: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(512, 32, dtype=torch.long, device="cuda")
        return functional.embedding_bag(rows, table, mode=kind)

    return sizes(train(run, (1000, 64)), "_embedding_bag_backward")


def test_the_derivative_of_bags_is_summed_like_that_of_embeddings() -> None:
    """The buffers are those of an embedding of 16,384 tokens: at most 1,000 segments, 1,638 + 1,000 parts."""
    index = 8 * 16384
    parts = [2638 * 8, 2638 * 64 * 4]
    assert bags("sum") == bags("mean") == [256_000, *[index] * 3, 8, 8000, 8000, 8, *parts]
    assert bags("max") == [256_000]


def test_classes_are_marked_without_a_mask() -> None:
    """64 x 100 numbers of 8 bytes."""

    def run() -> torch.Tensor:
        return functional.one_hot(torch.zeros(64, dtype=torch.long, device="cuda"), 100)

    made = [(name, size) for name, size, _ in allocations(estimated(run))]
    assert made == [("zeros", 512), ("zeros", 51_200)]


def test_distances_multiply_points_with_two_columns_more() -> None:
    done = estimated(
        lambda: torch.cdist(torch.ones(64, 30, device="cuda"), torch.ones(64, 30, device="cuda"))
    )
    assert sizes(done, "_euclidean_dist") == [64 * 64 * 4, 64 * 32 * 4, 64 * 32 * 4]
