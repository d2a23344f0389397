"""Record the copies that convolutions on a GPU make, and how they sum the gradient of the bias.

cuDNN reads all operands in one memory format, which is channels-last if the input or the weight is. Sources
in aten/src/ATen/native: Convolution.cpp, ConvUtils.h (cudnn_conv_suggest_memory_format), and
cudnn/ConvShared.cpp.
Inputs without height are copied in the usual format (Convolution.cpp, _convolution).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from tb_memplugin.estimate.corrections.block_reductions import Layout
from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.corrections.reductions import Reducer
from tb_memplugin.estimate.fake_ledger import Place
from tb_memplugin.estimate.fake_mode import After, CountingFakeMode, Rule

aten = torch.ops.aten

_USUAL = torch.contiguous_format


class Convolutions(Correction):
    """Records what the forward and the backward of a convolution hold besides results."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for the backward, which allocates its results one after the other."""
        return {aten.convolution_backward.default: self._backward}

    def after(self) -> dict[Any, After]:
        """Return a function for the forward."""
        return {aten.convolution.default: _forward}

    def _backward(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        results = mode.quietly(func, *args, **kwargs)
        gradient, given, weight = args[:3]
        if results is NotImplemented or gradient.device.type != "cuda":
            return results
        place, row = mode.layers.place(), mode.ledger.device_row(gradient.device)
        form = _format(given, weight)
        read = (given, gradient) if results[1] is not None else (gradient, weight)
        if results[0] is not None or results[1] is not None:
            mode.see(results[:2], func)
            mode.passing([copied_bytes(one, form) for one in read], func, place, row)
        if results[2] is not None:
            mode.see(results[2:], func)
            kept = [axis for axis in range(gradient.dim()) if axis != 1]
            Reducer(self.target).record(mode, func, place, row, Layout.of(gradient), kept)
        return results


def _forward(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    given, weight = args[:2]
    if out.device.type == "cuda":
        form = _format(given, weight)
        sizes = [copied_bytes(one, form) for one in (given, weight)]
        mode.passing(sizes, func, place, mode.ledger.device_row(out.device))


def _format(given: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return the memory format in which the operands are read."""
    if given.dim() < 4 or given.dtype is torch.float64:
        return _USUAL
    forms = (suggest_memory_format(given), suggest_memory_format(weight))
    return next((form for form in forms if form is not _USUAL), _USUAL)


def copied_bytes(tensor: torch.Tensor, form: torch.memory_format) -> int:
    """Return the bytes of a copy in a memory format, 0 if the tensor is in it already."""
    return 0 if tensor.is_contiguous(memory_format=form) else tensor.numel() * tensor.element_size()
