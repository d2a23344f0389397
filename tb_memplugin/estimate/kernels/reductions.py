"""What reductions allocate on a GPU besides their results: sums, means, norms, extremes.

A GPU divides a reduction with many inputs for each output among blocks. They write partial results into one
buffer and count in another. Further, there are the results of the parts of an input of 2 GiB and more, where
the result's dtype cannot hold them (AccumulationBuffer of Reduce.cuh), and a copy of an input that is reduced
in another dtype (ReduceOpsUtils.h, make_reduction).

Sources: aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, global_memory_size, semaphore_size), and
aten/src/ATen/TensorIterator.cpp for the order of dimensions (reorder_dimensions, coalesce_dimensions).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import HALVES, Buffers, Call, Kernel, operators

if TYPE_CHECKING:
    from typing_extensions import Self

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
    """What a kernel sees of a tensor. Strides and offset count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Return that of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, int(tensor.storage_offset()))

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Return that of a contiguous tensor."""
        return cls(tuple(shape), tuple(prod(shape[row + 1 :]) for row in range(len(shape))), dtype)


@dataclass(slots=True)
class _Dimension:
    """A dimension of the iteration; strides in elements, that of the output is 0 if it is reduced."""

    size: int
    out_stride: int
    in_stride: int


def reduction_buffers(
    layout: Layout, reduced: Collection[int], partial: int, gpu: GpuSpec
) -> list[list[int]]:
    """Return the sizes in bytes of the buffers of each kernel that a reduction starts, in order.

    Args:
        layout: of what is reduced.
        reduced: the dimensions that are reduced, each from 0 on.
        partial: bytes of a partial result (`arg_t`).
    """
    if not layout.shape or not prod(layout.shape):
        return []
    kernels = _halved(_dimensions(layout, reduced), layout.dtype.itemsize)
    return [_of_kernel(dimensions, layout, partial, gpu) for dimensions in kernels]


def _dimensions(layout: Layout, reduced: Collection[int]) -> list[_Dimension]:
    """Return the dimensions, reduced ones first, each group from the fastest on, with neighbours joined."""
    kept = [size for row, size in enumerate(layout.shape) if row not in reduced]
    steps = iter([prod(kept[row + 1 :]) for row in range(len(kept))])
    dimensions = [
        _Dimension(size, 0 if row in reduced else next(steps), layout.strides[row])
        for row, size in enumerate(layout.shape)
    ]
    order: list[_Dimension] = []
    for dimension in reversed(dimensions):
        at = len(order)
        for row in range(len(order) - 1, -1, -1):
            comparison = _comes_after(order[row], dimension)
            if comparison < 0:
                break
            if comparison > 0:
                at = row
        order.insert(at, dimension)
    return _joined(order)


def _comes_after(first: _Dimension, second: _Dimension) -> int:
    """Return 1 if the first dimension belongs after the second, -1 if before, 0 if that is open."""
    if (first.out_stride == 0) != (second.out_stride == 0):
        return 1 if second.out_stride == 0 else -1
    for left, right in ((first.out_stride, second.out_stride), (first.in_stride, second.in_stride)):
        if left == 0 or right == 0:
            continue
        if left != right:
            return 1 if left > right else -1
        if first.size > second.size:
            return 1
    return 0


def _joined(order: list[_Dimension]) -> list[_Dimension]:
    joined = order[:1]
    for dimension in order[1:]:
        last = joined[-1]
        alike = (
            last.size * last.out_stride == dimension.out_stride
            and last.size * last.in_stride == dimension.in_stride
        )
        if last.size == 1:
            joined[-1] = dimension
        elif dimension.size == 1 or alike:
            last.size *= dimension.size
        else:
            joined.append(dimension)
    return joined


def _halved(dimensions: list[_Dimension], element: int) -> list[list[_Dimension]]:
    """Return the iterations into which one is divided until 32 bits can index each (with_32bit_indexing)."""
    extents = [
        (dimension.size - 1) * max(dimension.in_stride, dimension.out_stride) * element
        for dimension in dimensions
    ]
    last = sum((dimension.size - 1) * dimension.in_stride * element for dimension in dimensions)
    if last < _LARGEST and prod(dimension.size for dimension in dimensions) <= _LARGEST:
        return [dimensions]
    at = max(range(len(extents)), key=lambda row: (extents[row], row))
    size = dimensions[at].size
    parts = (
        [*dimensions[:at], replace(dimensions[at], size=half), *dimensions[at + 1 :]]
        for half in (size // 2, size - size // 2)
    )
    return [iteration for part in parts for iteration in _halved(part, element)]


def _of_kernel(dimensions: list[_Dimension], layout: Layout, partial: int, gpu: GpuSpec) -> list[int]:
    reduced = [dimension for dimension in dimensions if dimension.out_stride == 0]
    outputs = prod(dimension.size for dimension in dimensions if dimension.out_stride)
    inputs = prod(dimension.size for dimension in reduced)
    along_input = len(reduced) == len(dimensions) or (
        bool(reduced) and dimensions[0].in_stride < dimensions[len(reduced)].in_stride
    )
    fastest = dimensions[0 if along_input else len(reduced)]
    wide, tall = (inputs, outputs) if along_input else (outputs, inputs)
    loaded = 1
    if fastest.in_stride == 1:
        if along_input and wide >= 128 and len(reduced) == 1:
            wide //= _VECTOR
        elif not along_input:
            loaded = _vector_of_outputs(dimensions, len(reduced), layout.offset)
            wide //= loaded
    width, height = _block(
        (_BLOCK // 2 if layout.dtype is torch.complex128 else _BLOCK) // loaded, wide, tall
    )
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
    steps = [dimension.in_stride for row, dimension in enumerate(dimensions) if row != reduced]
    vector = _VECTOR
    for number in (offset, dimensions[reduced].size, *steps):
        while number % vector:
            vector //= 2
    return vector


def _block(threads: int, wide: int, tall: int) -> tuple[int, int]:
    """Return the width and height of a block, both powers of two (set_block_dimension)."""
    across, down = (min(greatest_power(size), threads) for size in (wide, tall))
    width = min(across, _WARP)
    height = min(down, threads // width)
    return min(across, threads // height), height


def greatest_power(number: int) -> int:
    """Return the largest power of two up to a number, at least 1."""
    return 1 << (number.bit_length() - 1) if number > 0 else 1


Partial = Callable[[torch.dtype], int]
"""From the dtype of an input to the bytes of a partial result."""


def _number(dtype: torch.dtype) -> int:
    return max(dtype.itemsize, 4)


def _real(dtype: torch.dtype) -> int:
    return max(dtype.itemsize // (2 if dtype.is_complex else 1), 4)


def _element(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _truth(dtype: torch.dtype) -> int:
    return 1


def _with_index(dtype: torch.dtype) -> int:
    return 16


def _moments(dtype: torch.dtype) -> int:
    return 32 if dtype is torch.float64 else 16  # WelfordData: two numbers, an int32, and a count as a number


_WHOLE = ("aten::max", "aten::min", "aten::argmax", "aten::argmin")
"""Operators that copy an input that is not contiguous, if they reduce it to one element."""


_PART = 65_536
"""The elements that one block of a foreach operator computes: kChunkSize of MultiTensorApply.cuh."""


def reduction(
    layout: Layout,
    gpu: GpuSpec,
    dimensions: Any = None,
    *,
    partial: int = 0,
    before: Sequence[int] = (),
    accumulates: bool | None = None,
) -> list[Any]:
    """Return the buffers of a reduction of a tensor with this layout.

    Args:
        layout: of what is reduced.
        dimensions: a dimension or several; None or none for all.
        partial: bytes of a partial result; 0 for those of a sum.
        before: bytes of what the kernel holds meanwhile.
        accumulates: whether the result holds partial results; None: not if it is in half precision.
    """
    count = len(layout.shape)
    rows = [dimensions] if isinstance(dimensions, int) else dimensions
    reduced = {row % max(count, 1) for row in rows} if rows else set(range(count))
    partial = partial or _number(layout.dtype)
    kernels = reduction_buffers(layout, reduced, partial, gpu)
    parts = []
    if len(kernels) > 1 and not (layout.dtype not in HALVES if accumulates is None else accumulates):
        parts = [partial * prod(size for row, size in enumerate(layout.shape) if row not in reduced)]
    return [*before, *parts, *kernels]


def moments(layout: Layout, gpu: GpuSpec, dimensions: Sequence[int]) -> list[Any]:
    """Return the buffers of mean and variance in float32 (ReduceOps.cpp: std_var_mean_out, make_reduction).

    Numbers in bfloat16 are copied in float32; those in float16 are not.
    """
    copied = layout.dtype is torch.bfloat16
    read = replace(layout, dtype=torch.float32) if copied else layout
    before = [prod(layout.shape) * read.dtype.itemsize] if copied else ()
    return reduction(read, gpu, dimensions, partial=_moments(read.dtype), before=before, accumulates=False)


def _reduced(partial: Partial, call: Call) -> Buffers:
    tensor, copied = call["self"], None
    out = call.out[0] if isinstance(call.out, tuple) else call.out
    schema, dimensions = call.func._schema, call.get("dim")
    if schema.name in _WHOLE and dimensions is None and not tensor.is_contiguous():
        copied = Layout.contiguous(tensor.shape, tensor.dtype)
    if partial is _number and _is_copied(tensor.dtype, out.dtype):
        copied = Layout(tensor.shape, tensor.stride(), out.dtype)
    layout = copied or Layout.of(tensor)
    pair = len(schema.returns) == 2 and partial is _element
    size = 16 if pair else partial(layout.dtype)
    halved = layout.dtype in HALVES and out.dtype in HALVES and size > 2
    return reduction(
        layout,
        call.gpu,
        dimensions,
        partial=size,
        before=[tensor.numel() * layout.dtype.itemsize] if copied else (),
        accumulates=not (halved or pair or partial in (_with_index, _moments)),
    )


def _counted(call: Call) -> Buffers:
    """Return the sum of a mask, a byte and then 8 bytes for each element."""
    tensor = call["self"]
    counts = Layout(tensor.shape, tensor.stride(), torch.int64)
    return reduction(counts, call.gpu, call["dim"], before=(tensor.numel(), 8 * tensor.numel()))


def _of_each(call: Call) -> Buffers:
    """Return partial results, for each tensor as many as the largest has parts."""
    tensors = [tensor for tensor in call["self"] if tensor.device.type == "cuda"]
    parts = max(-(-tensor.numel() // _PART) for tensor in tensors)
    size = max(tensors[0].element_size(), 4 if call.func._schema.name == "aten::_foreach_norm" else 0)
    return [len(tensors) * parts * size]


def _logsumexp(call: Call) -> Buffers:
    """Return the largest element of each row, and the exponentials of all elements."""
    return [call.out.nbytes, call["self"].numel() * call.out.element_size()]


def _is_copied(dtype: torch.dtype, out: torch.dtype) -> bool:
    """Whether an input is copied in the dtype of the result; a GPU sums half precision in float32 without."""
    return dtype is not out and not (dtype in HALVES and out is torch.float32)


def _reducing(partial_bytes: Partial, source: str, *names: str) -> Kernel:
    """Return the row of operators whose blocks exchange partial results of so many bytes."""
    reducing = [
        operator
        for operator in operators(*(f"{name}.*" for name in names))
        if not any(argument.is_out or argument.name == "other" for argument in operator._schema.arguments)
    ]
    return Kernel(reducing, partial(_reduced, partial_bytes), source=source)


KERNELS = (
    _reducing(_number, "cuda/ReduceSumProdKernel.cu:sum_kernel_cuda", "sum", "nansum", "prod"),
    _reducing(_number, "cuda/ReduceMomentKernel.cu:mean_kernel_cuda", "mean"),
    _reducing(
        _moments, "cuda/ReduceMomentKernel.cu:std_var_kernel_cuda", "var", "std", "var_mean", "std_mean"
    ),
    _reducing(_real, "cuda/ReduceNormKernel.cu:norm_launch_kernel", "linalg_vector_norm"),
    _reducing(_element, "cuda/ReduceMaxValuesKernel.cu:max_values_kernel_impl", "amax", "amin", "max", "min"),
    _reducing(_truth, "cuda/ReduceLogicKernel.cu:and_kernel_cuda", "any", "all"),
    _reducing(_with_index, "cuda/ReduceArgMaxKernel.cu:argmax_kernel_impl", "argmax", "argmin"),
    Kernel(
        operators("count_nonzero", "count_nonzero.dim_IntList"),
        _counted,
        source="ReduceOps.cpp:count_nonzero",
    ),
    Kernel(
        operators("_foreach_norm", "_foreach_norm.Scalar", "_foreach_max", "_foreach_max.Scalar"),
        _of_each,
        source="cuda/ForeachReduceOp.cu:foreach_tensor_norm_cuda",
    ),
    Kernel(operators("logsumexp"), _logsumexp, source="ReduceOps.cpp:logsumexp_out_impl", on=""),
)
