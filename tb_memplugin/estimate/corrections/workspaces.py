"""cuBLAS workspaces: memory inside the allocator that no tensor owns.

PyTorch allocates a workspace for every cuBLAS handle and stream on the first matrix product, and never frees
it. A handle belongs to a thread: the program's thread has one and autograd's thread for the device another,
so inference takes one workspace and training two (aten/src/ATen/cuda/CublasHandlePool.cpp). cuBLASLt uses the
same memory, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 (torch/backends/cuda/__init__.py).

PyTorch first copies matrices whose strides cuBLAS cannot read (aten/src/ATen/native/cuda/Blas.cpp,
prepare_matrix_for_cublas), such as the gradient of a sum, which is one number expanded to a shape.
"""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.corrections.correction import Correction, Target
from tb_memplugin.estimate.corrections.matrix_copies import readable
from tb_memplugin.estimate.fake_ledger import Place
from tb_memplugin.estimate.fake_mode import After, CountingFakeMode
from tb_memplugin.estimate.gpu_spec import CUBLAS_WORKSPACE
from tb_memplugin.trace import Category, Phase

_PRODUCTS = (
    "mm",
    "addmm",
    "_addmm_activation",
    "bmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "vdot",
    "_scaled_mm",
    "_int_mm",
    "addr_",
)


_BY_CUBLASLT = ("aten::addmm", "aten::_addmm_activation", "aten::_scaled_mm", "aten::_int_mm")
"""Operators that cuBLASLt computes: layers with a bias, and 8-bit products."""


class Workspaces(Correction):
    """Allocates one workspace for each device and thread (forward or backward) that multiplies matrices."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._taken: set[tuple[int, bool]] = set()

    def after(self) -> dict[Any, After]:
        """Return a function for every operator that cuBLAS computes."""
        found: dict[Any, After] = {}
        for name in _PRODUCTS:
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                found[getattr(packet, overload)] = self._product
        return found

    def _product(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place
    ) -> None:
        device = getattr(out, "fake_device", None)
        if device is None or device.type != "cuda" or not out.numel():
            return
        if func._schema.name in _BY_CUBLASLT:
            self.target.note(
                "cuBLASLt (layers with a bias) shares the workspace of cuBLAS, which is counted. With "
                "TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 it has its own, which is not counted."
            )
        key = (mode.ledger.device_row(device), place.phase is Phase.BACKWARD)
        copies = [
            mode.held(matrix.numel() * matrix.element_size(), func, place, Category.TEMPORARY, key[0])
            for matrix in args
            if isinstance(matrix, torch.Tensor) and matrix.dim() >= 2 and not readable(matrix)
        ]
        if key not in self._taken:
            self._taken.add(key)
            if self.target.gpu is None:
                self.target.note(
                    "The size of cuBLAS workspaces depends on the GPU. No GPU was given, so each is "
                    "counted as 8,519,680 bytes, as before Hopper."
                )
            nobody = Place(-1, place.phase)
            mode.held(self._size(), func, nobody, Category.WORKSPACE, key[0])
        for block in copies:
            mode.ledger.give_back(block, place)

    def _size(self) -> int:
        return self.target.gpu.cublas_workspace_bytes if self.target.gpu is not None else CUBLAS_WORKSPACE
