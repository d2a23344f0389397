"""Errors for what an estimate cannot do, or what real kernels refuse but fake tensors on a GPU do not.

Those of torch for what fake tensors cannot do name the cause instead.
"""

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
from tb_memplugin.estimate.program.assumed_counts import not_taken
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
    """Raises an error like torch's own, which `mixes_types` explains."""

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


_FUNCTION = "Leave that part out of the estimate, or write it with plain tensors and operators."

_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        "Cannot access storage of SparseTensorImpl",
        "Sparse tensors",
        "Use dense gradients (nn.Embedding(sparse=False)).",
    ),
    ("self.shape_env must not be None", "Nested tensors (torch.jagged)", "Pad the sequences instead."),
    (
        "is already associated to a python object of type FakeTensor",
        "A subclass of torch.Tensor made of a plain tensor (as_subclass)",
        "Use plain tensors.",
    ),
    (
        "WeakValueDictionary.__init__.<locals>.remove",
        "Tensors that are pickled, as for another process,",
        "Leave that part out. torch.save writes nothing in an estimate.",
    ),
    ("no rule registered for HigherOrderOperator", "Control flow such as torch.cond", _FUNCTION),
    (
        "Pinned memory requires CUDA",
        "Pinned memory made by hand",
        "Leave pin_memory out: it is host memory, which is not estimated.",
    ),
    (
        "'torch._C' has no attribute '_c",  # _cuda_..., _cudart, _cudnn
        "Functions of PyTorch's CUDA builds that this build does not have",
        "Install a CUDA build of PyTorch, which needs no GPU here; or leave that part out.",
    ),
    (
        "but its data is not allocated yet",
        "A kernel of an extension that is not an operator of PyTorch",
        "Make it one with torch.library.custom_op, and give it a fake implementation with register_fake.",
    ),
    (
        "FloatTensor not available",
        "Constructors such as torch.cuda.FloatTensor",
        "Use torch.empty(..., device='cuda').",
    ),
    (
        "from the 'CUDA' backend. This could be because",
        "Tensors that another thread puts on the GPU",
        "Put them there on the estimate's thread; for from_pretrained of transformers, use from_config.",
    ),
)
"""(part of torch's message, the unsupported feature, the fix)."""


def by_name(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError for a known error of torch, None for any other error."""
    if not isinstance(error, (RuntimeError, AssertionError, AttributeError, TypeError)):
        return None
    if (refused := not_taken(error)) is not None:
        return refused
    text = str(error)[:2000]
    for part, cause, fix in _KNOWN:
        if part in text:
            return MemPluginError(f"{cause} cannot be estimated on fake tensors.", fix=fix)
    return None


_MIXED = ("expected scalar type", "to have the same dtype", "type (c10::", "Unsupported dtype")
"""Parts of torch's messages where an operator gets two dtypes, or a dtype that it does not support."""


def mixes_types(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError if a model's code does not run in its dtype, None for any other error."""
    text = str(error).strip()[:300]
    if not isinstance(error, RuntimeError) or not any(part in text for part in _MIXED):
        return None
    return MemPluginError(
        f"The model does not run in this dtype: {text.splitlines()[0]}. Real tensors are expected to "
        "fail there too.",
        fix=(
            "Use --dtype fp32; add --autocast bf16 for a forward in half precision. Or create the inputs in "
            "the model's dtype, which a function gets by a parameter named dtype."
        ),
    )


def mixes_devices(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError if a model's code mixes tensors of two devices, None for any other error."""
    text = str(error).strip()[:300]
    if "on the same device" not in text:
        return None
    return MemPluginError(
        f"The model mixes tensors of two devices: {text.splitlines()[0]} Real tensors are expected to "
        "fail there too.",
        fix=(
            "Give the function a parameter named device, and create the model and all its tensors there: "
            "model.to(device). torch.FloatTensor and similar constructors ignore torch.device."
        ),
    )


def names_by_value(error: BaseException) -> MemPluginError | None:
    """Return a MemPluginError if a model uses a tensor's value as a key or name, None for any other error."""
    if not isinstance(error, (KeyError, AttributeError)) or "FakeTensor(" not in str(error):
        return None
    return MemPluginError(
        "The model uses a tensor's value as a key or name, but fake tensors have no values: "
        f"{str(error)[:80]}.",
        fix=(
            "Only a real run knows the value (for example, which experts are chosen). Write that part so "
            "that it runs all of them, or use module:function with a model that does."
        ),
    )
