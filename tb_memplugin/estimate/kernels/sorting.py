"""Record what sorting allocates on a GPU: `sort`, `argsort`, `topk`, `randperm`.

Sources in aten/src/ATen/native/cuda: Sort.cpp, SortStable.cu, TensorTopK.cpp, TensorTopK.cu, Randperm.cu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log, log2, prod
from typing import Any

import torch

from tb_memplugin.estimate.kernels.radix_sort import segmented_sort_bytes, sort_bytes
from tb_memplugin.estimate.kernels.reductions import ANY_GPU
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.trace import Category

aten = torch.ops.aten

_SMALL = 4096
"""Rows of up to this many elements are sorted in place (should_use_small_sort)."""

_INDEX = 8
"""Bytes of an index, and of a pair of indices in 32 bits."""

_SCAN = 1279
"""Bytes with which CUB sums the few numbers of `topk` by keys."""

_SEVERAL_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""For up to so many rows, rows from this length on are divided among blocks (should_use_multiblock)."""

_LONG_FOR_ANY = 400


class Sorting(Correction):
    """Records copies, indices and the temporary storage of radix sort."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for each operator; its results are torch's own."""
        return {
            aten.sort.default: self._sort,
            aten.sort.stable: self._sort,
            aten.topk.default: self._topk,
            aten.randperm.default: self._permutation,
        }

    def _sort(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        out = mode.quietly(func, *args, **kwargs)
        tensor = args[0]
        if tensor.device.type == "cuda" and tensor.dim() and tensor.numel():
            mode.see(out, func)
            along = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            self._record(mode, func, tensor, along, out[0])
        return out

    def _record(self, mode: CountingFakeMode, func: Any, tensor: Any, along: int, values: Any) -> None:
        """Record what the kernel holds besides `values` and their indices."""
        row, size, count = tensor.shape[along], tensor.element_size(), tensor.numel()
        if row <= _SMALL:
            _pass(mode, func, tensor, [_INDEX * row])
            return
        copied = not (_is_dense(tensor) and tensor.stride(along) == 1)
        apart = values.stride(along) != 1
        before = [count * size * copied, count * size * apart, count * _INDEX * apart]
        gpu, rows = self.target.gpu or ANY_GPU, count // row
        if rows == 1 or row >= 1_000_000:
            kernels = [[_INDEX * row, sort_bytes(row, size, _INDEX, gpu)]]
        elif rows < 128:
            before += [_INDEX * count] * 2
            kernels = [
                [count * size, sort_bytes(count, size, _INDEX, gpu)],
                [sort_bytes(count, 8, 0, gpu, bits=max(1, ceil(log2(rows))))],
            ]
        else:
            kernels = [[_INDEX * count, segmented_sort_bytes(count, size, _INDEX)]]
        _pass(mode, func, tensor, before, *kernels)

    def _topk(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        out = mode.quietly(func, *args, **kwargs)
        tensor = args[0]
        if tensor.device.type != "cuda" or not tensor.dim() or not out[0].numel():
            return out
        mode.see(out, func)
        along = args[2] if len(args) > 2 else -1
        row, size = tensor.shape[along], tensor.element_size()
        copy = 0 if tensor.is_contiguous() else tensor.numel() * size
        _pass(mode, func, tensor, [copy], self._selected(tensor.numel() // row, row, size))
        in_order = args[4] if len(args) > 4 else True
        if in_order and out[0].shape[along] > _SMALL:
            values, indices = out[0], out[1]
            blocks = [_allocate(mode, func, result) for result in (indices, values)]
            self._record(mode, func, values, along, values)
            _pass(mode, func, tensor, [indices.numel() * _INDEX])
            for block in reversed(blocks):
                mode.ledger.free(block, mode.layers.scope())
        return out

    def _selected(self, rows: int, row: int, size: int) -> list[int]:
        """Return the buffers with which several blocks look for the largest elements of long rows."""
        least = next((length for most, length in _SEVERAL_BLOCKS if rows <= most), _LONG_FOR_ANY)
        if row < least:
            return []
        gpu = self.target.gpu or ANY_GPU
        at_once = gpu.processors * 6 * 256  # six blocks of 256 threads have registers
        blocks = -(-row // (256 * max(4, min(-(-rows * row // at_once), 64))))
        counts = [rows * blocks * 256 * 2, rows * 256 * 4, rows * blocks * 4, rows * blocks * 4]
        return [rows * size, rows * 8, rows * 2 * max(4, size), *counts, _SCAN]

    def _permutation(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        out = mode.quietly(func, *args, **kwargs)
        count = out.numel()
        if out.device.type == "cuda" and count > 1:
            mode.see([out], func)
            bits = min(64, ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9)))))
            key, size = 4 if bits <= 32 else 8, out.element_size()
            temporary = sort_bytes(count, key, size, self.target.gpu or ANY_GPU, bits)
            _pass(mode, func, out, [count * size, count * key, count * key, temporary])
        return out


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements fills its memory without gaps."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()


def _allocate(mode: CountingFakeMode, func: Any, like: torch.Tensor) -> Any:
    size, row = prod(like.shape) * like.element_size(), mode.ledger.device_row(like.device)
    return mode.allocate(size, func, mode.layers.scope(), Category.TEMPORARY, row)


def _pass(
    mode: CountingFakeMode, func: Any, like: torch.Tensor, before: Sequence[int], *kernels: list[int]
) -> None:
    """Record what is held all along, and what kernels allocate and free one after the other meanwhile."""
    scope, row = mode.layers.scope(), mode.ledger.device_row(like.device)
    blocks = [mode.allocate(size, func, scope, Category.TEMPORARY, row) for size in before if size]
    for sizes in kernels:
        mode.passing(sizes, func, scope, row)
    for block in reversed(blocks):
        mode.ledger.free(block, scope)
