"""What an estimate cannot do, said by name and with what to do instead."""

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
from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.patches import Patches

aten = torch.ops.aten

_DATA_FIX = (
    "Leave that part out of the estimate, or give it tensors that do not depend on values (a mask that is "
    "multiplied instead of selecting, lengths as Python numbers)."
)


class Refusals(Correction):
    """The last correction: whatever no other one knew."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Errors are raised; torch would also write their tracebacks to its log."""
        patches.set(logging.getLogger(fake_tensor.__name__), "disabled", True)

    def rules(self) -> dict[Any, Rule]:
        """Quantized tensors: their fake rules give tensors of float32, four times as large."""
        packets = (aten.quantize_per_tensor, aten.quantize_per_channel, aten.quantize_per_tensor_dynamic)
        return {getattr(one, overload): _quantized for one in packets for overload in one.overloads()}

    def refusal(self, func: Any, error: Exception) -> Exception | None:
        """Our error for FakeTensorMode's."""
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            return MemPluginError(
                f"{func} depends on values, which fake tensors do not have.", where=str(func), fix=_DATA_FIX
            )
        if isinstance(error, UnsupportedOperatorException):
            return MemPluginError(
                f"{func} has no fake rule: what it allocates is not known.",
                where=str(func),
                fix="Register one with torch.library.register_fake, or leave that part out of the estimate.",
            )
        if isinstance(error, NotImplementedError) and "fake" in str(error).lower():
            return MemPluginError(
                f"{func} has no fake rule: {str(error).splitlines()[0]}",
                where=str(func),
                fix="Register one with torch.library.register_fake.",
            )
        if _started_a_kernel(error):
            return MemPluginError(
                f"{func} has no fake rule here: its kernel would be started.",
                where=str(func),
                fix="Leave that part out, or register a rule with torch.library.register_fake.",
            )
        return None


def _quantized(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    raise MemPluginError(
        f"{func} makes a quantized tensor: its fake rule does not.",
        where=str(func),
        fix="Estimate with int8 tensors and scales of their own, as quantization of weights alone has them.",
    )


def _started_a_kernel(error: Exception) -> bool:
    """FakeTensorMode's last resort; a build with CUDA and no GPU fails in it with CUDA's own error."""
    if isinstance(error, NotImplementedError):
        return str(error).startswith("Could not run 'aten::")
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
