"""cuBLAS workspaces: memory inside the allocator that no tensor owns.

Until 2.14, PyTorch allocates a workspace for every cuBLAS handle and stream on the first matrix product,
and never frees it. A handle belongs to a thread: the program's thread has one and autograd's thread for the
device another, so inference takes one workspace and training two. cuBLASLt uses the same memory, or its own:
that depends on the version and on TORCH_CUBLASLT_UNIFIED_WORKSPACE (`lt_workspace`). Since 2.15, each product
allocates its own and frees it at once, and cuBLASLt's are smaller (aten/src/ATen/cuda/CublasHandlePool.cpp).

PyTorch first copies matrices whose strides cuBLAS cannot read (aten/src/ATen/native/cuda/Blas.cpp,
prepare_matrix_for_cublas), such as the gradient of a sum, which is one number expanded to a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tb_memplugin.estimate.kernels.copies import is_read_by_blas
from tb_memplugin.estimate.kernels.table import HALVES, operators
from tb_memplugin.estimate.run.correction import Correction, Target
from tb_memplugin.estimate.run.fake_ledger import Block, Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.read.cublas import (
    LT_WORKSPACE,
    WORKSPACE,
    LtWorkspace,
    keeps_workspaces,
    lt_needs_cublas,
    lt_workspace,
)
from tb_memplugin.trace import Category, Phase

_PRODUCTS = (
    *("mm", "addmm", "addmm_", "_addmm_activation", "bmm", "baddbmm", "baddbmm_", "addbmm", "mv", "addmv"),
    *("addmv_", "dot", "vdot", "_scaled_mm", "_euclidean_dist", "_trilinear", "affine_grid_generator"),
)
"""Operators that multiply matrices, some among other things."""

_WITH_A_BIAS = ("aten::addmm", "aten::_addmm_activation")
"""Products that cuBLASLt computes if the operands suit it; it computes `_scaled_mm` always."""

_BY_CUBLASLT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Workspaces(Correction):
    """Allocates a workspace for each device, stream and thread (forward, backward), or for each product."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._kept: dict[tuple[int, int, bool, int], Block] = {}

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Let programs free the workspaces, as some do before they capture a CUDA graph."""

        def clear() -> None:
            scope = mode.layers.scope()
            mode.settle(scope)
            while self._kept:
                mode.ledger.free(self._kept.popitem()[1], scope)

        patches.set(torch._C, "_cuda_clearCublasWorkspaces", clear)

    def after(self) -> dict[Any, After]:
        """Return a function for every operator that cuBLAS computes."""
        return dict.fromkeys(operators(*(f"{name}.*" for name in _PRODUCTS)), self._product)

    def _product(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        device = getattr(out, "fake_device", None)
        matrices = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if device is None or device.type != "cuda" or not out.numel() or not all(m.numel() for m in matrices):
            return
        row = mode.ledger.device_row(device)
        copies = [
            mode.allocate(matrix.nbytes, func, scope, Category.TEMPORARY, row)
            for matrix in matrices
            if matrix.dim() >= 2 and not is_read_by_blas(matrix)
        ]
        self._workspace(mode, func, matrices, scope, row)
        for block in copies:
            mode.ledger.free(block, scope)

    def _workspace(
        self, mode: CountingFakeMode, func: Any, matrices: Sequence[torch.Tensor], scope: Scope, row: int
    ) -> None:
        torch_of_target = self.target.gpu.torch if self.target.gpu is not None else None
        if not _suits_cublaslt(func._schema.name, matrices):
            self._allocate(mode, func, scope, row, self._size(), keeps=keeps_workspaces(torch_of_target))
            return
        if lt_needs_cublas(torch_of_target):
            self._allocate(mode, func, scope, row, self._size(), keeps=True)
        if (lives := lt_workspace(torch_of_target)) is not LtWorkspace.SHARED:
            self._allocate(mode, func, scope, row, LT_WORKSPACE, keeps=lives is LtWorkspace.KEPT)

    def _allocate(
        self, mode: CountingFakeMode, func: Any, scope: Scope, row: int, size: int, *, keeps: bool
    ) -> None:
        """Allocate a workspace: on the first product of a thread and stream, or for this product alone."""
        if not keeps:
            mode.ledger.free(mode.allocate(size, func, scope, Category.WORKSPACE, row), scope)
            return
        key = (row, mode.ledger.stream(), scope.phase is Phase.BACKWARD, size)
        if key not in self._kept:
            outside = Scope(-1, scope.phase)
            self._kept[key] = mode.allocate(size, func, outside, Category.WORKSPACE, row)

    def _size(self) -> int:
        if self.target.gpu is not None:
            return self.target.gpu.cublas_workspace_bytes
        self.target.note(
            "The size of cuBLAS workspaces depends on the GPU. No GPU was given, so each is "
            f"counted as {WORKSPACE:,} bytes, as before Hopper."
        )
        return WORKSPACE


def _suits_cublaslt(name: str, matrices: Sequence[torch.Tensor]) -> bool:
    """Return whether cuBLASLt computes a product: with a bias, see isInputCompliesAddmmCudaLt in Blas.cpp.

    A `beta` other than 1, with which it does not, is not seen.
    """
    if name == "aten::_scaled_mm":
        return True
    if name not in _WITH_A_BIAS or len(matrices) != 3:
        return False
    bias, left, right = matrices
    if right.dtype not in _BY_CUBLASLT or min(right.shape) < 2:
        return False
    row = bias.is_contiguous() and bias.squeeze().dim() == 1 and bias.shape[-1] == right.shape[1]
    matrix = bias.shape == (left.shape[0], right.shape[1]) and right.dtype in HALVES
    return row or matrix or name == "aten::_addmm_activation"
