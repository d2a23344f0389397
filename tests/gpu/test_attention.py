"""Attention takes on the GPU what the estimator says, and the kernel that it says: see test_operators.py.

As an H100 or a B200 this is cuDNN's kernel. On the stand-in (docs/gpu.md) it runs with
STANDIN_CUDNN_WORKSPACES=1, which has the real cuDNN choose its kernels.
"""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.attention import AttentionCall, kernel
from tests.gpu.test_operators import Figures, figures

VARIABLE = "STANDIN_CUDNN_WORKSPACES"
HALVES = (torch.bfloat16, torch.float16)
KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Names of the values of torch.nn.attention.SDPBackend."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "(batch, length, heads, size)": {"transposed": True},
    "float16": {"dtype": torch.float16},
    "dropout": {"dropout": 0.5},
    "dropout, causal": {"dropout": 0.125, "causal": True},
    "dropout that cuDNN does not know": {"dropout": 0.1},
    "boolean mask": {"mask": "boolean"},
    "mask of rows": {"mask": (256, 256)},
    "mask of keys": {"mask": (2, 1, 1, 256)},
    "mask of all heads": {"mask": (2, 4, 256, 256)},
    "two key heads": {"key_heads": 2},
    "one key head, causal": {"key_heads": 1, "causal": True},
    "two key heads, transposed": {"key_heads": 2, "transposed": True},
    "one key head, boolean mask": {"key_heads": 1, "mask": "boolean"},
    "two key heads, dropout": {"key_heads": 2, "dropout": 0.5},
    "heads of 128": {"size": 128, "value_size": 128},
    "heads of 40": {"size": 40, "value_size": 40},
    "heads of 72 and 64": {"size": 72},
    "heads of 64 and 128, transposed": {"value_size": 128, "transposed": True},
    "heads of 192 and 128": {"size": 192, "value_size": 128},
    "heads of 192 and 128, two key heads": {"size": 192, "value_size": 128, "key_heads": 2},
    "float32": {"dtype": torch.float32},
    "float32, two key heads": {"dtype": torch.float32, "key_heads": 2},
    "heads of 256": {"size": 256, "value_size": 256},
    "other keys": {"queries": 200, "keys": 300},
    "other keys, transposed": {"queries": 200, "keys": 300, "transposed": True},
    "100 rows": {"queries": 100, "keys": 100},
    "100 rows, dropout": {"queries": 100, "keys": 100, "dropout": 0.5},
    "three queries": {"queries": 3},
    "one query": {"queries": 1},
    "two keys": {"keys": 2},
    "64 keys, two heads": {"queries": 512, "keys": 64, "key_heads": 2},
    "gradient of another layout": {"gradient": "transposed"},
    "expanded gradient": {"gradient": "expanded"},
    "gradient of columns": {"gradient": "columns"},
    "inference": {"learns": False},
    "inference, dropout": {"learns": False, "dropout": 0.5},
    "inference, boolean mask": {"learns": False, "mask": "boolean"},
    "inference of one query": {"learns": False, "queries": 1},
    "32 heads, as in Llama-7B": {
        "heads": 32,
        "key_heads": 32,
        "size": 128,
        "value_size": 128,
        "causal": True,
    },
}


def tensor(shape: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    batch, heads, length, size = shape
    if not transposed:
        return torch.empty(shape, dtype=dtype, device="cuda")
    return torch.empty(batch, length, heads, size, dtype=dtype, device="cuda").transpose(1, 2)


def train(
    measure: Any,
    *,
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 4,
    queries: int = 256,
    keys: int = 256,
    size: int = 64,
    value_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    dropout: float = 0.0,
    mask: Any = None,
    transposed: bool = False,
    gradient: str = "alike",
    learns: bool = True,
) -> list[Figures]:
    """Return the figures of forward and, if it learns, backward."""
    shapes = ((heads, queries, size), (key_heads, keys, size), (key_heads, keys, value_size))
    tensors = [tensor((batch, *shape), dtype, transposed).requires_grad_(learns) for shape in shapes]
    if mask == "boolean":
        mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device="cuda")
    elif mask is not None:
        mask = torch.zeros(mask, dtype=dtype, device="cuda")

    def forward() -> torch.Tensor:
        query, key, value = tensors
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal, enable_gqa=heads != key_heads
        )

    result, figures = measure(forward)
    if not learns:
        return [figures]
    shape = tuple(result.shape)
    given = {
        "alike": lambda: torch.empty_like(result),
        "transposed": lambda: tensor(shape, dtype, transposed=True),
        "expanded": lambda: torch.ones((), dtype=dtype, device="cuda").expand(shape),
        "columns": lambda: torch.empty(*shape[:2], *shape[:1:-1], dtype=dtype, device="cuda").transpose(2, 3),
    }[gradient]()
    return [figures, measure(lambda: torch.autograd.grad(result, tensors, given))[1]]


def this_gpu() -> GpuSpec:
    try:
        return GpuSpec.named(torch.cuda.get_device_name())
    except MemPluginError:
        pytest.skip("the number of this GPU's processors is not known")


@pytest.mark.parametrize("case", CASES)
def test_an_attention_takes_what_the_estimate_says(case: str) -> None:
    gpu = this_gpu()
    silent = "standin" in os.environ.get("LD_PRELOAD", "") and os.environ.get(VARIABLE) != "1"
    if silent and gpu.sdpa_order[0] == "cudnn":
        pytest.skip(f"the stand-in's cuDNN has attention only with {VARIABLE}=1")
    with MemoryEstimator(gpu=gpu):
        estimated = train(figures, **CASES[case])
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert train(figures, **CASES[case]) == estimated


def test_the_kernel_of_2000_random_attentions_is_the_one_that_pytorch_chooses() -> None:
    gpu, chance = this_gpu(), random.Random(0)
    for _ in range(2000):
        batch, heads = chance.choice([1, 3]), chance.choice([1, 4, 8])
        key_heads = chance.choice([heads, heads, 1])
        queries, size = (
            chance.choice([1, 2, 64, 300]),
            chance.choice([8, 12, 40, 64, 128, 136, 192, 256, 264]),
        )
        keys, value_size = chance.choice([queries, 1, 100]), chance.choice([size, size, 64, 128])
        dtype, learns = chance.choice([*HALVES, torch.float32]), chance.random() < 0.5
        causal, dropout = chance.random() < 0.3, chance.choice([0.0, 0.1, 0.125, 0.5])
        shapes = ((heads, queries, size), (key_heads, keys, size), (key_heads, keys, value_size))
        tensors: list[Any] = [
            tensor((batch, *shape), dtype, chance.random() < 0.5).requires_grad_(learns) for shape in shapes
        ]
        kinds = [(queries, keys), (batch, 1, 1, keys), (heads, queries, keys)]
        shape = None if causal else chance.choice([None, None, *kinds])
        mask = None if shape is None else torch.empty(shape, dtype=dtype, device="cuda")
        grouped = chance.random() < 0.1 or heads != key_heads
        query, key, value = tensors
        chosen = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped)
        call = AttentionCall(query, key, value, mask, dropout, causal, grouped, gpu)
        assert kernel(call) == KERNELS[chosen], call
