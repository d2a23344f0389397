"""The buffers in which thread blocks of a reduction kernel exchange partial results.

A GPU divides a reduction with many inputs for each output among blocks. They write partial results into one
buffer and count in another. Sources: aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig,
global_memory_size, semaphore_size), and aten/src/ATen/TensorIterator.cpp for the order of dimensions
(reorder_dimensions, coalesce_dimensions).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec

_FEWEST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread reduces: min_values_per_thread and max_values_per_thread."""

_VECTOR = 4
"""The most elements that a thread loads at once."""

_WARP, _BLOCK = 32, 512
"""Threads of a warp, and of the largest block for results of up to 8 bytes."""

_LARGEST = 2**31 - 1
"""The largest offset in bytes that a kernel indexes: larger reductions are halved."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and dtype of a tensor, and its strides and offset in elements."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return that of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, int(tensor.storage_offset()))

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Return that of a contiguous tensor."""
        return cls(shape, [prod(shape[row + 1 :]) for row in range(len(shape))], dtype)


@dataclass(slots=True)
class _Dimension:
    """A dimension of the iteration; strides in elements, that of the output is 0 if it is reduced."""

    size: int
    out: int
    given: int


def reduction_buffers(given: Layout, reduced: Collection[int], partial: int, gpu: GpuSpec) -> list[list[int]]:
    """Return the sizes in bytes of the buffers of each kernel that a reduction starts, in order.

    Args:
        given: what is reduced.
        reduced: the dimensions that are reduced, each from 0 on.
        partial: bytes of a partial result (`arg_t`).
        gpu: the GPU that reduces it.
    """
    if not given.shape or not prod(given.shape):
        return []
    kernels = _halved(_dimensions(given, reduced), given.dtype.itemsize)
    return [_of_kernel(one, given, partial, gpu) for one in kernels]


def _dimensions(given: Layout, reduced: Collection[int]) -> list[_Dimension]:
    """Return the dimensions, reduced ones first, each group from the fastest on, with neighbours joined."""
    kept = [size for row, size in enumerate(given.shape) if row not in reduced]
    steps = iter([prod(kept[row + 1 :]) for row in range(len(kept))])
    whole = [
        _Dimension(size, 0 if row in reduced else next(steps), given.strides[row])
        for row, size in enumerate(given.shape)
    ]
    order: list[_Dimension] = []
    for one in reversed(whole):
        at = len(order)
        for row in range(len(order) - 1, -1, -1):
            comparison = _comes_after(order[row], one)
            if comparison < 0:
                break
            if comparison > 0:
                at = row
        order.insert(at, one)
    return _joined(order)


def _comes_after(first: _Dimension, second: _Dimension) -> int:
    """Return 1 if the first dimension belongs after the second, -1 if before, 0 if that is open."""
    if (first.out == 0) != (second.out == 0):
        return 1 if second.out == 0 else -1
    for left, right in ((first.out, second.out), (first.given, second.given)):
        if left == 0 or right == 0:
            continue
        if left != right:
            return 1 if left > right else -1
        if first.size > second.size:
            return 1
    return 0


def _joined(order: list[_Dimension]) -> list[_Dimension]:
    found = order[:1]
    for one in order[1:]:
        last = found[-1]
        alike = last.size * last.out == one.out and last.size * last.given == one.given
        if last.size == 1:
            found[-1] = one
        elif one.size == 1 or alike:
            last.size *= one.size
        else:
            found.append(one)
    return found


def _halved(dimensions: list[_Dimension], element: int) -> list[list[_Dimension]]:
    """Return the iterations into which one is divided until 32 bits can index each (with_32bit_indexing)."""
    extents = [(one.size - 1) * max(one.given, one.out) * element for one in dimensions]
    last = sum((one.size - 1) * one.given * element for one in dimensions)
    if last < _LARGEST and prod(one.size for one in dimensions) <= _LARGEST:
        return [dimensions]
    at = max(range(len(extents)), key=lambda row: (extents[row], row))
    size = dimensions[at].size
    parts = (
        [*dimensions[:at], replace(dimensions[at], size=half), *dimensions[at + 1 :]]
        for half in (size // 2, size - size // 2)
    )
    return [one for part in parts for one in _halved(part, element)]


def _of_kernel(dimensions: list[_Dimension], given: Layout, partial: int, gpu: GpuSpec) -> list[int]:
    reduced = [one for one in dimensions if one.out == 0]
    outputs = prod(one.size for one in dimensions if one.out)
    inputs = prod(one.size for one in reduced)
    along_input = len(reduced) == len(dimensions) or (
        bool(reduced) and dimensions[0].given < dimensions[len(reduced)].given
    )
    fastest = dimensions[0 if along_input else len(reduced)]
    wide, tall = (inputs, outputs) if along_input else (outputs, inputs)
    loaded = 1
    if fastest.given == 1:
        if along_input and wide >= 128 and len(reduced) == 1:
            wide //= _VECTOR
        elif not along_input:
            loaded = _vector_of_outputs(dimensions, len(reduced), given.offset)
            wide //= loaded
    width, height = _block((_BLOCK // 2 if given.dtype is torch.complex128 else _BLOCK) // loaded, wide, tall)
    step = width if along_input else 1
    steps_of_output = 1 if along_input else width
    if -(-inputs // step) < min(height * 16, _MOST_VALUES):
        return []
    step *= height
    values = -(-inputs // step)
    grid = -(-(outputs // loaded) // steps_of_output)
    blocks = gpu.processors * (gpu.threads // (width * height))
    if values < _MOST_VALUES or grid > blocks:
        return []
    blocks_per_output = max(min(-(-blocks // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if blocks_per_output <= 1:
        return []
    size = partial * outputs * blocks_per_output * (1 if along_input else width * loaded)
    return [size, 4 * grid]


def _vector_of_outputs(dimensions: list[_Dimension], reduced: int, offset: int) -> int:
    """Return how many outputs a thread computes at once (get_output_vec_size)."""
    steps = [one.given for row, one in enumerate(dimensions) if row != reduced]
    found = _VECTOR
    for number in (offset, dimensions[reduced].size, *steps):
        while number % found:
            found //= 2
    return found


def _block(threads: int, wide: int, tall: int) -> tuple[int, int]:
    """Return the width and height of a block, both powers of two (set_block_dimension)."""
    across, down = (min(_power(size), threads) for size in (wide, tall))
    width = min(across, _WARP)
    height = min(down, threads // width)
    return min(across, threads // height), height


def _power(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 1
