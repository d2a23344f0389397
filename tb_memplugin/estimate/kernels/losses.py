"""What losses hold besides their results.

Their code is the same on all devices: it calls other operators. Some reduce the losses of all elements in the
memory of these, which the result keeps. Sizes were measured with torch.profiler on the CPU and with PyTorch's
CUDA build (2.13.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from tb_memplugin.estimate.kernels.copies import within
from tb_memplugin.estimate.kernels.reductions import Layout, reduction
from tb_memplugin.estimate.kernels.table import ANY_GPU, Buffers, Call, Kernel, operators, tensor_bytes

if TYPE_CHECKING:
    from tb_memplugin.estimate.run.fake_mode import CountingFakeMode


def _in_the_memory_of_all(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    call = Call(func, args, kwargs, out, ANY_GPU)
    return within(mode, out, _pairs(call)) if call["reduction"] else out


def _pairs(call: Call) -> int:
    return prod(torch.broadcast_shapes(call["self"].shape, call["target"].shape))


def _reduced(call: Call, before: list[int]) -> Buffers:
    """Return what the losses are reduced with, on a GPU also the buffers of the reduction."""
    if call.out.device.type != "cuda":
        return before
    return reduction(Layout.contiguous((_pairs(call),), call.out.dtype), call.gpu, before=before)


def _averaged(call: Call) -> Buffers:
    """Return the losses of all elements, if they are reduced to one number."""
    return () if call.out.dim() else _reduced(call, [call.out.untyped_storage().nbytes()])


def _averaged_apart(call: Call) -> Buffers:
    """Return the number to which a GPU reduces the losses, before it is copied to the result."""
    if call.out.dim() or call.out.device.type != "cuda":
        return ()
    return _reduced(call, [call.out.element_size()])


def _huber(call: Call) -> Buffers:
    return () if call.out.dim() else _reduced(call, [_pairs(call) * call.out.element_size()])


def _with_logits(call: Call) -> Buffers:
    """Return the log-sigmoid of the input, and the losses if they are reduced."""
    size = _pairs(call) * call.out.element_size()
    return _reduced(call, [size, size]) if call["reduction"] else [size]


def _exponentials(call: Call) -> Buffers:
    """Return `-target` and its product with the input. The exponentials die before the result is made."""
    return [tensor_bytes(call.out)] * 2


KERNELS = (
    Kernel(
        operators("mse_loss", "smooth_l1_loss"),
        _averaged,
        source="Loss.cpp:mse_loss_out, smooth_l1_loss_out",
        on="",
        results=_in_the_memory_of_all,
    ),
    Kernel(
        operators("binary_cross_entropy", "soft_margin_loss"),
        _averaged_apart,
        source="cuda/Loss.cu:binary_cross_entropy_out_cuda, Loss.cpp:soft_margin_loss_out",
        on="",
        results=_in_the_memory_of_all,
    ),
    Kernel(operators("huber_loss"), _huber, source="Loss.cpp:huber_loss", on=""),
    Kernel(
        operators("binary_cross_entropy_with_logits"),
        _with_logits,
        source="Loss.cpp:binary_cross_entropy_with_logits",
        on="",
    ),
    Kernel(
        operators("soft_margin_loss_backward"),
        _exponentials,
        source="Loss.cpp:soft_margin_loss_backward_out",
        on="",
        rare="training with soft_margin_loss",
    ),
)
