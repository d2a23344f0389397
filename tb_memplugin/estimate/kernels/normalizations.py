"""The buffers of group and batch normalization on a GPU. cuDNN's batch normalization is another operator."""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.kernels.reductions import Layout, greatest_power, moments
from tb_memplugin.estimate.kernels.table import HALVES, Buffers, Call, Kernel, operators

aten = torch.ops.aten

_HAS_FLOAT_MOMENTS = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"
"""Measured on 2.11, which has none, and on 2.13; 2.12 was not."""


def _group_norm(call: Call) -> Buffers:
    """Return a factor and a term for each channel; moments in float32 for half precision."""
    data, rows = call["input"], call["N"]
    half = _HAS_FLOAT_MOMENTS and data.dtype in HALVES
    size = max(4, data.element_size())
    affine = call["HxW"] > 1 and not (call["weight"] is None and call["bias"] is None)
    return [rows * call["group"] * size] * (2 * half) + [rows * call["C"] * size] * (2 * affine)


def _group_norm_backward(call: Call) -> Buffers:
    """Return two sums for each channel, and for the gradient of the input two numbers for each group."""
    rows, size = call["N"], max(4, call["input"].element_size())
    by_channel, by_group = rows * call["C"] * size, rows * call["group"] * size
    if call.out[0] is None:
        return [by_channel, by_channel]
    scaled = by_channel if call["weight"] is not None and call["HxW"] > 1 else 0
    return [by_channel, by_channel, by_group, by_group, scaled]


def _batch_norm(call: Call) -> Buffers:
    data = call["input"]
    if not call["training"]:
        return ()
    if _is_channels_last(data):
        return _exchanged(data, 4)
    if data.is_contiguous():
        return ()
    return moments(Layout.of(data), call.gpu, [axis for axis in range(data.dim()) if axis != 1])


def _batch_norm_backward(call: Call) -> Buffers:
    """Return two sums for each channel, which are there before the gradient of the input.

    Where the statistics are not of this batch, the inverse deviations are computed again.
    """
    data, (gradient, *others) = call["input"], call.out
    is_reduced = call["train"] or others != [None, None]
    if not _has_channels_last_kernels(data):
        read = (data, call["grad_out"]) if is_reduced and gradient is not None else ()
        return [*map(_by_row_and_channel, read), *others, gradient]
    numbers, sums = data.shape[1] * max(4, data.element_size()), []
    if is_reduced:
        exchanged = _exchanged(data, 2) if _has_channels_last_kernels(call["grad_out"]) else []
        sums = [*others, numbers, numbers, exchanged]
    return [*sums, gradient] if call["train"] else [numbers, *sums, gradient]


def _by_row_and_channel(data: torch.Tensor) -> int:
    """Return the bytes of a copy in which all other dimensions are one, 0 if these lie together."""
    strides, shape = data.stride()[2:], data.shape[2:]
    together = all(
        step == size * next_step
        for step, size, next_step in zip(strides[:-1], shape[1:], strides[1:], strict=True)
    )
    return 0 if together else data.nbytes


def _input_gradient(mode: Any, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the results, the gradient of the input contiguous but where channels-last kernels compute it."""
    results = mode.quietly(func, *args, **kwargs)
    data, is_trained = args[1], args[7]
    if results is NotImplemented or results[0] is None or (is_trained and _has_channels_last_kernels(data)):
        return results
    gradient = mode.quietly(aten.empty_like.default, data, memory_format=torch.contiguous_format)
    return gradient, *results[1:]


def _is_channels_last(data: Any) -> bool:
    """Whether channels are the fastest dimension (batch_norm_choose_impl)."""
    if data.is_contiguous():
        return bool(data.stride(1) == 1)
    return bool(data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last))


def _has_channels_last_kernels(data: Any) -> bool:
    """Whether backward takes the kernels for channels-last (batch_norm_use_channels_last_kernels)."""
    volume = data.dim() == 5 and data.is_contiguous(memory_format=torch.channels_last_3d)
    return volume or _is_channels_last(data)


def _exchanged(data: Any, numbers: int) -> list[int]:
    """Return what blocks exchange if channels are the fastest dimension: numbers for each channel, a count.

    A block has 512 threads, each for 16 rows of a channel (Normalization.cuh, flexible_launch_configs).
    """
    channels = data.shape[1]
    rows = data.numel() // max(1, channels)
    across = min(greatest_power(channels), 32)
    down = min(greatest_power(-(-rows // 16)), 512 // across)
    if across * down != 512:
        across = min(greatest_power(channels), 512 // down)
    blocks = min(-(-rows // (down * 16)), 128)
    return [numbers * channels * blocks * 4, -(-channels // across) * 4] if blocks >= 8 else []


def _by_channel(mode: Any, _func: Any, args: tuple[Any, ...], _kwargs: Any) -> tuple[Any, Any]:
    """Return a mean and an inverse deviation of each channel."""
    data = args[0]
    dtype = torch.float32 if data.dtype in HALVES else data.dtype
    with mode:
        first, second = (torch.empty(data.shape[1], dtype=dtype, device=data.device) for _ in range(2))
    return first, second


def _like_the_input(mode: Any, func: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
    data = args[1] if func is aten.batch_norm_backward_elemt.default else args[0]
    with mode:
        return torch.empty_like(data)


def _sums_by_channel(mode: Any, _func: Any, args: tuple[Any, ...], _kwargs: Any) -> tuple[Any, ...]:
    """Return two sums, and the gradients of weight and bias, where these are asked for."""
    mean, weight, asked = args[2], args[4], args[5:8]
    with mode:
        sums = [torch.empty_like(mean) if asked[0] else None for _ in range(2)]
        gradients = [
            torch.empty_like(mean if weight is None else weight) if each else None for each in asked[1:]
        ]
    return (*sums, *gradients)


KERNELS = (
    Kernel(
        operators("batch_norm_stats", "batch_norm_gather_stats_with_counts"),
        source="cuda/Normalization.cu:batch_norm_stats_cuda, batch_norm_gather_stats_cuda_template",
        results=_by_channel,
    ),
    Kernel(
        operators("batch_norm_elemt", "batch_norm_backward_elemt"),
        source="cuda/Normalization.cu:batch_norm_elemt_cuda, batch_norm_backward_elemt_cuda",
        results=_like_the_input,
    ),
    Kernel(
        operators("batch_norm_backward_reduce"),
        source="cuda/Normalization.cu:batch_norm_backward_reduce_cuda",
        results=_sums_by_channel,
    ),
    Kernel(
        operators("native_group_norm"), _group_norm, source="cuda/group_norm_kernel.cu:GroupNormKernelImpl"
    ),
    Kernel(
        operators("native_group_norm_backward"),
        _group_norm_backward,
        source="cuda/group_norm_kernel.cu:GroupNormBackwardKernelImpl",
    ),
    Kernel(operators("native_batch_norm"), _batch_norm, source="cuda/Normalization.cu:batch_norm_cuda"),
    Kernel(
        operators("native_batch_norm_backward"),
        _batch_norm_backward,
        source="cuda/Normalization.cu:batch_norm_backward_cuda",
        results=_input_gradient,
    ),
)
