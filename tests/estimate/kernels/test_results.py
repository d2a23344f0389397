"""Tests for strides and memory of results: what the next operator copies, and what stays alive with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tb_memplugin import MemoryEstimator
from tests.estimate.fake_runs import MIB, estimated, sizes

BY_ROWS, BY_COLUMNS = (12, 1), (1, 8)
"""Strides of 8 x 12 numbers."""


def gradient_strides(function: Callable[[torch.Tensor], torch.Tensor], *, of_input: str) -> Any:
    """Return the strides of an input's gradient; that of the result lies the other way."""
    with MemoryEstimator(gpu="a100"):
        given = torch.ones(8, 12, device="cuda")
        given = given if of_input == "rows" else torch.ones(12, 8, device="cuda").t()
        result = function(given.requires_grad_())
        gradient = (
            torch.ones(12, 8, device="cuda").t() if of_input == "rows" else torch.ones(8, 12, device="cuda")
        )
        (found,) = torch.autograd.grad(result, given, gradient if result.dim() else None)
        return found.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.layer_norm(x, (12,)),
        lambda x: functional.rms_norm(x, (12,)),
        lambda x: x.log_softmax(-1),
        lambda x: functional.mse_loss(x, torch.ones(8, 12, device="cuda")),
        lambda x: functional.smooth_l1_loss(x, torch.ones(8, 12, device="cuda")),
        lambda x: functional.huber_loss(x, torch.ones(8, 12, device="cuda")),
    ],
    ids=["layer_norm", "rms_norm", "log_softmax", "mse", "smooth_l1", "huber"],
)
@pytest.mark.parametrize("of_input", ["rows", "columns"])
def test_these_gradients_are_contiguous(function: Any, of_input: str) -> None:
    assert gradient_strides(function, of_input=of_input) == BY_ROWS


@pytest.mark.parametrize(
    "function",
    [
        functional.elu,
        functional.softplus,
        functional.hardswish,
        functional.hardsigmoid,
        functional.logsigmoid,
    ],
    ids=["elu", "softplus", "hardswish", "hardsigmoid", "logsigmoid"],
)
def test_a_derivative_lies_as_the_gradient_does(function: Any) -> None:
    assert gradient_strides(function, of_input="columns") == BY_ROWS
    assert gradient_strides(function, of_input="rows") == BY_COLUMNS


def test_enlarged_images_stay_channels_last() -> None:
    with MemoryEstimator(gpu="a100"):
        images = torch.ones(2, 3, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
        larger = functional.interpolate(images, scale_factor=2, mode="bilinear")
        assert larger.is_contiguous(memory_format=torch.channels_last)
        assert functional.pixel_unshuffle(images, 2).is_contiguous()


@pytest.mark.parametrize(
    ("function", "buffers"),
    [
        (lambda x: functional.glu(x, 1), {"glu_backward": [MIB]}),
        (
            lambda x: functional.batch_norm(x, *torch.ones(2, 64, device="cuda")),
            {"native_batch_norm_backward": [64 * 4, MIB]},  # inverse deviations
        ),
        (lambda x: functional.rrelu(x, training=True), {"rrelu_with_noise": [MIB, MIB]}),  # copied
    ],
    ids=["glu", "frozen batch norm", "rrelu"],
)
def test_kernels_write_contiguous_results_of_channels_last_images(function: Any, buffers: Any) -> None:
    """16 x 64 x 16 x 16 floats are 1 MiB; a leaf's gradient is copied into the leaf's own format."""

    def run() -> torch.Tensor:
        images = torch.ones(16, 64, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
        result = function(images.requires_grad_())
        (gradient,) = torch.autograd.grad(result, images, torch.ones_like(result))
        assert gradient.is_contiguous() or "rrelu_with_noise" in buffers
        return gradient

    done = estimated(run)
    for operator, taken in buffers.items():
        assert sizes(done, operator) == taken


@pytest.mark.parametrize(
    ("shape", "strides", "taken"),
    [((8, 12), BY_ROWS, 2), ((), (0, 0), 2), ((12, 8), BY_COLUMNS, 3)],
    ids=["rows", "expanded", "columns"],
)
def test_softmax_reads_a_contiguous_product_of_gradient_and_result(
    shape: tuple[int, ...], strides: tuple[int, int], taken: int
) -> None:
    """Result and product have 384 bytes, and a copy of the product, which lies as the gradient does."""

    def run() -> None:
        given = torch.ones(8, 12, device="cuda", requires_grad=True)
        gradient = torch.ones(shape, device="cuda").as_strided((8, 12), strides)
        (of_input,) = torch.autograd.grad(given.softmax(-1), given, gradient)
        assert of_input.stride() == BY_ROWS

    assert sizes(estimated(run), "_softmax_backward_data") == [8 * 12 * 4] * taken


def backward(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], wide: bool = False) -> Any:
    def run() -> list[torch.Tensor]:
        inputs = [torch.ones(shape, device="cuda", requires_grad=True) for shape in shapes]
        result = function(*inputs)
        one = torch.ones((), device="cuda").expand(result.shape)
        result.backward(one if wide else torch.empty_like(result))
        return inputs

    return estimated(run, gpu="a100")


def test_unfolded_images_begin_as_large_as_the_input_and_their_gradient_keeps_nine_times_that() -> None:
    """8 x 64 x 32 x 32 floats are 2 MiB; each is in 9 windows."""
    done = backward(lambda x: functional.unfold(x, 3, padding=1), (8, 64, 32, 32))
    assert sizes(done, "im2col") == [18 * MIB, 2 * MIB]
    assert sizes(done, "col2im") == [18 * MIB]
    wide = backward(lambda x: functional.unfold(x, 3, padding=1), (8, 64, 32, 32), wide=True)
    assert sizes(wide, "col2im") == [18 * MIB, 18 * MIB]


def test_folded_windows_that_do_not_overlap_are_as_large_as_before() -> None:
    done = backward(lambda x: functional.fold(x, (32, 32), 4, stride=4), (8, 1024, 64), wide=True)
    assert sizes(done, "col2im") == [2 * MIB]
    assert sizes(done, "im2col") == [2 * MIB, 2 * MIB]


def test_masks_of_a_derivative_are_combined_in_place() -> None:
    """1,024 numbers have two masks of 1,024 bytes, and no third."""

    def clamped(given: torch.Tensor) -> torch.Tensor:
        return given.clamp(torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda"))

    assert sizes(backward(clamped, (1024,)), "logical_and") == []
    both = estimated(lambda: torch.ones(8, device="cuda").logical_and(torch.ones(8, device="cuda")))
    assert sizes(both, "logical_and") == [8]


def test_the_derivative_of_take_writes_into_its_zeros() -> None:
    def chosen(given: torch.Tensor) -> torch.Tensor:
        return given.take(torch.zeros(5, dtype=torch.long, device="cuda"))

    done = backward(chosen, (1024,))
    assert (sizes(done, "zeros_like"), sizes(done, "put")) == ([4096], [])


def test_a_gru_cell_keeps_five_vectors_for_its_backward() -> None:
    """8 sequences of 64 floats: the state and five vectors; then the gradients of two products of three
    vectors, of the state, and of two biases.
    """

    def run() -> nn.Module:
        cell = nn.GRUCell(32, 64, device="cuda")
        cell(torch.ones(8, 32, device="cuda")).sum().backward()
        return cell

    state, bias = 8 * 64 * 4, 3 * 64 * 4
    done = estimated(run, gpu="a100")
    assert sizes(done, "_thnn_fused_gru_cell") == [state, 5 * state]
    assert sizes(done, "_thnn_fused_gru_cell_backward") == [3 * state, 3 * state, state, bias, bias]


def test_rounding_as_in_training_for_quantization_keeps_a_mask() -> None:
    def rounded(given: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(given, 0.1, 0, -128, 127)

    done = backward(rounded, (1024,))
    assert sizes(done, "fake_quantize_per_tensor_affine_cachemask") == [4096, 1024]


def test_a_window_keeps_the_element_that_it_is_cut_from_each_time() -> None:
    """PyTorch computes 1,025 numbers and cuts off the last; FakeTensorMode's cache knows only the cut."""

    def run() -> list[torch.Tensor]:
        return [torch.hann_window(1024, device="cuda") for _ in range(2)]

    for _ in range(2):  # the cache outlives an estimate
        assert sizes(estimated(run, gpu="a100"), "hann_window") == [4100, 4100]


def test_cudnn_samples_images_from_copies() -> None:
    """PyTorch built with CUDA calls this for grid_sample in float32 with align_corners=True."""

    def sample() -> None:
        images = torch.ones(2, 3, 16, 16, device="cuda", requires_grad=True)
        grid = torch.ones(2, 2, 8, 8, device="cuda").permute(0, 2, 3, 1).requires_grad_()
        torch.cudnn_grid_sampler(images, grid).sum().backward()

    done = estimated(sample)
    images, grid, result = 2 * 3 * 16 * 16 * 4, 2 * 8 * 8 * 2 * 4, 2 * 3 * 8 * 8 * 4
    assert sizes(done, "cudnn_grid_sampler") == [grid, result]
    assert sizes(done, "cudnn_grid_sampler_backward") == [grid, result, images, grid]
