"""What `sort`, `argsort`, `topk` and `randperm` allocate on a GPU, and CUB's radix sort, which they use.

Sources in aten/src/ATen/native/cuda: Sort.cpp, SortStable.cu, TensorTopK.cpp, TensorTopK.cu, Randperm.cu. Of
CUB: cub/device/dispatch/dispatch_radix_sort.cuh (InvokeOnesweep, InvokePasses, InvokeSingleTile) and
tuning/tuning_radix_sort.cuh of CUDA 13.0. PyTorch counts elements in 64 bits there.
"""

from __future__ import annotations

from math import ceil, log, log2

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel, copied_bytes, operators

_SMALL = 4096
"""Rows of up to this many elements are sorted in place (should_use_small_sort)."""

_INDEX = 8
"""Bytes of an index, and of a pair of indices in 32 bits."""

_SCAN = 1279
"""Bytes with which CUB sums the few numbers of `topk` by keys."""

_SEVERAL_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""For up to so many rows, rows from this length on are divided among blocks (should_use_multiblock)."""

_LONG_FOR_ANY = 400


def _sort(call: Call) -> Buffers:
    tensor = call["self"]
    return _sorting(tensor, call["dim"], call.out[0], call.gpu) if tensor.dim() else ()


def _sorting(tensor: torch.Tensor, along: int, values: torch.Tensor, gpu: GpuSpec) -> Buffers:
    """Return what the kernel holds besides `values` and their indices."""
    row, size, count = tensor.shape[along], tensor.element_size(), tensor.numel()
    if row <= _SMALL:
        return [_INDEX * row]
    copied = not (torch.ops.aten.is_non_overlapping_and_dense.default(tensor) and tensor.stride(along) == 1)
    apart = values.stride(along) != 1
    before = [count * size * copied, count * size * apart, count * _INDEX * apart]
    rows = count // row
    if rows == 1 or row >= 1_000_000:
        return [*before, [_INDEX * row, sort_bytes(row, size, _INDEX, gpu)]]
    if rows >= 128:
        return [*before, [_INDEX * count, segmented_sort_bytes(count, size, _INDEX)]]
    by_value = [count * size, sort_bytes(count, size, _INDEX, gpu)]
    by_row = [sort_bytes(count, 8, 0, gpu, bits=max(1, ceil(log2(rows))))]
    return [*before, *[_INDEX * count] * 2, by_value, by_row]


def _topk(call: Call) -> Buffers:
    tensor, along, (values, indices) = call["self"], call["dim"], call.out
    if not tensor.dim():
        return ()
    row = tensor.shape[along]
    buffers: Buffers = [
        copied_bytes(tensor),
        _selected(tensor.numel() // row, row, tensor.element_size(), call.gpu),
    ]
    if not call["sorted"] or values.shape[along] <= _SMALL:
        return [buffers]
    ordered = [_INDEX * indices.numel()]
    held = [indices.nbytes, values.nbytes]
    return [buffers, [*held, _sorting(values, along, values, call.gpu), ordered]]


def _selected(rows: int, row: int, size: int, gpu: GpuSpec) -> list[int]:
    """Return the buffers with which several blocks look for the largest elements of long rows."""
    least = next((length for most, length in _SEVERAL_BLOCKS if rows <= most), _LONG_FOR_ANY)
    if row < least:
        return []
    at_once = gpu.processors * 6 * 256  # six blocks of 256 threads have registers
    blocks = -(-row // (256 * max(4, min(-(-rows * row // at_once), 64))))
    counts = [rows * blocks * 256 * 2, rows * 256 * 4, rows * blocks * 4, rows * blocks * 4]
    return [rows * size, rows * 8, rows * 2 * max(4, size), *counts, _SCAN]


def _permutation(call: Call) -> Buffers:
    count, size = call.out.numel(), call.out.element_size()
    if count == 1:
        return ()
    bits = min(64, ceil(log2(count - (6 * count**2 + 1) / (12 * log(0.9)))))
    key = 4 if bits <= 32 else 8
    return [count * size, count * key, count * key, sort_bytes(count, key, size, call.gpu, bits)]


_DIGIT_BITS, _DIGITS = 8, 256
"""One pass of the onesweep algorithm sorts by so many bits; it counts so many digits."""

_OFFSET, _COUNTER = 8, 4
"""Bytes of an offset into all elements, and of a counter within one portion of them."""

_PORTION = (1 << 28) - 1
"""The most elements of one portion."""

_TINY = {1: 5, 2: 7}
"""By bytes of a key: the bits of a pass of the older algorithm, for short keys before Hopper."""

_SMALL_ON_HOPPER = {(1, 4): (512, 14), (1, 8): (384, 18), (2, 4): (512, 12), (2, 8): (512, 23)}
"""By bytes of key and value: threads, and 4-byte items of each (sm90_small_key_tuning, 64-bit offsets)."""


def sort_bytes(count: int, key: int, value: int, gpu: GpuSpec, bits: int | None = None) -> int:
    """Return the bytes of temporary storage to sort `count` pairs.

    Args:
        count: how many there are; at least 1.
        key: bytes of a key.
        value: bytes of a value, 0 if keys alone are sorted.
        bits: the bits of a key that are sorted by; None for all.
    """
    if count <= 256 * _items(19, key, value):  # one block sorts them
        return 1
    keys, values = count * key, count * value
    if key < 4 and gpu.compute_capability < (9, 0):
        # An occupancy as if threads were all that limits it: registers may allow fewer blocks.
        blocks = gpu.processors * (gpu.threads // (128 if key == 1 else 256)) * 5
        return _together(((blocks << _TINY[key]) + 512 * 11) * _OFFSET, keys, values)
    tile = _tile(key, value, gpu)
    portion = _PORTION // tile * tile
    passes, portions = -(-(bits or 8 * key) // _DIGIT_BITS), -(-count // portion)
    lookback = -(-min(count, portion) // tile) * _DIGITS * _COUNTER
    counters = portions * passes
    several = passes > 1
    return _together(
        counters * _DIGITS * _OFFSET, lookback, keys * several, values * several, counters * _COUNTER
    )


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """Return the bytes of temporary storage to sort pairs in many short segments."""
    return _together(count * key, count * value)


def _together(*sizes: int) -> int:
    """Return the bytes of several buffers in one, each at a multiple of 256 (AliasTemporaries)."""
    return sum(-(-size // 256) * 256 for size in sizes) + 255


def _tile(key: int, value: int, gpu: GpuSpec) -> int:
    """Return how many elements one block sorts."""
    width, nominal = 384, 21
    if gpu.compute_capability < (8, 0):
        width, nominal = 256, 46 if key == value == 4 else 23
    elif gpu.compute_capability < (9, 0):
        nominal = 17 if key == 4 and value else 21
    elif key < 4:
        width, nominal = _SMALL_ON_HOPPER.get((key, value), (384, 23))
    elif key == 4:
        nominal = (17 if value < 8 else 29) if value else 19
    else:
        nominal = 30 if value < 8 else 24
    return width * _items(nominal, key, value)


def _items(nominal: int, key: int, value: int) -> int:
    """Return how many elements a thread sorts where it would sort `nominal` of 4 bytes (RegBoundScaling)."""
    return max(1, nominal * 4 // max(4, key, value))


KERNELS = (
    Kernel(operators("sort", "sort.stable"), _sort, source="cuda/Sort.cpp:sort_cuda_kernel"),
    Kernel(operators("topk"), _topk, source="cuda/TensorTopK.cpp:topk_out_cuda"),
    Kernel(operators("randperm"), _permutation, source="cuda/Randperm.cu:randperm_out_cuda"),
)
