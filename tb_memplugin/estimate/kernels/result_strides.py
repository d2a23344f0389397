"""Strides of results that fake tensors get wrong: whether the next operator copies depends on them.

Fake tensors run formulas for these operators. Sources of what the kernels allocate: Loss.cpp, UpSample.h,
Activation.cpp (log_sigmoid) and PixelShuffle.cpp of aten/src/ATen/native. TensorIterator computes derivatives
of activations: it lays the result out like its first operand, the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from tb_memplugin.estimate.kernels.fused_kernels import HAS_RMS_NORM
from tb_memplugin.estimate.kernels.kernel_buffers import copied_around
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule

aten = torch.ops.aten


class ResultStrides(Correction):
    """Runs these operators with the strides of a GPU."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for each operator."""
        losses = (
            *(aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward),
            *(aten.multi_margin_loss_backward, aten.multilabel_margin_loss_backward),
        )
        normalizations = [aten.native_layer_norm_backward]
        if HAS_RMS_NORM:
            normalizations.append(aten._fused_rms_norm_backward)
        activations = (
            *(aten.elu_backward, aten.softplus_backward),
            *(aten.hardswish_backward, aten.hardsigmoid_backward),
        )
        return {
            **{packet.default: _contiguous_like_the_input for packet in losses},
            **{packet.default: _of_two for packet in activations},
            **{packet.default: _first_contiguous for packet in normalizations},
            aten._log_softmax_backward_data.default: _contiguous,
            aten.log_sigmoid_backward.default: _like_the_gradient,
            aten.pixel_unshuffle.default: _contiguous,
            aten.upsample_bilinear2d.default: _in_the_format_of_the_input,
        }


def _first_contiguous(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return contiguous gradients of the input; fake tensors lay them out like the gradient of the result."""

    def run() -> Any:
        first, *rest = mode.quietly(func, *args, **kwargs)
        return (first if first is None else _laid_out(mode, first, torch.contiguous_format), *rest)

    return copied_around(mode, func, args[1], run, last=args[0])


def _contiguous_like_the_input(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return mode.quietly(aten.empty_like.default, args[1], memory_format=torch.contiguous_format)


def _of_two(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what TensorIterator makes of the gradient and the other tensor."""
    return mode.quietly(
        aten.mul.Tensor, *(argument for argument in args if isinstance(argument, torch.Tensor))
    )


def _like_the_gradient(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return mode.quietly(aten.empty_like.default, args[0])


def _contiguous(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _laid_out(mode, mode.quietly(func, *args, **kwargs), torch.contiguous_format)


def _in_the_format_of_the_input(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    return _laid_out(mode, mode.quietly(func, *args, **kwargs), suggest_memory_format(args[0]))


def _laid_out(mode: CountingFakeMode, out: Any, form: torch.memory_format) -> Any:
    if out.is_contiguous(memory_format=form):
        return out
    shape, dtype, device = out.shape, out.dtype, out.device
    return mode.quietly(aten.empty.memory_format, shape, dtype=dtype, device=device, memory_format=form)
