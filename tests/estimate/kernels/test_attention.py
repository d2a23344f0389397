"""Tests for the choice of the kernel of `scaled_dot_product_attention` by GPU, dtype and shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.kernels import attention
from tests.estimate.fake_runs import MIB, allocations, estimated, peak

FLASH, EFFICIENT, CUDNN = (
    f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")
)


def attend(
    dtype: torch.dtype = torch.bfloat16, size: int = 64, heads: int = 8, key_heads: int = 8, **options: Any
) -> torch.Tensor:
    """Attend with batch 1 and length 1024: by default, query, key and value are 1 MiB each."""
    query = torch.randn(1, heads, 1024, size, dtype=dtype, device="cuda", requires_grad=True)
    key = torch.randn(1, key_heads, 1024, size, dtype=dtype, device="cuda", requires_grad=True)
    return F.scaled_dot_product_attention(query, key, key, **options)


def kernels(gpu: str | None, **options: Any) -> set[str]:
    done = estimated(lambda: attend(**options), gpu=gpu)
    return {name for name, _, _ in allocations(done) if "attention" in name}


@pytest.mark.parametrize(
    ("gpu", "kernel"), [("a100", FLASH), ("l4", FLASH), ("t4", None), ("h100", CUDNN), (None, FLASH)]
)
def test_half_precision_takes_what_the_gpu_has(gpu: str | None, kernel: str | None) -> None:
    assert kernels(gpu) == ({kernel} if kernel else set())


def test_float16_on_a_turing_gpu_takes_the_efficient_kernel() -> None:
    assert kernels("t4", dtype=torch.float16) == {EFFICIENT}


def test_float32_takes_the_efficient_kernel() -> None:
    assert kernels("a100", dtype=torch.float32) == {EFFICIENT}


def test_a_mask_rules_flash_out() -> None:
    def masked() -> torch.Tensor:
        return attend(attn_mask=torch.ones(1024, 1024, dtype=torch.bool, device="cuda"))

    done = estimated(masked, gpu="a100")
    assert EFFICIENT in {name for name, _, _ in allocations(done)}


@pytest.mark.parametrize(
    ("shape", "learned", "kernel"),
    [((1024, 1024), False, CUDNN), ((1, 1, 1024), False, EFFICIENT), ((1, 8, 1024, 1024), True, EFFICIENT)],
)
def test_a_learned_mask_and_one_of_three_dimensions_rule_cudnn_out(
    shape: tuple[int, ...], learned: bool, kernel: str
) -> None:
    def masked() -> torch.Tensor:
        mask = torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=learned)
        return attend(attn_mask=mask)

    done = estimated(masked, gpu="h100")
    assert kernel in {name for name, _, _ in allocations(done)}


def test_fewer_key_heads_rule_the_efficient_kernel_out() -> None:
    assert kernels("a100", key_heads=2, enable_gqa=True) == {FLASH}
    assert kernels("a100", key_heads=2, enable_gqa=True, dtype=torch.float32) == set()  # the math path


def test_newer_pytorch_takes_the_efficient_kernel_for_fewer_key_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its random state is on the GPU: two numbers of 8 bytes."""
    monkeypatch.setattr(attention, "RECENT", True)
    done = estimated(lambda: attend(dtype=torch.float32, key_heads=2, enable_gqa=True), gpu="a100")
    assert [size for name, size, _ in allocations(done) if name == EFFICIENT] == [8, 8, 2 * MIB, 8 * 1024 * 4]


def test_the_efficient_kernel_takes_the_flag_for_fewer_key_heads_if_there_are_none() -> None:
    assert kernels("a100", enable_gqa=True, dtype=torch.float32) == {EFFICIENT}


def test_heads_of_12_in_half_precision_are_not_aligned_for_tensor_cores() -> None:
    assert kernels("t4", size=12, dtype=torch.float16) == set()  # the math path


def test_heads_of_512_take_the_math_path_or_the_efficient_kernel() -> None:
    assert kernels("a100", size=512) == {EFFICIENT}


def test_odd_heads_are_padded_for_flash() -> None:
    done = estimated(lambda: attend(size=60), gpu="a100")
    assert [name for name, _, _ in allocations(done)].count("constant_pad_nd") == 3


def test_the_result_and_one_number_a_row_is_all_that_flash_keeps() -> None:
    """The result takes 1 MiB, the numbers 4 bytes for each of 8 x 1024 rows."""
    done = estimated(attend, gpu="a100")
    assert [size for name, size, _ in allocations(done) if name == FLASH][:2] == [MIB, 8 * 1024 * 4]


def test_without_the_correction_the_scores_are_held() -> None:
    """The scores take at least 16 MiB: 8 heads x 1024 x 1024 x 2 bytes."""
    corrected, plain = (peak(lambda: attend(dropout_p=0.1), gpu="a100", corrected=on) for on in (True, False))
    assert corrected < 4 * MIB
    assert plain > 16 * MIB


def passing(done: MemoryEstimator, kernel: str) -> list[int]:
    """Return the bytes of the temporary buffers of a kernel, in order."""
    found = allocations(done)
    return [size for name, size, kind in found if name == kernel and kind == "temporary"]


def test_flash_splits_the_keys_where_it_would_leave_processors_idle() -> None:
    """8 x 16 blocks are fewer than 0.8 x 216 slots. Four parts use 512 / 648 of them, one part 128 / 216.

    Each part has a number and 64 results for each of 8 x 1024 rows. With 16 heads nothing is split.
    """
    assert passing(estimated(attend, gpu="a100"), FLASH)[:2] == [4 * 8 * 1024 * 4, 4 * 8 * 1024 * 4 * 64]
    assert passing(estimated(lambda: attend(heads=16, key_heads=16), gpu="a100"), FLASH) == []


def test_dropout_replaces_the_random_state_of_flash() -> None:
    assert passing(estimated(lambda: attend(dropout_p=0.1), gpu="a100"), FLASH) == [16]


def test_the_backward_of_flash_copies_what_has_another_layout() -> None:
    """Its layout is (batch, length, heads, size); here a gradient and a result of 1 MiB each have another."""
    done = estimated(lambda: attend().backward(torch.empty_like(attend())), gpu="a100")
    copied = passing(done, f"{FLASH}_backward")
    assert copied == [MIB, MIB, 8 * 1024 * 4, 8 * 1024 * 4 * 64]


def test_the_random_state_of_the_efficient_kernel_is_on_the_cpu() -> None:
    done = estimated(lambda: attend(dtype=torch.float32), gpu="a100")
    assert [size for name, size, _ in allocations(done) if name == EFFICIENT] == [2 * MIB, 8 * 1024 * 4]


def test_the_efficient_kernel_sums_large_heads_of_half_precision_in_float32() -> None:
    done = estimated(lambda: masked(size=136), gpu="a100")
    assert passing(done, EFFICIENT) == [8 * 1024 * 136 * 4]


def masked(**options: Any) -> torch.Tensor:
    """Attend with a mask, which rules flash attention out."""
    mask = torch.zeros(1024, 1024, dtype=options.get("dtype", torch.bfloat16), device="cuda")
    return attend(**{**options, "attn_mask": mask})


TILE = 4 * (4 + 64 * 64)
"""A block of 64 queries and 64 keys: its sums, and 16 bytes for a lock and a counter."""


def test_the_backward_of_the_efficient_kernel_in_float32_has_products_sums_and_a_workspace() -> None:
    """2 MiB of products and two sums of a row, then a tile for each of 16 blocks of queries of 8 heads."""

    def train() -> None:
        result = attend(dtype=torch.float32)
        result.backward(torch.empty(1, 1024, 8, 64, device="cuda").transpose(1, 2))

    done = passing(estimated(train, gpu="a100"), f"{EFFICIENT}_backward")
    assert done == [2 * MIB, 32 * 1024, 32 * 1024, 8 * 16 * TILE]


@pytest.mark.parametrize(
    ("gpu", "size", "workspace"),
    [
        ("a100", 64, 8 * 16 * TILE),
        ("a100", 128, 8 * 8 * 4 * (4 + 128 * 128)),
        ("a100", 136, 8 * (8 * 3 * 4 * (4 + 128 * 64) + 16 * 64 * 4 * 2 * 256)),
        ("l4", 96, 8 * 8 * 2 * 4 * (4 + 128 * 64)),
        ("l4", 128, 8 * (16 * 2 * TILE + 16 * 64 * 4 * 2 * 128)),
    ],
)
def test_the_blocks_of_the_efficient_backward_are_those_that_fit(gpu: str, size: int, workspace: int) -> None:
    """Blocks of dQ; where dK and dV do not stay in registers, these too, for each of 16 parts of the keys."""
    done = passing(estimated(lambda: masked(size=size).sum().backward(), gpu=gpu), f"{EFFICIENT}_backward")
    assert done[-2:] == [8 * 1024 * 4, workspace]


def test_a_boolean_mask_is_converted_and_padded_to_rows_of_a_multiple_of_8() -> None:
    def with_mask() -> torch.Tensor:
        query = torch.randn(1, 8, 100, 64, dtype=torch.bfloat16, device="cuda")
        mask = torch.ones(100, 100, dtype=torch.bool, device="cuda")
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    found = [(name, size) for name, size, _ in allocations(estimated(with_mask, gpu="a100"))]
    made = found[found.index(("scalar_tensor", 2)) :]
    assert made[:4] == [("scalar_tensor", 2)] * 2 + [("where", 20_000), ("constant_pad_nd", 100 * 104 * 2)]


def test_the_math_path_adds_the_mask_in_place() -> None:
    def math() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return masked(dtype=torch.float32)

    names = [name for name, _, _ in allocations(estimated(math, gpu="a100"))]
    assert "bmm" in names
    assert "add" not in names


def test_the_math_path_converts_a_boolean_mask() -> None:
    def math() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(attn_mask=torch.ones(1024, 1024, dtype=torch.bool, device="cuda"))

    done = allocations(estimated(math, gpu="a100"))
    assert [size for name, size, _ in done if name == "where"] == [2 * MIB]


def test_the_backward_of_flash_holds_an_accumulator() -> None:
    """softmax_d takes 8 x 1024 x 4 bytes, dq_accum 64 times that."""
    done = estimated(lambda: attend().sum().backward(), gpu="a100")
    passing = [
        size for name, size, kind in allocations(done) if name.startswith(FLASH) and kind == "temporary"
    ]
    assert passing[-2:] == [8 * 1024 * 4, 8 * 1024 * 4 * 64]


def test_inference_takes_the_same_kernel() -> None:
    def infer() -> torch.Tensor:
        with torch.inference_mode():
            return attend()

    assert FLASH in {name for name, _, _ in allocations(estimated(infer, gpu="a100"))}


def test_the_program_may_forbid_kernels() -> None:
    def only(*backends: SDPBackend) -> Any:
        with sdpa_kernel(list(backends)):
            return attend()

    done = estimated(lambda: only(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH), gpu="a100")
    assert EFFICIENT in {name for name, _, _ in allocations(done)}
    with pytest.raises(MemPluginError, match="No allowed kernel"):
        estimated(lambda: only(SDPBackend.FLASH_ATTENTION), gpu="t4")


def test_the_program_may_order_kernels() -> None:
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]

    def ordered() -> torch.Tensor:
        with sdpa_kernel(order, set_priority=True):
            return attend()

    assert EFFICIENT in {name for name, _, _ in allocations(estimated(ordered, gpu="a100"))}


def test_masked_softmax_looks_for_rows_without_a_score() -> None:
    """On a Turing GPU: 8 x 1024 x 1024 float32 scores, a byte for each and each row, and a 0."""

    def masked() -> torch.Tensor:
        return attend(attn_mask=torch.zeros(1024, 1024, dtype=torch.bfloat16, device="cuda"))

    found = [size for name, size, _ in allocations(estimated(masked, gpu="t4")) if name == "_safe_softmax"]
    assert found == [32 * MIB, 8 * MIB, 8 * 1024, 4]
