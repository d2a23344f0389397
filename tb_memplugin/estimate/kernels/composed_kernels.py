"""Temporary tensors of operators whose kernel calls other operators, with the same code on all devices.

Fake tensors know only the results of such an operator. What it holds besides was measured with torch.profiler
on the CPU (torch 2.13.0) and with its CUDA build, and follows from aten/src/ATen/native: Loss.cpp,
ReduceOps.cpp, TensorTransformations.cpp, TensorCompare.cpp, Distance.cpp, and cuda/Loss.cu.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from tb_memplugin.estimate.kernels.block_reductions import Layout
from tb_memplugin.estimate.kernels.reductions import Reducer
from tb_memplugin.estimate.kernels.resized_results import is_reduced
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode

aten = torch.ops.aten


class ComposedKernels(Correction):
    """Records what these kernels hold besides inputs and results."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        return {
            **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default), self._averaged),
            **dict.fromkeys(
                (aten.binary_cross_entropy.default, aten.soft_margin_loss.default), self._averaged_apart
            ),
            aten.huber_loss.default: self._huber,
            aten.binary_cross_entropy_with_logits.default: self._with_logits,
            aten._euclidean_dist.default: _euclidean,
            aten.soft_margin_loss_backward.default: _exponentials,
            aten.logsumexp.default: _logsumexp,
            aten.roll.default: _roll,
            aten.isinf.default: _like_the_first,
            aten.dist.default: _like_the_first,
        }

    def _averaged(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Record the losses of all elements, if they are reduced to one number."""
        if not out.dim():
            self._reduce(mode, func, args, out, scope, [out.untyped_storage().nbytes()])

    def _averaged_apart(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Record the number to which a GPU reduces the losses, before it is copied to the result."""
        if not out.dim() and out.device.type == "cuda":
            self._reduce(mode, func, args, out, scope, [out.element_size()])

    def _huber(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        if not out.dim():
            self._reduce(mode, func, args, out, scope, [_pairs(args) * out.element_size()])

    def _with_logits(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Record the log-sigmoid of the input, and the losses if they are reduced."""
        size = _pairs(args) * out.element_size()
        if is_reduced(func, args, {}):
            self._reduce(mode, func, args, out, scope, [size, size])
        else:
            _hold(mode, func, out, scope, [size])

    def _reduce(
        self,
        mode: CountingFakeMode,
        func: Any,
        args: tuple[Any, ...],
        out: Any,
        scope: Scope,
        before: list[int],
    ) -> None:
        """Record what the losses are reduced with, on a GPU also the buffers of the reduction."""
        if out.device.type != "cuda":
            _hold(mode, func, out, scope, before)
            return
        losses = Layout.contiguous((_pairs(args),), out.dtype)
        row = mode.ledger.device_row(out.device)
        Reducer(self.target).record(mode, func, scope, row, losses, before=tuple(before))


def _pairs(args: tuple[Any, ...]) -> int:
    return prod(torch.broadcast_shapes(args[0].shape, args[1].shape))


def _exponentials(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record `-target` and its product with the input. The exponentials die before the result is made."""
    _hold(mode, func, out, scope, [out.numel() * out.element_size()] * 2)


def _logsumexp(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the largest element of each row, and the exponentials of all elements."""
    _hold(mode, func, out, scope, [out.numel() * out.element_size(), args[0].numel() * out.element_size()])


def _roll(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the results of all dimensions but the last: they are rolled one after the other.

    A tensor without dimensions to roll is flattened, and a GPU copies one that is not contiguous; the copy
    dies before the last dimension is rolled.
    """
    dimensions = len(args[2]) if len(args) > 2 else 0
    copied = not args[0].is_contiguous() and (not dimensions or out.fake_device.type == "cuda")
    _hold(mode, func, out, scope, [out.numel() * out.element_size()] * max(dimensions - 1, copied))


def _like_the_first(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record a tensor like the first argument: `abs` for `isinf`, the difference for `dist`."""
    if args[0].is_floating_point():
        _hold(mode, func, out, scope, [args[0].numel() * args[0].element_size()])


def _euclidean(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the two matrices that are multiplied: the points with two columns more (Distance.cpp)."""
    sizes = [
        points.numel() // points.shape[-1] * (points.shape[-1] + 2) * points.element_size()
        for points in args[:2]
    ]
    _hold(mode, func, out, scope, sizes)


def _hold(mode: CountingFakeMode, func: Any, out: Any, scope: Scope, sizes: list[int]) -> None:
    if out.fake_device.type == mode.ledger.device_type:
        mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))
