"""Record the buffers of group and batch normalization on a GPU.

Sources in aten/src/ATen/native/cuda: group_norm_kernel.cu, Normalization.cu and Normalization.cuh
(flexible_launch_configs). cuDNN's batch normalization is another operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.trace import Category

aten = torch.ops.aten


class Normalizations(Correction):
    """Records what the kernels keep for each channel, and what their blocks exchange."""

    def rules(self) -> dict[Any, Rule]:
        """Return rules for batch normalization, which sums before the results of its backward exist."""
        return {
            aten.native_batch_norm.default: _batch_norm,
            aten.native_batch_norm_backward.default: _batch_norm_backward,
        }

    def after(self) -> dict[Any, After]:
        """Return functions for group normalization."""
        return {
            aten.native_group_norm.default: _group_norm,
            aten.native_group_norm_backward.default: _group_norm_backward,
        }


def _group_norm(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record a factor and a term for each channel; moments in float32 for half precision."""
    data, weight, bias, rows, channels, pixels, groups = args[:7]
    if data.device.type != "cuda":
        return
    half = data.dtype in (torch.float16, torch.bfloat16)
    size = max(4, data.element_size())
    affine = pixels > 1 and not (weight is None and bias is None)
    sizes = [rows * groups * size] * (2 * half) + [rows * channels * size] * (2 * affine)
    mode.passing(sizes, func, scope, mode.ledger.device_row(data.device))


def _group_norm_backward(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
) -> None:
    """Record two sums for each channel, and for the gradient of the input two numbers for each group."""
    data, weight, rows, channels, pixels, groups = args[1], *args[4:9]
    if data.device.type != "cuda":
        return
    size = max(4, data.element_size())
    by_channel, by_group = rows * channels * size, rows * groups * size
    sizes = [by_channel, by_channel]
    if out[0] is not None:
        sizes += [by_group, by_group, by_channel if weight is not None and pixels > 1 else 0]
    mode.passing(sizes, func, scope, mode.ledger.device_row(data.device))


def _batch_norm(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    data, train = args[0], args[5]
    if train and data.device.type == "cuda":
        mode.see(out, func)
        _exchanged(mode, func, data, 4)
    return out


def _batch_norm_backward(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    gradient, data, train = args[0], args[1], args[7]
    if train and data.device.type == "cuda":
        mode.see(out[1:], func)
        scope, row = mode.layers.scope(), mode.ledger.device_row(data.device)
        size = data.shape[1] * max(4, data.element_size()) * _is_channels_last(data)
        sums = [mode.allocate(size, func, scope, Category.TEMPORARY, row) for _ in range(2) if size]
        if _is_channels_last(gradient):
            _exchanged(mode, func, data, 2)
        mode.see(out[:1], func)
        for block in sums:
            mode.ledger.free(block, scope)
    return out


def _is_channels_last(data: Any) -> bool:
    """Whether channels are the fastest dimension (batch_norm_choose_impl)."""
    if data.is_contiguous():
        return bool(data.stride(1) == 1)
    return bool(data.dim() == 4 and data.is_contiguous(memory_format=torch.channels_last))


def _exchanged(mode: CountingFakeMode, func: Any, data: Any, numbers: int) -> None:
    """Record what blocks exchange if channels are the fastest dimension: numbers for each channel, a count.

    A block has 512 threads, each for 16 rows of a channel.
    """
    if not _is_channels_last(data):
        return
    channels = data.shape[1]
    rows = data.numel() // max(1, channels)
    across = min(_power(channels), 32)
    down = min(_power(-(-rows // 16)), 512 // across)
    if across * down != 512:
        across = min(_power(channels), 512 // down)
    blocks = min(-(-rows // (down * 16)), 128)
    if blocks >= 8:
        sizes = [numbers * channels * blocks * 4, -(-channels // across) * 4]
        mode.passing(sizes, func, mode.layers.scope(), mode.ledger.device_row(data.device))


def _power(number: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (number.bit_length() - 1) if number > 0 else 1
