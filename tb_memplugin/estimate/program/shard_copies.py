"""The copies of FSDP2 between gathered memory and parameters: their kernels read addresses from the GPU.

Both kernels get one tensor of int64 with an address for each parameter, its size, and the number of the
parameter that each block of threads copies. It is freed at once. Gradients in a dtype for which there is no
kernel are padded first. Source: TensorShape.cu (split_with_sizes_copy_out_cuda_contiguous_no_cast and
get_chunk_cat_metadata; pack_vecs packs the numbers), TensorShape.cpp (_pad_chunk).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule

_BLOCK = 128
"""Threads of a block (BLOCK_SIZE)."""

_TILE = 16 * _BLOCK
"""Bytes that a block copies at once (TILE_SIZE)."""

_NUMBER = 8

_CATS = ("chunk_cat", "chunk_cat_mixed_dtype")
"""The operators that copy gradients together: until 2.14, and since 2.15 (one kernel for each dtype)."""


def rules(gpu: GpuSpec | None) -> dict[Any, Rule]:
    """Return a rule for each of the two operators. Without a GPU's name, an A100 is assumed."""
    importlib.import_module("torch.distributed.fsdp")  # the import defines them
    gpu = gpu or GpuSpec.named("a100")
    most_blocks = 2 * gpu.processors * gpu.threads // _BLOCK

    def split(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        gathered, sizes = args[:2]
        mode.quietly(func, *args, **kwargs)
        element = gathered.element_size()
        numbers = _split_numbers([size * element for size in sizes], gathered.shape[0], most_blocks)
        mode.passing([_NUMBER * numbers], func, mode.layers.scope())

    def cat(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        gradients, _, ranks = args[:3]
        mode.quietly(func, *args, **kwargs)
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            mode.passing(_cat_buffers(alike, ranks, kwargs["out"]), func, mode.layers.scope())

    operators = torch.ops.fsdp
    cats = [getattr(operators, name) for name in _CATS if hasattr(operators, name)]
    return {operators.split_with_sizes_copy.default: split, **{packet.default: cat for packet in cats}}


def _split_numbers(shards: Sequence[int], ranks: int, most_blocks: int) -> int:
    """Return how many numbers the kernel needs that copies gathered shards (bytes each) to parameters."""
    blocks = sum(-(-size // _TILE) for size in shards)
    more = -(-blocks * ranks // most_blocks)  # how much more each thread has to copy
    rounds = -(-more // min(math.ceil(math.sqrt(more)), ranks))
    return 4 * len(shards) + 1 + sum(-(-size // (_TILE * rounds)) for size in shards)


def _cat_buffers(gradients: Sequence[torch.Tensor], ranks: int, out: torch.Tensor) -> list[int]:
    """Return the bytes that gradients need while they are copied together: numbers, or padded copies."""
    rows = [-(-gradient.shape[0] // ranks) for gradient in gradients]  # of each rank, the last one's padded
    if not _has_kernel(gradients[0].dtype, out.dtype):
        both = zip(gradients, rows, strict=True)
        return [
            ranks * n * _row(gradient) * gradient.element_size()
            for gradient, n in both
            if gradient.shape[0] % ranks
        ]
    parts = [n * _row(gradient) * out.element_size() for gradient, n in zip(gradients, rows, strict=True)]
    return [_NUMBER * (6 * len(parts) + 2 + sum(-(-size // _TILE) for size in parts))]


def _row(gradient: torch.Tensor) -> int:
    return math.prod(gradient.shape[1:])


def _has_kernel(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or (source, target) == (torch.bfloat16, torch.float32)
