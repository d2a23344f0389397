"""Notes on kernels whose own memory is not known, added when a program runs them."""

from __future__ import annotations

from typing import Any

from tb_memplugin.estimate.kernels.table import operators
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_EFFICIENT = (
    "scaled_dot_product_attention uses the memory-efficient kernel. The workspace of its backward is "
    "not known and not counted."
)
_BATCH_NORM = (
    "Batch normalization: cuDNN's workspaces in channels_last, and what it keeps for backward in half "
    "precision, are not known and not counted. For 9,031,680 numbers of 45 channels in fp32, an H200 took "
    "1,242,940 bytes in forward and 804,012 in backward."
)
_SELECTING = "The buffers of unique, nonzero and masked_select on a GPU are not known and not counted."
FOURIER = "Fourier transforms: cuFFT's workspaces are not known and not counted."
SPARSE = "Products with sparse matrices: cuSPARSE's workspaces are not known and not counted."
SOLVERS = (
    "Factorizations and solvers of torch.linalg: the workspaces of cuSOLVER, cuBLAS and MAGMA are not known "
    "and not counted."
)
_EXPONENTIAL = (
    "torch.matrix_exp is counted as for matrices of a large norm: with its result, a single matrix takes 13 "
    "times its size and a batch 11 times. A single one of a small norm takes less."
)
_BILINEAR = "nn.Bilinear: the products of its inputs, which its kernel holds for a moment, are not counted."

_MET: dict[str, tuple[str, ...]] = {
    _EFFICIENT: ("_scaled_dot_product_efficient_attention_backward",),
    _BATCH_NORM: ("cudnn_batch_norm",),
    _SELECTING: ("_unique2", "nonzero", "masked_select"),
    _EXPONENTIAL: ("linalg_matrix_exp",),
    _BILINEAR: ("_trilinear",),
    FOURIER: ("_fft_r2c", "_fft_c2r", "_fft_c2c"),
    SOLVERS: (
        *("linalg_cholesky_ex", "cholesky_inverse", "cholesky_solve", "_linalg_eigh", "linalg_eig"),
        *("linalg_inv_ex", "linalg_lu_factor_ex", "linalg_lu_solve", "_linalg_det", "_linalg_slogdet"),
        *("_linalg_solve_ex", "_linalg_svd", "linalg_lstsq", "linalg_qr"),
    ),
}


_ON_THE_CPU = (
    "On the CPU, what kernels allocate beside their results is not known in advance and not counted: "
    "buffers of oneDNN (convolutions, batch normalization, recurrent layers, matrix products in half "
    "precision), and numbers of 4 and 8 bytes that torch makes tensors of. MemoryTracer counts them "
    "in a real run."
)


class CpuKernels(Correction):
    """Adds a note on what an estimate for the CPU leaves out."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Add the note to every estimate for the CPU."""
        self.target.note(_ON_THE_CPU)


class Unknown(Correction):
    """Adds a note for each kind of kernel whose own memory is not known."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator that such kernels compute; it adds the note."""
        return {
            operator: self._noting(note) for note, names in _MET.items() for operator in operators(*names)
        }

    def _noting(self, note: str) -> After:
        def tell(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
            self.target.note(note)

        return tell
