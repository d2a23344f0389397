"""Tests for what cuDNN's kernels of `scaled_dot_product_attention` hold, and when they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.estimate.fake_runs import KIB, MIB, allocations, estimated

CUDNN, FLASH = (f"_scaled_dot_product_{name}_attention" for name in ("cudnn", "flash"))
BACKWARD = f"{CUDNN}_backward"

SUMS, PRODUCTS = 32 * KIB, 2 * MIB
"""A float32 number for each of 8 x 1024 queries, and 64 of them."""


def attend(queries: int = 1024, key_heads: int = 8, size: int = 64, **options: Any) -> torch.Tensor:
    """Attend with 8 heads to 1024 keys: with 1024 queries, query and result take 1 MiB."""
    query, key, value = (
        torch.randn(1, heads, length, wide, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads, length, wide in ((8, queries, size), (key_heads, 1024, size), (key_heads, 1024, 64))
    )
    return F.scaled_dot_product_attention(query, key, value, **options)


def train(**options: Any) -> None:
    result = attend(**options)
    result.backward(torch.empty_like(result))


def held(gpu: str, operator: str, **options: Any) -> list[int]:
    """Return the bytes of what an operator of a training allocates, in order."""
    done = allocations(estimated(lambda: train(**options), gpu=gpu))
    return [size for name, size, _ in done if name == operator]


def test_the_forward_holds_random_state_result_sums_and_a_workspace() -> None:
    assert held("h100", CUDNN) == [8, 8, MIB, SUMS, 256]
    assert held("b200", CUDNN) == [8, 8, MIB, SUMS]


def test_inference_has_no_sums() -> None:
    def infer() -> torch.Tensor:
        with torch.no_grad():
            return attend()

    done = allocations(estimated(infer, gpu="h100"))
    assert [size for name, size, _ in done if name == CUDNN] == [8, 8, MIB, 256]


@pytest.mark.parametrize(
    ("gpu", "options", "workspace"),
    [
        ("h100", {}, PRODUCTS + SUMS + 256),
        ("h200", {}, PRODUCTS + SUMS + 256),
        ("b200", {}, PRODUCTS + SUMS),
        ("h100", {"dropout_p": 0.5}, PRODUCTS + SUMS + 256),
        ("b200", {"dropout_p": 0.5}, PRODUCTS + SUMS + MIB + 128),
        ("h100", {"queries": 128}, (PRODUCTS + SUMS) // 8 + 256),
        ("b200", {"queries": 128}, (2 * PRODUCTS + SUMS) // 8 + 128),
    ],
)
def test_the_backward_holds_a_float32_gradient_of_queries_and_sums(
    gpu: str, options: dict[str, Any], workspace: int
) -> None:
    """On Blackwell dropout has a bit for each of 8 x 1024 x 1024 scores; few queries have their dQ twice."""
    assert held(gpu, BACKWARD, **options)[3:] == [workspace]


def test_the_backward_holds_the_gradients_of_all_heads_if_there_are_fewer_key_heads() -> None:
    """dK and dV of all 8 heads take 1 MiB each."""
    assert held("h100", BACKWARD, key_heads=2, enable_gqa=True)[3:] == [PRODUCTS + SUMS + 2 * MIB + 256]


def test_the_backward_copies_a_gradient_whose_rows_are_not_contiguous() -> None:
    done = allocations(estimated(lambda: attend().sum().backward(), gpu="h100"))
    assert [size for name, size, _ in done if name == BACKWARD][3:] == [MIB, PRODUCTS + SUMS + 256]


def test_the_workspace_is_freed_as_the_backward_ends() -> None:
    done = estimated(train, gpu="h100")
    assert (BACKWARD, PRODUCTS + SUMS + 256, "temporary") in allocations(done)
    assert done.get_current_memory_allocated() == (0,)


def test_many_keys_of_one_query_are_divided_into_parts_on_hopper() -> None:
    """8 heads in 8 parts of 128 keys: 64 results in float32 and two numbers each."""
    assert held("h100", CUDNN, queries=1)[4:] == [8 * 8 * 66 * 4 + 128]
    assert any("single query" in note for note in estimated(lambda: attend(1), gpu="b200").estimate().notes)


def test_cudnn_knows_no_dropout_but_sixteenths() -> None:
    assert held("h100", CUDNN, dropout_p=0.1) == []
    assert held("h100", FLASH, dropout_p=0.1) != []


def test_heads_of_192_and_128_have_a_kernel_on_blackwell() -> None:
    def deep(value_size: int) -> set[str]:
        def run() -> torch.Tensor:
            query = torch.empty(1, 8, 256, 192, dtype=torch.bfloat16, device="cuda")
            return F.scaled_dot_product_attention(query, query, query[..., :value_size])

        return {name for name, _, _ in allocations(estimated(run, gpu="b200"))}

    assert CUDNN in deep(128)
    assert CUDNN not in deep(64)


def test_a_program_may_ask_for_cudnn_on_a_gpu_that_prefers_another_kernel() -> None:
    """There, the kernel has dQ twice."""

    def forced() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            train()

    done = allocations(estimated(forced, gpu="a100"))
    assert [size for name, size, _ in done if name == BACKWARD][3:] == [2 * PRODUCTS + SUMS + 128]
    assert any("another generation" in note for note in estimated(forced, gpu="rtx4090").estimate().notes)
