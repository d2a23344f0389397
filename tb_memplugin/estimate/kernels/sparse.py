"""Sparse tensors (COO), as gradients of embeddings and adjacency matrices of graphs: indices and values.

FakeTensorMode's own have no elements. Here a wrapper holds fake indices and fake values, and computes with
these what the kernels of aten/src/ATen/native/sparse/cuda compute with them (read in 2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.kernels.uncounted import SPARSE
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.known_values import values_of
from tb_memplugin.record.torch_private.autograd import current_node

aten = torch.ops.aten


class SparseTensors(Correction):
    """Makes a tensor of indices and values where a program or a derivative does."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for the operator with which every such tensor begins."""
        return {
            aten._sparse_coo_tensor_with_dims_and_tensors.default: self._sparse,
            aten._embedding_bag_backward.default: _of_bags,
        }

    def _sparse(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        _, _, size, indices, values = args
        return FakeSparse(indices, values, size, bool(kwargs.get("is_coalesced")), self.target.note)


def _of_bags(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the gradient of `nn.EmbeddingBag`; if sparse, after the operators of its formula."""
    if not args[9]:
        return mode.quietly(func, *args, **kwargs)
    grad, indices, offsets, rows_of_bags, bag_sizes, _, count, by_frequency, reduction, _, weights, *rest = (
        args
    )
    sparse = aten._embedding_bag_sparse_backward.default
    with mode.running(recorded=True):
        return sparse.decompose(
            *(grad, indices, offsets, rows_of_bags, bag_sizes, count, by_frequency, reduction, weights), *rest
        )


class FakeSparse(torch.Tensor):
    """A sparse tensor of fake indices and fake values.

    Args:
        indices: (sparse dimensions, elements), int64.
        values: (elements, *dense dimensions).
        size: its shape.
        coalesced: whether no index occurs twice.
        note: takes sentences on what is assumed.
    """

    computes_itself = True
    """Fake modes leave it all operators, also those that FakeTensorMode would ask torch's C++ code."""

    indices_: torch.Tensor
    values_: torch.Tensor
    coalesced: bool
    note: Callable[[str], object]

    def __new__(
        cls,
        indices: torch.Tensor,
        values: torch.Tensor,
        size: Sequence[int],
        coalesced: bool,
        note: Callable[[str], object],
    ) -> FakeSparse:
        """Return the wrapper, which has no memory of its own."""
        sparse: FakeSparse = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=values.dtype, device=values.device, layout=torch.sparse_coo
        )
        sparse.indices_, sparse.values_, sparse.coalesced, sparse.note = indices, values, coalesced, note
        return sparse

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's lacks defaults
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operator with the indices and the values.

        Raises:
            MemPluginError: it is not known what its kernel does with them.
        """
        compute = _COMPUTED.get(func.overloadpacket)
        if compute is None:
            raise MemPluginError(
                f"{func} of a sparse tensor cannot be estimated on fake tensors.",
                where=str(func),
                fix="Use dense tensors there (nn.Embedding(sparse=False)).",
            )
        return compute(func, *args, **(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the tensors that it consists of."""
        return ["indices_", "values_"], None

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        """Return what torch says of it, without the elements, which have no values."""
        return f"tensor(indices={self.indices_}, values={self.values_}, size={tuple(self.shape)})"

    def like(self, indices: torch.Tensor, values: torch.Tensor, **changes: Any) -> FakeSparse:
        """Return another one with these elements."""
        options = {"size": self.shape, "coalesced": self.coalesced, **changes}
        return FakeSparse(indices, values, note=self.note, **options)


def _coalesced(func: Any, sparse: FakeSparse) -> FakeSparse:
    """Return the sums of values at equal indices (SparseCUDATensor.cu:_coalesce_sparse_cuda)."""
    indices, values = sparse.indices_, sparse.values_
    count, rows = indices.shape[1], len(indices)
    known = values_of(indices)
    if known is not None:
        with no_dispatch():
            different = torch.unique(known, dim=1).shape[1]
    else:
        different = min(count, prod(sparse.shape[:rows]))
        sparse.note(
            f"Of the {count:,} indices of a sparse tensor of shape {tuple(sparse.shape)}, as many as can be, "
            f"{different:,}, are assumed to be different."
        )
    flat, order, offsets = (torch.empty_like(indices[0]) for _ in range(3))
    summed = values.new_empty((different, *values.shape[1:]))
    del order, offsets
    unique = flat[None, :different] if rows == 1 else indices.new_empty((rows, different))
    return sparse.like(unique, summed, coalesced=True)


def _added(func: Any, first: Any, second: Any, alpha: float = 1) -> Any:
    """Return the sum of two, which keeps the elements of both, or of a dense and a sparse tensor."""
    if not (isinstance(first, FakeSparse) and isinstance(second, FakeSparse)):
        dense = second if isinstance(first, FakeSparse) else first
        return dense if func._schema.is_mutable else dense.clone()
    scaled = second.values_ if alpha == 1 else second.values_ * alpha
    indices = torch.cat([first.indices_, second.indices_], 1)
    values = torch.cat([first.values_, scaled])
    if not func._schema.is_mutable:
        return first.like(indices, values, coalesced=False)
    first.indices_, first.values_, first.coalesced = indices, values, False
    return first


def _cloned(func: Any, sparse: FakeSparse, **options: Any) -> FakeSparse:
    """Return a copy; autograd makes none of a gradient that it alone holds (accumulate_grad.h)."""
    is_accumulated = type(current_node()).__name__ == "AccumulateGrad"
    if is_accumulated and sparse.values_.is_contiguous():
        return sparse.like(sparse.indices_, sparse.values_)
    return sparse.like(sparse.indices_.clone(), sparse.values_.clone())


def _moved(func: Any, sparse: FakeSparse, **options: Any) -> FakeSparse:
    """Return a copy on another device or in another dtype, which that of indices does not follow."""
    options.pop("layout", None)
    where = {name: each for name, each in options.items() if name != "dtype"}
    return sparse.like(func(sparse.indices_, **where), func(sparse.values_, **options))


def _transposed(func: Any, sparse: FakeSparse, *dims: int) -> FakeSparse:
    size = torch.empty(sparse.shape, device="meta").transpose(*(dims or (0, 1))).shape
    return sparse.like(sparse.indices_.clone(), sparse.values_.clone(), size=size, coalesced=False)


def _masked(func: Any, dense: torch.Tensor, mask: FakeSparse) -> FakeSparse:
    """Return the elements of a dense tensor at the indices: looked up, and multiplied by ones."""
    rows = len(mask.indices_)
    looked_up = dense.flatten(0, rows - 1).index_select(0, mask.indices_[0])
    return mask.like(mask.indices_, looked_up * 1)


def _multiplied(func: Any, first: Any, second: Any) -> torch.Tensor:
    """Return the product of a sparse and a dense matrix (SparseCUDABlas.cpp, s_addmm_out_sparse_dense_cuda).

    cuSPARSE reads 32-bit indices, and writes by columns, from which the result is copied.
    """
    if not isinstance(first, FakeSparse) or isinstance(second, FakeSparse):
        raise NotImplementedError
    zeros = second.new_zeros(first.shape[0], second.shape[1])
    out = _sum_of_product(func, zeros, first, second)
    del zeros
    return out


def _sum_of_product(func: Any, added: torch.Tensor, first: Any, second: Any, **factors: Any) -> torch.Tensor:
    first.note(SPARSE)
    out = torch.empty_like(added)
    coalesced = first if first.coalesced else _coalesced(func, first)
    indices = coalesced.indices_
    rows = indices.new_empty(first.shape[0] + 1, dtype=torch.int32)
    columns = indices.new_empty(indices.shape[1], dtype=torch.int32)
    by_columns = torch.empty_like(out)
    del rows, columns, by_columns
    return out


def _with_values(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the same operator makes of the values alone."""
    sparse = next(argument for argument in args if isinstance(argument, FakeSparse))
    parts = tuple(argument.values_ if isinstance(argument, FakeSparse) else argument for argument in args)
    values = func(*parts, **kwargs)
    return sparse if values is sparse.values_ else sparse.like(sparse.indices_, values)


def _marked(func: Any, sparse: FakeSparse, coalesced: bool) -> FakeSparse:
    sparse.coalesced = coalesced
    return sparse


def _dense(func: Any, sparse: FakeSparse, *_: Any, **__: Any) -> torch.Tensor:
    return sparse.values_.new_zeros(sparse.shape)


_COMPUTED: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten._indices, aten.indices), lambda func, sparse: sparse.indices_),
    **dict.fromkeys((aten._values, aten.values), lambda func, sparse: sparse.values_),
    **dict.fromkeys((aten._nnz,), lambda func, sparse: sparse.indices_.shape[1]),
    **dict.fromkeys((aten.sparse_dim, aten._dimI), lambda func, sparse: len(sparse.indices_)),
    **dict.fromkeys((aten.dense_dim, aten._dimV), lambda func, sparse: sparse.values_.dim() - 1),
    **dict.fromkeys((aten.mul, aten.mul_, aten.div, aten.div_, aten.neg, aten.detach), _with_values),
    **dict.fromkeys((aten.add, aten.add_), _added),
    **dict.fromkeys((aten.t, aten.transpose), _transposed),
    **dict.fromkeys((aten.mm, aten._sparse_mm), _multiplied),
    **dict.fromkeys((aten.addmm, aten._sparse_addmm), _sum_of_product),
    aten.is_coalesced: lambda func, sparse: sparse.coalesced,
    aten._coalesce: _coalesced,
    aten._coalesced_: _marked,
    aten.clone: _cloned,
    aten._to_copy: _moved,
    aten._to_dense: _dense,
    aten.sparse_mask: _masked,
}
