"""Copies that kernels make of what they read: contiguous, in another memory format, or in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel, copied_bytes, operators

if TYPE_CHECKING:
    from tb_memplugin.estimate.run.fake_mode import CountingFakeMode

_READS_STRIDES = "aten::_adaptive_avg_pool2d_backward"
"""With a channels-last input, this one reads any gradient as it is."""

_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")

_FEWEST_CHANNELS = 4
"""The fewest channels that kernels which scale images read in channels_last."""

_BY_BLAS = (torch.float32, torch.float64)
"""Dtypes that BLAS computes on the CPU. Half precision is computed by oneDNN, whose buffers are not known."""

_ELEMENTWISE = (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "div", "pow", "fmod", "remainder", "maximum", "minimum", "atan2", "hypot"),
    *("sqrt", "rsqrt", "reciprocal", "exp", "log", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "erf"),
)
"""Operators that compute an element from one of each operand, in the operands' common dtype."""


def contiguous_copies(*names: str) -> Callable[[Call], Buffers]:
    """Return the function for a kernel that makes contiguous copies of the arguments of these names."""
    return lambda call: [copied_bytes(call[name]) for name in names]


def _through_contiguous(*names: str) -> Callable[[Call], Buffers]:
    """Return the function for a kernel that writes copies of results, and reads arguments, in one piece."""

    def buffers(call: Call) -> Buffers:
        results = call.out if isinstance(call.out, tuple) else (call.out,)
        return [copied_bytes(tensor) for tensor in (*results, *(call[name] for name in names))]

    return buffers


def _converted(call: Call, *names: str) -> Buffers:
    """Return copies of arguments in the dtype of the result."""
    out = call.out
    return [call[name].numel() * out.element_size() for name in names if call[name].dtype is not out.dtype]


def _accumulated(call: Call) -> Buffers:
    return _converted(call, "self") if call["self"].dim() else ()


def _running(call: Call) -> Buffers:
    return [[copied_bytes(call["self"])], _accumulated(call)]


def _complex(call: Call) -> Buffers:
    return [call["self"].nbytes] if call["self"].dtype.is_complex else ()


def _masked_rows(call: Call) -> Buffers:
    """Return a byte for each score, a byte for each row and a zero, while scores and result are live."""
    out = call.out
    return [out.numel(), out.numel() // out.shape[call["dim"]], out.element_size()]


def _rolled(call: Call) -> Buffers:
    """Return the results of all dimensions but the last: they are rolled one after the other.

    A tensor without dimensions to roll is flattened, and a GPU copies one that is not contiguous; the copy
    dies before the last dimension is rolled.
    """
    dimensions = len(call["dims"])
    on_gpu = call.out.device.type == "cuda"
    copied = not call["self"].is_contiguous() and (not dimensions or on_gpu)
    return [call.out.nbytes] * max(dimensions - 1, copied)


def _absolute(call: Call) -> Buffers:
    """Return the absolute values, or the difference, which are reduced or compared."""
    return [call["self"].nbytes] if call["self"].is_floating_point() else ()


def _columns(call: Call) -> Buffers:
    """Return a copy of an input that is not contiguous, and what the result is before it grows."""
    tensor = call["self"]
    small = tensor.nbytes if tensor.numel() < call.out.numel() else 0
    return [small, copied_bytes(tensor)]


def _in_the_memory_of_the_input(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    return within(mode, out, args[0].numel()) if args[0].numel() > out.numel() else out


def within(mode: CountingFakeMode, out: torch.Tensor, elements: int) -> Any:
    """Return a tensor like `out` in the memory of so many elements."""
    buffer = mode.quietly(torch.ops.aten.empty.memory_format, [elements], dtype=out.dtype, device=out.device)
    return mode.quietly(torch.ops.aten.resize_.default, buffer, out.shape)


def contiguous_like_the_input(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return a contiguous gradient of the input, which is the operator's second argument."""
    return mode.quietly(torch.ops.aten.empty_like.default, args[1], memory_format=torch.contiguous_format)


def _image(call: Call) -> Buffers:
    """Return a copy of the first argument in the memory format of the second, or in its own."""
    read = call.args[0]
    like = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], torch.Tensor) else read
    memory_format = suggest_memory_format(like)
    if call.func._schema.name == _READS_STRIDES and memory_format is not torch.contiguous_format:
        return ()
    return [copied_bytes(read, memory_format)]


def _scaled(call: Call) -> Buffers:
    """Return copies in one piece, but of images whose channels the kernel reads and writes side by side."""
    read = call.args[0]
    if suggest_memory_format(read) is torch.channels_last and read.shape[1] >= _FEWEST_CHANNELS:
        return [copied_bytes(read, torch.channels_last)]
    return [copied_bytes(call.out), copied_bytes(read)]


def _between_host_and_gpu(call: Call) -> Buffers:
    """Return the pieces on the GPU in which elements pass that are of another dtype, or lie otherwise.

    Dtypes are converted on the GPU if the copy does not block, else on the host.
    """
    read, out = call["src" if call.func._schema.is_mutable else "self"], call.out
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(read)
    is_converted, is_like = read.dtype is not out.dtype, read.stride() == out.stride() and is_dense
    if read.device.type == out.device.type or (is_like and not is_converted):
        return []
    by_gpu = is_converted and call["non_blocking"]
    if read.device.type == "cpu":
        return [out.numel() * read.element_size() if by_gpu else copied_bytes(out)]
    in_one_piece = (read.is_contiguous() or (by_gpu and not is_dense)) and read.shape == out.shape
    size = out.element_size() if by_gpu else read.element_size()
    return [read.numel() * size * by_gpu, 0 if in_one_piece else out.numel() * size]


def _pooled(call: Call) -> Buffers:
    """Return copies of the gradient and of the input in the memory format of the input."""
    data = call["self"]
    return [*_image(call), copied_bytes(data, suggest_memory_format(data))]


def _matrices(call: Call) -> Buffers:
    if call.out.dtype not in _BY_BLAS:
        return ()
    matrices = [
        argument for argument in call.args if isinstance(argument, torch.Tensor) and argument.dim() == 2
    ]
    return [matrix.nbytes for matrix in matrices if not is_read_by_blas(matrix)]


def is_read_by_blas(matrix: torch.Tensor) -> bool:
    """Return whether BLAS can read a matrix: its rows or its columns are contiguous and do not overlap."""
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    by_rows = across == 1 and (down >= max(1, columns) or rows <= 1)
    by_columns = down == 1 and (across >= max(1, rows) or columns <= 1)
    return by_rows or by_columns


def _promoted(call: Call) -> Buffers:
    """Return copies of operands in the dtype that is computed in."""
    out, args = call.out, call.args
    compared, in_place = out.dtype is torch.bool, call.func._schema.is_mutable
    common = torch.result_type(*args[:2]) if len(args) > 1 and (compared or in_place) else out.dtype
    copied = [
        operand
        for operand in args
        if isinstance(operand, torch.Tensor) and operand.dim() and operand.dtype is not common
    ]
    if in_place and out.dtype is not common:
        copied.append(out)  # the result is computed in a copy, too
    return [operand.numel() * common.itemsize for operand in copied]


KERNELS = (
    Kernel(
        operators("_softmax", "_log_softmax"),
        contiguous_copies("self"),
        source="SoftMax.cpp:softmax_cpu_out, cuda/SoftMax.cu:host_softmax",
        on="",
    ),
    Kernel(
        operators("_softmax_backward_data", "_log_softmax_backward_data"),
        contiguous_copies("grad_output", "output"),
        source="SoftMax.cpp:softmax_backward_cpu_out, log_softmax_backward_cpu_out",
        on="cpu",
    ),
    Kernel(
        operators("native_layer_norm"),
        contiguous_copies("input"),
        source="layer_norm.cpp:layer_norm_cpu",
        on="cpu",
    ),
    Kernel(
        operators("native_layer_norm_backward"),
        contiguous_copies("grad_out", "input"),
        source="layer_norm.cpp:layer_norm_backward_cpu",
        on="cpu",
    ),
    Kernel(
        operators("embedding_dense_backward"),
        contiguous_copies("grad_output"),
        source="Embedding.cpp:embedding_dense_backward_cpu",
        on="cpu",
    ),
    Kernel(operators("cumsum", "cumprod"), _accumulated, source="ReduceOps.cpp:cumsum", on="cpu"),
    Kernel(operators("cumsum", "cumprod"), _running, source="cuda/ScanKernels.cpp:cumsum_cuda_kernel"),
    Kernel(
        operators("sum", "sum.dim_IntList", "nansum", "mean", "mean.dim", "prod", "prod.dim_int"),
        _accumulated,
        source="ReduceOpsUtils.h:make_reduction",
        on="cpu",
    ),
    Kernel(operators("abs", "angle"), _complex, source="UnaryOps.cpp:unary_op_impl_out", on=""),
    Kernel(
        operators("where.self"),
        lambda call: _converted(call, "self", "other"),
        source="TensorCompare.cpp:where",
        on="",
    ),
    Kernel(
        operators(
            "max_pool2d_with_indices",
            *("upsample_nearest3d_backward", "_upsample_nearest_exact3d_backward"),
            *("upsample_linear1d_backward", "upsample_trilinear3d_backward"),
            "_adaptive_avg_pool2d",
            *("max_pool3d_with_indices_backward", "avg_pool3d_backward"),
            *(f"_adaptive_avg_pool{n}d_backward" for n in (2, 3)),
            "adaptive_max_pool3d_backward",
        ),
        _image,
        source=(
            "cuda/DilatedMaxPool2d.cu, cuda/AveragePool2d.cu, cuda/AdaptiveAveragePooling.cu, "
            "cuda/UpSampleNearest3d.cu and their like: what they call contiguous on"
        ),
    ),
    Kernel(
        operators("max_pool2d_with_indices_backward", "avg_pool2d_backward"),
        _pooled,
        source="cuda/DilatedMaxPool2d.cu, cuda/AveragePool2d.cu: what they call contiguous on",
    ),
    Kernel(
        operators(
            "upsample_bicubic2d_backward",
            *(f"_upsample_{kind}2d_aa_backward" for kind in ("bilinear", "bicubic")),
            *(f"reflection_pad{n}d_backward" for n in (1, 2)),
            "nll_loss_backward",
            "fractional_max_pool2d_backward",
        ),
        contiguous_copies("grad_output"),
        source=(
            "cuda/UpSampleBicubic2d.cu, cuda/UpSampleBilinear2d.cu, cuda/ReflectionPad.cu, "
            "cuda/FractionalMaxPool2d.cu, cuda/Loss.cu: what they call contiguous on"
        ),
    ),
    Kernel(
        operators("adaptive_max_pool2d_backward"),
        _through_contiguous("grad_output", "indices"),
        source="cuda/AdaptiveMaxPooling2d.cu:adaptive_max_pool2d_backward_out_cuda",
    ),
    Kernel(
        operators(
            "adaptive_max_pool2d",
            *("upsample_nearest3d", "_upsample_nearest_exact3d"),
            *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic")),
        ),
        _through_contiguous("self"),
        source="cuda/AdaptiveMaxPooling2d.cu, cuda/UpSampleNearest3d.cu, cuda/UpSampleBilinear2d.cu",
        rare="pooling and scaling in channels_last",
    ),
    Kernel(
        operators(
            *(f"{name}{n}d" for name in _NEAREST for n in (1, 2)),
            *(f"{name}{n}d_backward" for name in _NEAREST for n in (1, 2)),
            "upsample_bilinear2d_backward",
        ),
        _scaled,
        source="cuda/UpSampleNearest2d.cu, cuda/UpSampleBilinear2d.cu: what they call contiguous on",
    ),
    Kernel(
        operators("_to_copy", "copy_"),
        _between_host_and_gpu,
        source="cuda/Copy.cu:copy_kernel_cuda",
    ),
    Kernel(
        operators("_safe_softmax"),
        _masked_rows,
        source="transformers/attention.cpp:_safe_softmax",
        on="",
        rare="attention with masks on a GPU whose kernels do not take them, and on the CPU",
    ),
    Kernel(
        operators("roll"),
        _rolled,
        source="TensorTransformations.cpp:roll, cuda/TensorTransformations.cu:roll_cuda",
        on="",
        rare="shifted windows, as Swin has them",
    ),
    Kernel(operators("isinf"), _absolute, source="TensorCompare.cpp:isinf", on=""),
    Kernel(operators("dist"), _absolute, source="Distance.cpp:dist", on="", rare="torch.dist"),
    Kernel(
        operators("im2col", "col2im"),
        _columns,
        source="cuda/Im2Col.cu:im2col_out_cuda_template, cuda/Col2Im.cu:col2im_out_cuda_template",
        on="",
        results=_in_the_memory_of_the_input,
        rare="unfold and fold",
    ),
    Kernel(
        operators(
            *(f"reflection_pad{n}d" for n in (1, 2, 3)),
            *("adaptive_max_pool3d", "_adaptive_avg_pool3d", "avg_pool3d", "max_unpool2d"),
        ),
        contiguous_copies("self"),
        source=(
            "cuda/ReflectionPad.cu, cuda/AdaptiveMaxPooling3d.cu, cuda/AdaptiveAveragePooling3d.cu, "
            "cuda/AveragePool3d.cu, cuda/MaxUnpooling.cu: what they call contiguous on"
        ),
    ),
    Kernel(operators("mm", "addmm"), _matrices, source="LinearAlgebra.cpp:addmm_impl_cpu_", on="cpu"),
    Kernel(
        [
            operator
            for name in _ELEMENTWISE
            for operator in operators(f"{name}.*", f"{name}_.*")
            if "out" not in operator._overloadname.split("_")
        ],
        _promoted,
        source="../TensorIterator.cpp:compute_types",
        on="cpu",
    ),
)
