"""Raise where real kernels do not take operands of two dtypes, but fake tensors on a GPU do.

A bf16 model that gets fp32 inputs is an example. Sources: the checks of Blas.cpp, Convolution.cpp and
TensorAdvancedIndexing.cpp in aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode

aten = torch.ops.aten

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
