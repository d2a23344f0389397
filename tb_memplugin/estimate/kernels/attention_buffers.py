"""What the kernels of `scaled_dot_product_attention` allocate besides their results.

Sources: mha_fwd and mha_bwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp for flash
attention; attention.cu, attention_backward.cu and mem_eff_attention/kernel_backward.h beside it for the
efficient kernel. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.attention_kernels import RECENT
from tb_memplugin.estimate.kernels.reductions import ANY_GPU
from tb_memplugin.estimate.run.fake_ledger import Block
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.trace import Category

aten = torch.ops.aten

_MOST_SPLITS = 128
_KEPT_IN_REGISTERS = 128
"""Up to this head dimension, the efficient kernel's forward needs no buffer for its sums."""

_LARGE_SHARED = 160 << 10
"""Shared memory with which the largest blocks of the efficient kernel's backward fit."""

_BLOCKS_TO_FILL = 200
"""The number of blocks that the efficient kernel's backward aims at when it splits the keys."""


def buffer_rules(gpu: GpuSpec | None) -> dict[Any, Rule]:
    """Return rules for the kernels' operators, forward and backward, on a GPU."""
    buffers = _Buffers(gpu or ANY_GPU)
    return {
        aten._scaled_dot_product_flash_attention.default: buffers.flash,
        aten._scaled_dot_product_flash_attention_backward.default: buffers.flash_backward,
        aten._scaled_dot_product_efficient_attention.default: buffers.efficient,
        aten._scaled_dot_product_efficient_attention_backward.default: buffers.efficient_backward,
    }


@dataclass(frozen=True, slots=True)
class _Buffers:
    gpu: GpuSpec

    def flash(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record partial results where the keys are split, and the random state that dropout replaces."""
        results = mode.quietly(func, *args, **kwargs)
        out, sums, random, unused = results[0], results[1], results[6], results[7]
        dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
        mode.see((out, sums), func)
        splits = 1 if dropout else self._splits(args[0], args[1])
        rows = 4 * splits * sums.numel()
        sizes = [rows, rows * _wide(args[0].shape[-1])] if splits > 1 else []
        partial = [_allocate(mode, func, out, size) for size in sizes]
        with _allocated(mode, func, out, [random.untyped_storage().nbytes()] if dropout else []):
            mode.see((unused, random) if dropout else (random, unused), func)
        for block in partial:
            mode.ledger.free(block, mode.layers.scope())
        return results

    def flash_backward(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record contiguous copies, softmax_d and dq_accum; with fewer key heads, dk and dv for all heads."""
        gradient, query, key, _, out = args[:5]
        batch, heads, length, size = query.shape
        rows = 4 * batch * heads * _up(length, 128)
        sums = -(-self.gpu.processors // (batch * heads)) if _deterministic() else 1
        sizes = [rows, sums * rows * _wide(size)]
        if key.shape[1] != heads:
            sizes += [batch * key.shape[2] * heads * size * query.element_size()] * 2
        with _allocated(mode, func, query, [_copy(tensor) for tensor in (gradient, out)]):
            results = mode.quietly(func, *args, **kwargs)
            mode.see(results, func)
            with _allocated(mode, func, query, sizes):
                return results

    def efficient(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record the buffer for sums of large heads, and the random state if it is on the GPU.

        It is on the CPU with dropout, and before PyTorch 2.14.
        """
        out, sums, *_ = mode.quietly(func, *args, **kwargs)
        dropout = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
        state: list[Any] = []
        if RECENT and not dropout:
            state = [mode.quietly(aten.new_empty.default, out, [], dtype=torch.int64) for _ in range(2)]
        mode.see((*state, out, sums), func)
        query, value = args[0], args[2]
        large = max(query.shape[-1], value.shape[-1]) > _KEPT_IN_REGISTERS
        with (
            _allocated(mode, func, query, [4 * out.numel()] if large and query.element_size() < 4 else []),
            mode,
        ):
            return (out, sums, *(state or [torch.empty((), dtype=torch.int64) for _ in range(2)]))

    def efficient_backward(
        self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Record the copy of the gradient, delta (a sum for each row) and the workspace.

        With fewer key heads, also dk and dv for all heads.
        """
        gradient, query, key, value = args[:4]
        rows = query.shape[:2].numel() * key.shape[2] * query.element_size()
        expanded = (
            [rows * tensor.shape[3] for tensor in (key, value)] if key.shape[1] != query.shape[1] else []
        )
        blocks = _Blocks.of(self.gpu, query, value, dropout=bool(args[9]))
        products = 4 * gradient.numel()
        sums = 4 * query.shape[:3].numel()
        alike = query.shape[1] == 1 or query.shape[2] == 1  # then no copy is needed to transpose the sums
        with _allocated(mode, func, query, [_copy(gradient)]):
            results = mode.quietly(func, *args, **kwargs)
            mode.see(results, func)
            with _allocated(mode, func, query, expanded):
                if blocks.computes_delta:
                    delta = _allocate(mode, func, query, sums)
                else:
                    passing = [products] * (3 if query.element_size() < 4 else 1) + ([] if alike else [sums])
                    with _allocated(mode, func, query, passing):
                        delta = _allocate(mode, func, query, sums)
                workspace = _allocate(mode, func, query, blocks.workspace(query, key, value))
                for block in (delta, workspace):
                    mode.ledger.free(block, mode.layers.scope())
        return results

    def _splits(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """Return into how many parts flash attention splits the keys (num_splits_heuristic).

        It takes the fewest whose use of the processors is at least 85 % of the best.
        """
        batch, heads, length, size = query.shape
        if length == 1 and heads > key.shape[1]:  # query heads that share a key head become rows
            length, heads = heads // key.shape[1], key.shape[1]
        keys = -(-key.shape[2] // (256 if size <= 64 else 128 if size <= 128 else 64))
        blocks, slots = batch * heads * -(-length // 64), 2 * self.gpu.processors
        if blocks >= 0.8 * slots:
            return 1
        used = {}
        for count in range(1, min(_MOST_SPLITS, slots, keys) + 1):
            if count == 1 or -(-keys // count) != -(-keys // (count - 1)):
                waves = blocks * count / slots
                used[count] = waves / -(-blocks * count // slots)
        return next(count for count, share in used.items() if share >= 0.85 * max(used.values()))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How the efficient kernel's backward divides its work: blocks of `rows` queries and `columns` keys.

    `in_registers`: the gradients of key and value need no workspace.
    """

    rows: int
    columns: int
    in_registers: bool
    computes_delta: bool

    @classmethod
    def of(cls, gpu: GpuSpec, query: torch.Tensor, value: torch.Tensor, *, dropout: bool) -> _Blocks:
        """Return the blocks of the first kernel that fits (mem_eff_attention/kernels/cutlassB.h)."""
        size, half = max(query.shape[-1], value.shape[-1]), query.element_size() < 4
        large, old = gpu.shared_bytes >= _LARGE_SHARED, gpu.compute_capability < (8, 0)
        if size <= 64:
            rows, columns, most = 64, 64, 64
        elif not half:
            rows, columns, most = (128 if large else 64), 64, 0
        elif size > 128:
            rows, columns, most = 128, 64, 0
        elif old or large:
            rows, columns, most = 128, 64 if old else 128, 128
        elif size <= 96 and not dropout and gpu.compute_capability in ((8, 6), (8, 9)):
            rows, columns, most = 128, 64, 96
        else:
            rows, columns, most = 64, 64, 0
        in_registers = half and bool(most)
        computes = half and (in_registers or gpu.compute_capability != (7, 0))
        return cls(rows, columns, in_registers or not half, computes)

    def workspace(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
        """Return the bytes of the workspace: a tile and 16 bytes for each block of dQ, and dK and dV."""
        pairs = query.shape[:2].numel()
        tiles = -(-query.shape[2] // self.rows) * -(-query.shape[3] // self.columns)
        floats = tiles * (4 + self.rows * self.columns)
        if not self.in_registers:
            splits = max(min(-(-key.shape[2] // self.columns), _BLOCKS_TO_FILL // pairs), 1)
            splits = 1 if _deterministic() else splits
            sizes = (query.shape[3], value.shape[3])
            floats += splits * self.columns * sum(_up(size, self.rows) for size in sizes)
        return 4 * pairs * _up(floats, 4)


@contextmanager
def _allocated(mode: CountingFakeMode, func: Any, beside: Any, sizes: Sequence[int]) -> Iterator[None]:
    """Hold buffers on the device of a tensor inside this context; the last is freed first."""
    blocks = [_allocate(mode, func, beside, size) for size in sizes if size]
    yield
    for block in reversed(blocks):
        mode.ledger.free(block, mode.layers.scope())


def _allocate(mode: CountingFakeMode, func: Any, beside: Any, size: int) -> Block:
    row = mode.ledger.device_row(beside.fake_device)
    return mode.allocate(size, func, mode.layers.scope(), Category.TEMPORARY, row)


def _copy(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy in the kernels' layout (batch, length, heads, size); 0 if there is none."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()


def _deterministic() -> bool:
    """Whether kernels must be deterministic."""
    return torch.are_deterministic_algorithms_enabled()


def _wide(size: int) -> int:
    """Return the head dimension as flash attention rounds it."""
    return _up(size, 32 if size <= 128 else 64)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
