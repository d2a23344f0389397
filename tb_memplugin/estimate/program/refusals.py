"""Errors for what an estimate cannot do, or what real kernels refuse but fake tensors on a GPU do not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches

aten = torch.ops.aten

_DATA_FIX = (
    "Leave that part out of the estimate, or use tensors whose shapes do not depend on values "
    "(multiply by a mask instead of selecting with it; give lengths as Python numbers)."
)


class Refusals(Correction):
    """The last correction: it handles the errors that no other correction handled."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Turn off torch's own log, which would repeat the tracebacks of errors that are raised."""
        patches.set(logging.getLogger(fake_tensor.__name__), "disabled", True)

    def rules(self) -> dict[Any, Rule]:
        """Return rules that refuse quantized tensors: torch's fake ones are float32, four times as large."""
        packets = (aten.quantize_per_tensor, aten.quantize_per_channel, aten.quantize_per_tensor_dynamic)
        return {
            getattr(packet, overload): _quantized for packet in packets for overload in packet.overloads()
        }

    def refusal(self, func: Any, error: Exception) -> Exception | None:
        """Return a MemPluginError for a known error of FakeTensorMode, None for any other error."""
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            return MemPluginError(
                f"{func} depends on values, but fake tensors have no values.", where=str(func), fix=_DATA_FIX
            )
        if isinstance(error, UnsupportedOperatorException) or "no fake impl registered" in str(error):
            return MemPluginError(
                f"{func} has no fake implementation, so what it allocates is not known.",
                where=str(func),
                fix="Register one with torch.library.register_fake, or leave that part out of the estimate.",
            )
        if isinstance(error, NotImplementedError) and "fake" in str(error).lower():
            return MemPluginError(
                f"{func} has no fake implementation: {str(error).splitlines()[0]}",
                where=str(func),
                fix="Register one with torch.library.register_fake.",
            )
        if _started_a_kernel(error):
            return MemPluginError(
                f"{func} has no fake implementation here, so its real kernel would run.",
                where=str(func),
                fix=(
                    "Leave that part out, or register a fake implementation with torch.library.register_fake."
                ),
            )
        return None


def _quantized(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    raise MemPluginError(
        f"{func} creates a quantized tensor, but its fake implementation does not.",
        where=str(func),
        fix="Use int8 tensors with separate scales, as weight-only quantization does.",
    )


def _started_a_kernel(error: Exception) -> bool:
    """Whether FakeTensorMode fell back to running the real kernel.

    In a CUDA build without a GPU this fails with an error of CUDA.
    """
    if isinstance(error, NotImplementedError):
        return str(error).startswith("Could not run 'aten::")
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


_OPERANDS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
    aten._scaled_dot_product_flash_attention.default: (0, 1, 2),
    aten._scaled_dot_product_efficient_attention.default: (0, 1, 2),
    aten._scaled_dot_product_cudnn_attention.default: (0, 1, 2),
    aten.index_add.default: (0, 3),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
}
"""By operator, the positions of the arguments whose dtypes must be the same."""


class SameDtypes(Correction):
    """Raises an error like torch's own, which `mixes_types` in named_errors.py explains."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        return dict.fromkeys(_OPERANDS, _checked)


def _checked(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    operands = (args[row] for row in _OPERANDS[func] if row < len(args))
    dtypes = {str(operand.dtype).removeprefix("torch.") for operand in operands if operand is not None}
    if len(dtypes) > 1:
        raise RuntimeError(
            f"expected the operands of {func} to have the same dtype, but got {sorted(dtypes)}"
        )
