"""What factorizations and solvers of torch.linalg allocate on a GPU, but for the workspaces of cuSOLVER.

Sources in aten/src/ATen/native: BatchLinearAlgebra.cpp and LinearAlgebra.cpp, and in cuda/linalg
BatchLinearAlgebra.cpp and BatchLinearAlgebraLib.cpp, which choose cuBLAS or cuSOLVER by size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tb_memplugin.estimate.kernels.copies import within
from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel, Outliving, copied_bytes, operators

if TYPE_CHECKING:
    from tb_memplugin.estimate.run.fake_mode import CountingFakeMode

_INFO, _INDEX, _POINTER = 4, 8, 8
"""Bytes of a matrix's error code, of an index, and of a pointer to a matrix."""

_SMALL_SVD = 32
"""Matrices of up to this many rows and columns are decomposed as one batch (svd_cusolver)."""


def _count(matrices: torch.Tensor) -> int:
    return math.prod(matrices.shape[:-2])


def _pointers(count: int) -> list[int]:
    """Return the pointers to the matrices of two operands, as cuBLAS takes them."""
    return [_POINTER * count] * 2


def _triangular(size: int, count: int) -> list[int]:
    """Return what a triangular system takes besides its result (triangular_solve_kernel)."""
    return [] if count <= 8 and size >= 64 else _pointers(count)


def _permutation(size: int, count: int) -> Buffers:
    """Return the permutation of each matrix's rows, which outlives the row from which it is made."""
    row = _INDEX * size
    return [Outliving(row)] if count == 1 else [row, Outliving(row * count)]


def _solved(size: int, columns: int, count: int, element_size: int, *, adjoint: bool = False) -> Buffers:
    """Return what solving with LU factors takes besides its result (lu_solve_kernel)."""
    batched = size <= 16
    if size != columns:
        few = 64 if size <= 64 else 2
        if 8 < size <= 128 and count <= 2 and (columns <= few or size <= 32 or (adjoint and size <= 64)):
            return [_INFO]
        batched = size <= 8 or (size <= 64 and columns <= 8) or (size <= 128 and columns <= 2)
    if batched:
        return _pointers(count)
    systems, right = _triangular(size, count), element_size * size * columns * count
    if adjoint:
        return [_permutation(size, count), systems, right]
    row = _INDEX * size
    return [_permutation(size, count), row, row * count, right, *systems]


def _factored(matrices: torch.Tensor) -> Buffers:
    """Return the pointers of small square matrices, which are factored as one batch (lu_factor)."""
    rows, columns = matrices.shape[-2:]
    count = _count(matrices)
    return [_POINTER * count] if rows == columns <= 128 and count > 1 else []


def _inverted(call: Call) -> Buffers:
    matrices: torch.Tensor = call["A"]
    size, count = matrices.shape[-1], _count(matrices)
    solved = _solved(size, size, count, matrices.element_size())
    return [matrices.nbytes, 4 * size * count, _factored(matrices), *solved]


def _solved_exactly(call: Call) -> Buffers:
    result, factors = call.out[:2]
    size, count = factors.shape[-1], _count(factors)
    columns = result.numel() // max(size * count, 1)
    solved = _solved(size, columns, count, result.element_size(), adjoint=not call["left"])
    return [_factored(factors), solved]


def _solved_by_factors(call: Call) -> Buffers:
    factors, result = call["LU"], call.out
    rows, columns = result.shape[-2:]
    adjoint = call["adjoint"] or not call["left"]
    size, other = (rows, columns) if call["left"] else (columns, rows)
    count = _count(result)
    return [copied_bytes(factors.mT), *_solved(size, other, count, result.element_size(), adjoint=adjoint)]


def _determinant(call: Call) -> Buffers:
    """Return errors, the product of the diagonal, and what counts the exchanged rows."""
    result, factors = call.out[:2]
    return [_INFO * _count(factors), _factored(factors), result.nbytes, _exchanged(factors)]


def _logarithm(call: Call) -> Buffers:
    """Return errors, what counts the exchanged rows, and signs and lengths of the diagonal."""
    result, real, factors = call.out[:3]
    size = factors.shape[-1]
    lengths = [size * real.nbytes, size * result.nbytes if result.is_complex() else 0]
    signs = [size * result.nbytes, result.nbytes]
    errors = _INFO * _count(factors)
    return [errors, _factored(factors), _exchanged(factors), signs, lengths]


def _exchanged(factors: torch.Tensor) -> list[int]:
    size, count = factors.shape[-1], _count(factors)
    return [4 * size, size * count, _INDEX * count, _INDEX * size * count]


def _singular(call: Call) -> Buffers:
    return _decomposed(call["A"], with_vectors=call["compute_uv"], full=call["full_matrices"])


def _decomposed(matrices: torch.Tensor, *, with_vectors: bool, full: bool) -> list[int]:
    """Return errors, a copy of the matrices, and vectors that nobody asked for."""
    rows, columns = matrices.shape[-2:]
    count, size, fewer = _count(matrices), matrices.element_size(), min(rows, columns)
    is_small, square = max(rows, columns) <= _SMALL_SVD, max(rows, columns) ** 2
    vectors: list[int] = []
    if not with_vectors:
        each = (rows * rows, columns * columns) if is_small else (rows * fewer, columns * fewer)
        vectors = [number * size * (count if is_small else 1) for number in each]
    elif is_small and rows != columns and not full:
        vectors = [square * count * size]
    return [_INFO * count, matrices.nbytes, *vectors]


def _inverted_by_singular_values(call: Call) -> Buffers:
    """Return tolerances, the decomposition, inverse values, and the vectors that they scale."""
    matrices: torch.Tensor = call["self"]
    (rows, columns), count, size = matrices.shape[-2:], _count(matrices), matrices.element_size()
    numbers = min(rows, columns) * count
    left, right, values = rows * numbers * size, columns * numbers * size, numbers * _real_bytes(matrices)
    parts = [left, right, values, _decomposed(matrices, with_vectors=True, full=False), _INDEX * count]
    scaled = [numbers * size, right, left] if matrices.is_complex() else [right]
    return [[_INDEX, _INDEX, *parts, [_real_bytes(matrices), values, numbers], values, *scaled, call.out]]


def _real_bytes(matrices: torch.Tensor) -> int:
    return matrices.element_size() // (2 if matrices.is_complex() else 1)


def _eigenvalues(call: Call) -> Buffers:
    matrices: torch.Tensor = call["A"]
    errors = _INFO * _count(matrices)
    return [errors] if call["compute_v"] else [matrices.nbytes, errors]


def _orthogonal(call: Call) -> Buffers:
    """Return the factors of Householder's reflections, and what computes them."""
    matrices: torch.Tensor = call["A"]
    factors = min(matrices.shape[-2:]) * _count(matrices) * matrices.element_size()
    return [factors, _pointers(_count(matrices)) if _is_batched(matrices) else [_INFO]]


def _is_batched(matrices: torch.Tensor) -> bool:
    """Whether cuBLAS reflects all matrices at once (geqrf_kernel)."""
    rows = matrices.shape[-2]
    return rows <= 256 and _count(matrices) >= max(2, rows // 16)


def _inverted_factor(call: Call) -> Buffers:
    matrices: torch.Tensor = call["self"]
    count = _count(matrices)
    more = [_INFO, matrices.nbytes] if count == 1 else _triangular(matrices.shape[-1], count)
    return [matrices.nbytes, *more]


def _solved_by_factor(call: Call) -> Buffers:
    matrices: torch.Tensor = call["input2"]
    count, systems = _count(matrices), _triangular(matrices.shape[-1], _count(matrices))
    if count == 1:
        return [_INFO, matrices.nbytes]
    return [systems, [matrices.nbytes if matrices.is_complex() else 0, *systems]]


def _factored_by_cholesky(call: Call) -> Buffers:
    count = _count(call["self"])
    return [_POINTER * count] if count > 1 else []


def _solved_directly(call: Call) -> Buffers:
    return _triangular(call["self"].shape[-1], _count(call["self"]))


def _divided(call: Call) -> Buffers:
    """Return the factors that `torch.linalg.lu` unpacks, and the permutation of their rows."""
    matrices: torch.Tensor = call["A"]
    count, numbers = _count(matrices), 4 * min(matrices.shape[-2:]) * _count(matrices)
    factored: Buffers = [matrices.nbytes, numbers, _INFO * count, _factored(matrices)]
    return [factored, [_permutation(matrices.shape[-2], count)]]


def _least_squares(call: Call) -> Buffers:
    """Return errors, a copy of the matrices, what solves them, and the residuals (linalg_lstsq_gels)."""
    matrices: torch.Tensor = call["self"]
    (rows, columns), count, (solution, residuals) = matrices.shape[-2:], _count(matrices), call.out[:2]
    factors = min(rows, columns) * count * matrices.element_size()
    copied = matrices.nbytes if rows < columns else 0
    if _is_batched(matrices) and rows >= columns:
        solved: Buffers = [matrices.nbytes, *_pointers(count)]
    else:
        systems = _triangular(min(rows, columns), count)
        solved = [factors, copied, [_INFO], systems]
    squares = residuals.numel() * (rows - columns) * matrices.element_size() if matrices.is_complex() else 0
    return [_INFO * count, solution, matrices.nbytes, solved, [squares], residuals]


def _solution(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the solution in the memory of the larger of rows and columns, and what `gels` leaves empty."""
    matrices, right = args[:2]
    rows, columns = matrices.shape[-2:]
    is_vector = right.dim() == 1 or right.shape == matrices.shape[:-1]
    many = right.unsqueeze(-1) if is_vector else right
    batch, others = torch.broadcast_shapes(matrices.shape[:-2], many.shape[:-2]), many.shape[-1]

    def empty(*shape: int, dtype: torch.dtype = right.dtype) -> Any:
        return mode.quietly(torch.ops.aten.empty.memory_format, list(shape), dtype=dtype, device=right.device)

    solution = empty(*batch, columns, *(() if is_vector else (others,)))
    if rows > columns:
        solution = within(mode, solution, math.prod(batch) * rows * others)
    residuals = empty(*batch, others) if rows > columns else empty(0)
    real = right.real.dtype if right.is_complex() else right.dtype
    return solution, residuals, empty(0, dtype=torch.int64), empty(0, dtype=real)


def _exponential(call: Call) -> Buffers:
    """Return the powers and sums of the highest degree, 18, as for matrices of a large norm (mexp_impl)."""
    matrices: torch.Tensor = call["self"]
    size, count = matrices.nbytes, _count(matrices)
    number = _real_bytes(matrices)
    scaled = [*[number * count] * 3, 5 * 5 * number, size, 5 * size, 5 * size]
    if matrices.shape[-1] == 1:
        return ()
    return [_INDEX, number, size, *scaled] if count == 1 else [scaled, call.out]


def _row(name: str, buffers: Callable[[Call], Buffers], source: str, **options: Any) -> Kernel:
    return Kernel(operators(name), buffers, source=source, rare="programs that factor matrices", **options)


_LIBRARY = "cuda/linalg/BatchLinearAlgebraLib.cpp"

KERNELS = (
    _row("linalg_lu_factor_ex", lambda call: _factored(call["A"]), f"{_LIBRARY}:lu_factor_batched_cublas"),
    _row("linalg_inv_ex", _inverted, "BatchLinearAlgebra.cpp:linalg_inv_ex_out"),
    _row("_linalg_solve_ex", _solved_exactly, "BatchLinearAlgebra.cpp:_linalg_solve_ex_out"),
    _row("linalg_lu_solve", _solved_by_factors, "BatchLinearAlgebra.cpp:linalg_lu_solve_out"),
    _row("linalg_lu", _divided, "BatchLinearAlgebra.cpp:linalg_lu_out"),
    _row("_linalg_det", _determinant, "LinearAlgebra.cpp:_linalg_det_out"),
    _row("_linalg_slogdet", _logarithm, "LinearAlgebra.cpp:_linalg_slogdet_out"),
    _row("_linalg_svd", _singular, f"{_LIBRARY}:svd_cusolver"),
    _row("_linalg_eigh", _eigenvalues, "BatchLinearAlgebra.cpp:_linalg_eigh_out"),
    _row("linalg_qr", _orthogonal, "BatchLinearAlgebra.cpp:linalg_qr_out"),
    _row("linalg_cholesky_ex", _factored_by_cholesky, f"{_LIBRARY}:cholesky_helper_cusolver"),
    _row("cholesky_inverse", _inverted_factor, f"{_LIBRARY}:cholesky_inverse_kernel_impl_cusolver"),
    _row("cholesky_solve", _solved_by_factor, f"{_LIBRARY}:_cholesky_solve_helper_cuda_cusolver"),
    _row(
        "linalg_solve_triangular",
        _solved_directly,
        "cuda/linalg/BatchLinearAlgebra.cpp:triangular_solve_kernel",
    ),
    _row(
        "linalg_lstsq",
        _least_squares,
        "cuda/linalg/BatchLinearAlgebra.cpp:linalg_lstsq_gels",
        results=_solution,
    ),
    _row("linalg_pinv.atol_rtol_tensor", _inverted_by_singular_values, "LinearAlgebra.cpp:linalg_pinv"),
    _row("linalg_matrix_exp", _exponential, "LinearAlgebra.cpp:mexp_impl"),
)
