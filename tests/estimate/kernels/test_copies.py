"""Tests for copies and buffers that kernels of a GPU make of what they read."""

from __future__ import annotations

from functools import partial
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
    assert found[:5] == [2 * MIB, 4 * MIB, 4 * MIB, WEIGHT, 512]
    assert sizes(train(convolved, *LAYER), "convolution_backward")[:3] == [2 * MIB, WEIGHT, 512]


def test_a_channels_last_input_has_the_weight_copied() -> None:
    def run(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return convolved(given.contiguous(memory_format=torch.channels_last), weight, bias)

    assert sizes(train(run, *LAYER), "convolution") == [4 * MIB, WEIGHT]


def last(given: torch.Tensor) -> torch.Tensor:
    return given.contiguous(memory_format=torch.channels_last if given.dim() == 4 else torch.channels_last_3d)


VOLUMES = (2, 64, 4, 32, 32)
"""2 MiB in float32."""


@pytest.mark.parametrize(
    ("operator", "function", "shape", "forward", "backward"),
    [
        (
            "adaptive_max_pool2d",
            lambda x: functional.adaptive_max_pool2d(last(x), 16),
            IMAGES,
            [MIB // 2, MIB, MIB // 2, MIB, 2 * MIB],  # values and indices, both again, the input
            [2 * MIB, 2 * MIB, MIB // 2, MIB],  # the gradient twice, that of the result, indices
        ),
        (
            "adaptive_max_pool3d",
            lambda x: functional.adaptive_max_pool3d(last(x), (4, 16, 16)),
            VOLUMES,
            [MIB // 2, MIB, 2 * MIB],
            None,
        ),
        ("avg_pool3d", lambda x: functional.avg_pool3d(last(x), 2), VOLUMES, [MIB // 4, 2 * MIB], None),
        (
            "upsample_nearest2d",
            lambda x: functional.interpolate(last(x), scale_factor=2),
            (8, 2, 128, 128),
            [4 * MIB, 4 * MIB, MIB],
            [MIB, MIB, 4 * MIB],
        ),
        (
            "upsample_nearest3d",
            lambda x: functional.interpolate(last(x), scale_factor=2),
            VOLUMES,
            [16 * MIB, 16 * MIB, 2 * MIB],
            None,
        ),
        (
            "_upsample_bilinear2d_aa",
            lambda x: functional.interpolate(last(x), scale_factor=0.5, mode="bilinear", antialias=True),
            IMAGES,
            [MIB // 2, MIB // 2, 2 * MIB],
            None,
        ),
        (
            "reflection_pad2d",
            lambda x: last(functional.pad(x, (16, 16, 16, 16), mode="reflect")),
            IMAGES,
            [8 * MIB],
            [2 * MIB, 8 * MIB],
        ),
    ],
)
def test_kernels_without_channels_last_copy_what_they_read_and_write(
    operator: str, function: Any, shape: tuple[int, ...], forward: list[int], backward: list[int] | None
) -> None:
    """As PyTorch 2.13 on the stand-in for a GPU."""
    done = train(function, shape)
    assert sizes(done, operator) == forward
    assert backward is None or sizes(done, f"{operator}_backward") == backward


def test_what_lies_otherwise_on_the_gpu_than_on_the_host_arrives_in_one_more_piece() -> None:
    def load(*, to: torch.memory_format, of: torch.memory_format) -> None:
        torch.ones(16, 4, 64, 64).contiguous(memory_format=of).to("cuda", memory_format=to)

    contiguous, last = torch.contiguous_format, torch.channels_last
    assert sizes(estimated(partial(load, of=contiguous, to=last)), "_to_copy") == [MIB, MIB]
    for of, to in ((last, last), (contiguous, contiguous), (last, contiguous)):
        assert sizes(estimated(partial(load, of=of, to=to)), "_to_copy") == [MIB]


@pytest.mark.parametrize(("blocking", "taken"), [(True, [MIB]), (False, [MIB // 2, MIB // 2])])
def test_a_transposed_tensor_goes_to_the_host_in_one_piece_converted_there_if_the_copy_blocks(
    blocking: bool, taken: list[int]
) -> None:
    """512 x 512 numbers in float32 on the GPU, in float16 on the host."""

    def store() -> None:
        rows = torch.ones(512, 512, device="cuda")
        torch.empty(512, 512, dtype=torch.float16).copy_(rows.t(), non_blocking=not blocking)

    assert sizes(estimated(store), "copy_") == taken


def test_halves_from_the_host_are_converted_on_the_gpu_if_the_copy_does_not_block() -> None:
    def load(*, blocking: bool) -> None:
        torch.ones(512, 512, dtype=torch.float16).to("cuda", torch.float32, non_blocking=not blocking)

    assert sizes(estimated(partial(load, blocking=True)), "_to_copy") == [MIB]
    assert sizes(estimated(partial(load, blocking=False)), "_to_copy") == [MIB, MIB // 2]


def test_images_whose_rows_lie_apart_are_copied_before_they_are_scaled() -> None:
    for function, operator in (
        (lambda x: functional.interpolate(x.mT, scale_factor=2), "upsample_nearest2d"),
        (lambda x: functional.adaptive_avg_pool2d(x.mT, 64), "_adaptive_avg_pool2d"),
    ):
        assert sizes(train(function, IMAGES), operator)[1:] == [2 * MIB]


def test_the_expanded_gradient_of_losses_is_copied() -> None:
    """The kernel reads 1,024 gradients of 4 bytes in one piece; the gradient of the input has 64 KiB."""
    rows = (1024, 16)

    def losses(given: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(
            given, torch.zeros(1024, dtype=torch.long, device="cuda"), reduction="none"
        )

    assert sizes(train(losses, rows, wide=True), "nll_loss_backward") == [64 * KIB, 4 * KIB]
    assert sizes(train(losses, rows), "nll_loss_backward") == [64 * KIB]


def test_a_transposed_sequence_is_copied_before_it_is_convolved() -> None:
    """8 sequences of 1,024 x 64 numbers give 8 of 128 x 1,024."""

    def run(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.conv1d(given.transpose(1, 2), weight, padding=1)

    done = train(run, (8, 1024, 64), (128, 64, 3))
    assert sizes(done, "convolution") == [2 * MIB, 4 * MIB]


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


def test_the_derivative_of_a_mask_sorts_the_indices_that_it_selects() -> None:
    """The mask selects all of 1,000 x 2 places: 16 bytes for the two indices of each, and as above."""
    done = train(lambda x: x[x[..., 0] > 0], (1000, 2, 64))
    assert sizes(done, "index_put") == [*[16000] * 4, 1, 32000]


def test_the_derivative_of_many_indices_sorts_in_a_buffer() -> None:
    """8,192 indices and their order have 16 bytes each. 5,000 rows are numbered with 13 bits, which 2 passes
    sort. A block of an H100 sorts 384 x 12 pairs, so there are 2 (sorting.py).
    """
    done = train(lambda x: x[torch.zeros(8192, dtype=torch.long, device="cuda")], (5000, 64))
    storage = 128 * KIB + 2 * 2048 + 2 * 1024 + 256 + 255
    assert sizes(done, "index_put") == [64 * KIB] * 4 + [storage]


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
    workspace = done.estimate().workspace_bytes
    assert sizes(done, "_euclidean_dist") == [64 * 64 * 4, 64 * 32 * 4, 64 * 32 * 4, workspace]


def grouped(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.group_norm(given, 8, weight, bias)


def test_group_norm_has_a_factor_and_a_term_for_each_channel() -> None:
    """8 images of 64 channels in 8 groups. Backward has three numbers a channel, and two a group."""
    done = train(grouped, IMAGES, (64,), (64,))
    channels, groups = 8 * 64 * 4, 8 * 8 * 4
    assert sizes(done, "native_group_norm") == [2 * MIB, groups, groups, channels, channels]
    results, buffers = [2 * MIB, 256, 256], [channels, channels, groups, groups, channels]
    assert sizes(done, "native_group_norm_backward") == results + buffers


def test_group_norm_of_rows_has_none_forward_and_one_less_backward() -> None:
    """4,096 rows of 64 channels."""
    done = train(grouped, (4096, 64), (64,), (64,))
    groups = 4096 * 8 * 4
    assert sizes(done, "native_group_norm") == [MIB, groups, groups]
    assert sizes(done, "native_group_norm_backward") == [MIB, 256, 256, MIB, MIB, groups, groups]


def test_batch_norm_of_rows_is_summed_by_several_blocks() -> None:
    """A block has 32 channels and 16 threads for each, which sum 16 rows each: 16 x 2 blocks for 4,096 rows.

    They exchange 4 numbers for each channel and a count, and 2 in backward, where two sums are kept.
    """

    def run(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(given, None, None, weight, bias, training=True)

    done = train(run, (4096, 64), (64,), (64,))
    assert sizes(done, "native_batch_norm") == [MIB, 256, 256, 4 * 64 * 16 * 4, 8]
    assert sizes(done, "native_batch_norm_backward") == [256] * 4 + [2 * 64 * 16 * 4, 8, MIB]


@pytest.mark.parametrize(
    ("operator", "function", "taken"),
    [
        ("max_pool2d_with_indices", lambda x: functional.max_pool2d(x, 2), [2 * MIB, 2 * MIB]),
        ("avg_pool2d", lambda x: functional.avg_pool2d(x, 2), [2 * MIB, 2 * MIB]),
        (
            "native_batch_norm",
            lambda x: functional.batch_norm(x.bfloat16(), None, None, training=True),
            [MIB, MIB, MIB],  # also of the gradient
        ),
    ],
)
def test_backward_copies_images_whose_rows_lie_apart(operator: str, function: Any, taken: list[int]) -> None:
    """As PyTorch 2.13 on the stand-in for a GPU."""

    def run(given: torch.Tensor) -> torch.Tensor:
        return function(given.transpose(2, 3))

    assert sizes(train(run, IMAGES), f"{operator}_backward") == taken


def test_norms_of_several_tensors_are_summed_in_parts() -> None:
    """Parts have 65,536 elements, so the larger tensor has 8; both have as many places for them."""

    def run() -> Any:
        given = [torch.ones(500_000, device="cuda"), torch.ones(9, device="cuda")]
        return torch._foreach_norm(given), torch._foreach_max(given)

    done = estimated(run)
    assert sizes(done, "_foreach_norm") == [4, 4, 2 * 8 * 4]
    assert sizes(done, "_foreach_max") == [4, 4, 2 * 8 * 4]


def test_the_derivative_of_distances_has_a_gradient_for_each_coordinate_of_each_pair() -> None:
    """64 x 48 pairs of 30 coordinates, for each of two inputs. Of one set, 64 x 63 pairs."""
    done = train(lambda x, y: torch.cdist(x, y, p=1), (64, 30), (48, 30))
    pairs = 64 * 48 * 30 * 4
    assert sizes(done, "_cdist_backward") == [64 * 30 * 4, pairs, 48 * 30 * 4, pairs]
    assert sizes(train(torch.pdist, (64, 30)), "_pdist_backward") == [64 * 30 * 4, 64 * 63 * 30 * 4]


def test_a_mean_of_what_meets_is_counted_first() -> None:
    """1,024 numbers: the result, how many meet, ones that are counted, and a mask."""

    def run() -> torch.Tensor:
        given = torch.ones(1024, device="cuda")
        return given.scatter_reduce(0, torch.zeros(1024, dtype=torch.long, device="cuda"), given, "mean")

    assert sizes(estimated(run), "scatter_reduce") == [4096, 4096, 4096, 1024]


def test_rows_that_lie_apart_are_copied_to_be_searched() -> None:
    def run() -> torch.Tensor:
        columns = torch.ones(32, 64, device="cuda").t()
        return torch.searchsorted(columns, columns)

    assert sizes(estimated(run), "searchsorted") == [16 * KIB, 8 * KIB, 8 * KIB]


def test_probabilities_in_half_precision_are_drawn_from_in_single() -> None:
    def run(dtype: torch.dtype) -> torch.Tensor:
        return torch.bernoulli(torch.ones(KIB, device="cuda", dtype=dtype))

    assert sizes(estimated(lambda: run(torch.bfloat16)), "bernoulli") == [2 * KIB, 4 * KIB]
    assert sizes(estimated(lambda: run(torch.float32)), "bernoulli") == [4 * KIB]


def test_samples_without_replacement_are_the_largest_of_random_numbers() -> None:
    """64 rows of 100 probabilities: as many random numbers, and the largest 5 of each row."""

    def run(count: int, again: bool) -> torch.Tensor:
        return torch.multinomial(torch.ones(64, 100, device="cuda"), count, again)

    assert sizes(estimated(lambda: run(5, False)), "multinomial") == [64 * 5 * 8, 25_600, 64 * 5 * 4]
    assert sizes(estimated(lambda: run(1, False)), "multinomial") == [64 * 8, 25_600]
    assert sizes(estimated(lambda: run(5, True)), "multinomial") == [64 * 5 * 8, *[25_600] * 3]


def test_layer_norm_copies_its_input_before_the_results_and_the_gradient_after_them() -> None:
    """The order decides which holes blocks fill. It is what PyTorch's CUDA build records (docs/gpu.md)."""
    done = train(lambda x: functional.layer_norm(x.t(), (8,)).t().contiguous(), (8, 4))
    made = [(size, kind) for name, size, kind in allocations(done) if name.startswith("native_layer_norm")]
    forward, backward = made[:4], made[4:]
    assert [kind for _, kind in forward] == ["temporary", *["activation"] * 3]
    assert [size for size, _ in forward] == [128, 128, 16, 16]
    assert backward == [(128, "temporary"), (128, "gradient"), (128, "temporary")]


def test_reflecting_pads_copy_rows_that_lie_apart() -> None:
    """Rows of 8 become 12: a result of 4 x 16 x 12 floats, and a copy of 4 x 16 x 8."""

    def pad(contiguous: bool) -> torch.Tensor:
        images = torch.ones(4, 8, 16, device="cuda").transpose(1, 2)
        return functional.pad(images.contiguous() if contiguous else images, (2, 2), mode="reflect")

    assert sizes(estimated(lambda: pad(contiguous=True)), "reflection_pad1d") == [3072]
    assert sizes(estimated(lambda: pad(contiguous=False)), "reflection_pad1d") == [3072, 2048]


def test_distances_copy_points_that_lie_apart() -> None:
    """64 and 48 points of 32 floats: a result of 64 x 48, and copies of both sets."""

    def run() -> torch.Tensor:
        points = [torch.ones(32, count, device="cuda").t() for count in (64, 48)]
        return torch.cdist(points[0], points[1], p=1)

    assert sizes(estimated(run), "_cdist_forward") == [64 * 48 * 4, 64 * 32 * 4, 48 * 32 * 4]
