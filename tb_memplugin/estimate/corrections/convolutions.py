"""Record the copies that convolutions on a GPU make, and how they sum the gradient of the bias.

cuDNN reads all operands in one memory format, which is channels-last if the input or the weight is. Sources
in aten/src/ATen/native: Convolution.cpp, ConvUtils.h (cudnn_conv_suggest_memory_format), and
cudnn/ConvShared.cpp.
Inputs without height are copied in the usual format (Convolution.cpp, _convolution).

How large a workspace is depends on the kernel that cuDNN chooses, so none is counted. A note says what they
may add to the peak: in the usual format, many kernels copy input, weight and result into channels-last
(docs/estimate.md says how often that is so).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from tb_memplugin.estimate.corrections.block_reductions import Layout
from tb_memplugin.estimate.corrections.correction import Correction, Target
from tb_memplugin.estimate.corrections.reductions import Reducer
from tb_memplugin.estimate.fake_ledger import Place
from tb_memplugin.estimate.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.estimate.patches import Patches

aten = torch.ops.aten

_USUAL = torch.contiguous_format
_HALF = (torch.float16, torch.bfloat16)
_NOTE = (
    "Convolutions: cuDNN's workspaces are not counted, since it chooses among kernels. If each were as large "
    "as input, weight and result together (0 for channels-last in half precision), the allocated peak would "
    "be {:,} bytes higher. Reserved memory can grow more. torch.backends.cudnn.benchmark tries larger ones."
)


class Convolutions(Correction):
    """Records what the forward and the backward of a convolution hold besides results.

    `_most` is the most bytes of each device that would be allocated during a convolution with a workspace.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._most: dict[int, int] = {}

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Add the note when the run ends, since only then is the peak known."""
        patches.on_undo(lambda: self._tell(mode))

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for the backward, which allocates its results one after the other."""
        return {aten.convolution_backward.default: self._backward}

    def after(self) -> dict[Any, After]:
        """Return a function for the forward."""
        return {aten.convolution.default: self._forward}

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
            self._run(mode, func, read, form, workspace_bytes(given, weight, gradient, args[9]), place, row)
        if results[2] is not None:
            mode.see(results[2:], func)
            kept = [axis for axis in range(gradient.dim()) if axis != 1]
            Reducer(self.target).record(mode, func, place, row, Layout.of(gradient), kept)
        return results

    def _forward(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place
    ) -> None:
        given, weight = args[:2]
        if out.device.type == "cuda":
            row, size = mode.ledger.device_row(out.device), workspace_bytes(given, weight, out, args[8])
            self._run(mode, func, (given, weight), _format(given, weight), size, place, row)

    def _run(
        self,
        mode: CountingFakeMode,
        func: Any,
        read: Sequence[torch.Tensor],
        form: torch.memory_format,
        workspace: int,
        place: Place,
        row: int,
    ) -> None:
        """Record the copies of what a kernel reads, and what its workspace would add to them."""
        sizes = [copied_bytes(one, form) for one in read]
        mode.passing(sizes, func, place, row)
        level = mode.ledger.allocated[row] + sum(sizes) + workspace
        self._most[row] = max(level, self._most.get(row, 0))

    def _tell(self, mode: CountingFakeMode) -> None:
        if self._most:
            more = max(most - mode.ledger.peaks[row] for row, most in self._most.items())
            self.target.note(_NOTE.format(max(more, 0)))


def _format(given: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return the memory format in which the operands are read."""
    if given.dim() < 4 or given.dtype is torch.float64:
        return _USUAL
    forms = (suggest_memory_format(given), suggest_memory_format(weight))
    return next((form for form in forms if form is not _USUAL), _USUAL)


def copied_bytes(tensor: torch.Tensor, form: torch.memory_format) -> int:
    """Return the bytes of a copy in a memory format, 0 if the tensor is in it already."""
    return 0 if tensor.is_contiguous(memory_format=form) else tensor.numel() * tensor.element_size()


def workspace_bytes(given: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int) -> int:
    """Return the bytes that a workspace usually has at most, but for 16 MiB: those of copies of all three.

    Kernels for channels-last in half precision need no copies. PyTorch's own kernels, which need no
    workspace, compute depthwise convolutions in the usual format (Convolution.cpp, use_cudnn_depthwise).
    """
    usual = _format(given, weight) is _USUAL
    needs_none = 1 < groups == given.shape[1] if usual else given.dtype in _HALF
    return 0 if needs_none else sum(one.numel() * one.element_size() for one in (given, weight, result))
