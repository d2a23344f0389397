"""Tests for what reductions allocate on a GPU beside results: an A100 has 108 processors of 2,048 threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.reductions import Layout, reduction_buffers
from tests.estimate.fake_runs import KIB, MIB, estimated, sizes

A100 = GpuSpec.named("a100")


def buffers(shape: tuple[int, ...], reduced: tuple[int, ...], **options: Any) -> list[int]:
    layout = Layout.contiguous(shape, torch.float32)
    (found,) = reduction_buffers(layout, reduced, 4, options.get("gpu", A100))
    return found


def test_few_inputs_need_no_other_block() -> None:
    assert buffers((2048, 768), (1,)) == []
    assert buffers((4096,), (0,)) == []


def test_each_block_has_a_partial_result_of_a_whole_sum() -> None:
    """Each of 512 threads would sum 2,048 of 2^20 numbers. It sums 16 at least, so there are 128 blocks."""
    assert buffers((MIB,), (0,)) == [128 * 4, 4]


def test_a_smaller_gpu_runs_fewer_blocks() -> None:
    """A T4 runs two blocks of 512 threads on each of 40 processors."""
    assert buffers((MIB,), (0,), gpu=GpuSpec.named("t4")) == [80 * 4, 4]


def test_columns_have_a_partial_result_for_each_thread() -> None:
    """A block of 32 x 4 threads sums 4 columns a thread, so 6 blocks have the 768 columns.

    Each thread would sum 512 numbers. It sums 16 at least, so 32 blocks share a column.
    """
    assert buffers((2048, 768), (0,)) == [4 * 768 * 32 * 32 * 4, 4 * 6]


def test_neighbours_are_reduced_as_one_dimension() -> None:
    assert buffers((4, 512, 768), (0, 1)) == buffers((2048, 768), (0,))


def test_more_than_2_gib_are_reduced_in_halves() -> None:
    """Halves of 2^29 numbers: 432 blocks of 512 threads, 4 on each of 108 processors, or 256 numbers each."""
    layout = Layout.contiguous((1 << 30,), torch.float32)
    assert reduction_buffers(layout, (0,), 4, A100) == [[4 * 4096, 4]] * 2


@pytest.mark.parametrize(
    ("function", "partial"),
    [
        (torch.sum, 4),
        (torch.mean, 4),
        (torch.amax, 2),
        (torch.any, 1),
        (torch.var, 16),
        (torch.linalg.vector_norm, 4),
        (torch.argmax, 16),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_partial_result_is_as_large_as_its_operator_needs(function: Any, partial: int) -> None:
    """There are 128 of them for 2^20 numbers in half precision."""
    done = estimated(lambda: function(torch.ones(MIB, device="cuda", dtype=torch.bfloat16)), gpu="a100")
    name = {"vector_norm": "linalg_vector_norm"}.get(function.__name__, function.__name__)
    assert sizes(done, name)[1:] == [128 * partial, 4]


def test_a_mask_is_summed_in_a_copy_of_8_bytes_an_element() -> None:
    done = estimated(lambda: torch.ones(MIB, device="cuda", dtype=torch.bool).sum(), gpu="a100")
    assert sizes(done, "sum") == [8, 8 * MIB, 128 * 8, 4]


def test_what_is_not_zero_is_counted_in_a_mask() -> None:
    done = estimated(lambda: torch.ones(MIB, device="cuda").count_nonzero(), gpu="a100")
    assert sizes(done, "count_nonzero") == [8, MIB, 8 * MIB, 128 * 8, 4]


def test_the_largest_of_rows_that_lie_apart_is_found_in_a_copy() -> None:
    done = estimated(lambda: torch.ones(64, 1024, device="cuda").t().max())
    assert sizes(done, "max")[:2] == [4, 64 * KIB * 4]


@pytest.mark.parametrize(
    ("loss", "before"),
    [
        (functional.mse_loss, [4 * MIB]),
        (functional.huber_loss, [4 * MIB]),
        (functional.soft_margin_loss, [4]),
        (functional.binary_cross_entropy, [4]),
        (functional.binary_cross_entropy_with_logits, [4 * MIB, 4 * MIB]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_losses_are_averaged_like_any_other_sum(loss: Callable[..., Any], before: list[int]) -> None:
    """Before that, a kernel holds the losses of all elements, or the number that it copies to the result."""

    def run() -> Any:
        return loss(torch.ones(MIB, device="cuda"), torch.ones(MIB, device="cuda"))

    found = sizes(estimated(run, gpu="a100"), loss.__name__)
    assert found[1:] == [*before, 128 * 4, 4]


def test_the_derivative_of_a_loss_of_logits_is_one_tensor() -> None:
    def run() -> None:
        given = torch.ones(MIB, device="cuda", requires_grad=True)
        functional.binary_cross_entropy_with_logits(given, torch.ones(MIB, device="cuda")).backward()

    done = estimated(run)
    assert sizes(done, "sigmoid") == [4 * MIB]
    assert sizes(done, "sub") == sizes(done, "mul") == []
    assert sizes(estimated(run, corrected=False), "sub") == [4 * MIB]


def test_a_derivative_of_that_derivative_is_possible() -> None:
    def run() -> None:
        given = torch.ones(64, device="cuda", requires_grad=True)
        loss = functional.binary_cross_entropy_with_logits(given, torch.ones(64, device="cuda"))
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        slope.sum().backward()
        assert given.grad is not None

    estimated(run)
