"""Record the copies that the CPU makes of matrices whose strides BLAS cannot read.

An example is the gradient of a sum, a single number expanded to a shape. Source: addmm_impl_cpu_ in
aten/src/ATen/native/LinearAlgebra.cpp. workspaces.py does the same for GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode

aten = torch.ops.aten

_BY_BLAS = (torch.float32, torch.float64)
"""Dtypes that BLAS computes. Half precision is computed by oneDNN, whose buffers are not known."""


class MatrixCopies(Correction):
    """Records the copies of matrix products on the CPU."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        return {aten.mm.default: _copied, aten.addmm.default: _copied}


def _copied(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    if out.fake_device.type != "cpu" or out.dtype not in _BY_BLAS:
        return
    matrices = [argument for argument in args if isinstance(argument, torch.Tensor) and argument.dim() == 2]
    sizes = [matrix.numel() * matrix.element_size() for matrix in matrices if not readable(matrix)]
    mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


def readable(matrix: torch.Tensor) -> bool:
    """Return whether BLAS can read a matrix: its rows or its columns are contiguous and do not overlap."""
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    by_rows = across == 1 and (down >= max(1, columns) or rows <= 1)
    by_columns = down == 1 and (across >= max(1, rows) or columns <= 1)
    return by_rows or by_columns
