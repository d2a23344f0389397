"""Operators that are one kernel on the device, but several operators on fake tensors.

PyTorch also has a formula of other operators for each of them. It uses the formula where a device has no
kernel, such as CUDA in a PyTorch built without it, and where FakeTensorMode does not know the shapes of
results. The operators are those with kernels both for CUDA and for CompositeImplicitAutograd in PyTorch 2.13
built with CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tb_memplugin.estimate.kernels.kernel_buffers import copied_around
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches

aten = torch.ops.aten
HAS_RMS_NORM = hasattr(aten, "_fused_rms_norm_backward")
"""Older versions of torch have `_fused_rms_norm` only for other devices, with other arguments."""

ON_CUDA = ("silu_backward", "mish_backward", *(("_fused_rms_norm",) if HAS_RMS_NORM else ()))


class FusedKernels(Correction):
    """Runs the backward of `silu` and `mish`, and `rms_norm` on CUDA, as one kernel."""

    def rules(self) -> dict[Any, Rule]:
        """Return rules for the operators whose results FakeTensorMode does not know."""
        rules: dict[Any, Rule] = {aten.mish_backward.default: _mish_backward}
        if self.target.device_type == "cuda" and HAS_RMS_NORM:
            rules[aten._fused_rms_norm.default] = _fused_rms_norm
        return rules

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Register a CUDA kernel, so that autograd passes the operator to the mode undecomposed."""
        if self.target.device_type != "cuda":
            return
        for name in ON_CUDA:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                patches.register(name, _never_called, "CUDA")


def _never_called(*_: Any) -> None:
    raise AssertionError("fake tensors reach no kernel")


def _mish_backward(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return mode.quietly(aten.silu_backward.default, *args, **kwargs)  # its result has the same shape


def _fused_rms_norm(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the result, and a number for each row, in the accumulation dtype, which backward reads."""
    data, shape = args[0], args[1]
    rows = (*data.shape[: data.dim() - len(shape)], *(1 for _ in shape))
    dtype = torch.float64 if data.dtype is torch.float64 else torch.float32

    def run() -> tuple[Any, Any]:
        result = mode.quietly(aten.empty_like.default, data, memory_format=torch.contiguous_format)
        return result, mode.quietly(aten.empty.memory_format, rows, dtype=dtype, device=data.device)

    results: tuple[Any, Any] = copied_around(mode, func, data, run)
    return results
