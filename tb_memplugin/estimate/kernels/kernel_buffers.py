"""Temporary buffers that kernels allocate within one operator, with sizes from PyTorch's source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from tb_memplugin.estimate.kernels.radix_sort import sort_bytes
from tb_memplugin.estimate.kernels.reductions import ANY_GPU
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.trace import Category

aten = torch.ops.aten

_WITHOUT_SORTING = 3072
"""With at most this many indices, an embedding's gradient needs no buffers for sorting.

Source: aten/src/ATen/native/cuda/Embedding.cu.
"""

_MAXIMUM = 2
"""The mode of `embedding_bag` that takes the maximum, whose derivative sorts nothing."""

_ROWS_A_THREAD = 10
"""The constant NROWS_PER_THREAD of EmbeddingBackwardKernel.cu."""


class KernelBuffers(Correction):
    """Records buffers of CUDA kernels that grow with the batch."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        return {
            aten.embedding_dense_backward.default: _embedding,
            aten.masked_scatter.default: _scattered,
            aten.masked_scatter_.default: _scattered,
            aten._softmax_backward_data.default: _weighted,
            aten.index_put.default: self._accumulated_at,
            aten.index_put_.default: self._accumulated_at,
            aten._index_put_impl_.default: self._accumulated_at,
            aten._embedding_bag_backward.default: _bags,
            aten._cdist_backward.default: _differences,
            aten._pdist_backward.default: _differences,
            aten.scatter_reduce.two: _averaged,
            aten.searchsorted.Tensor: _searched,
            aten.bernoulli.default: _probabilities,
            aten.bernoulli.Tensor: _probabilities,
            aten.bernoulli_.Tensor: _probabilities,
            aten.multinomial.default: _drawn,
        }

    def _accumulated_at(
        self, mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope
    ) -> None:
        """Record what adds values at indices, as the derivative of indexing does.

        These are the indices, a contiguous copy of the values, the sorted indices with their order, and what
        they are sorted with (cuda/Indexing.cu, index_put_with_sort_kernel).
        """
        indices, values = [index for index in args[1] if index is not None], args[2]
        if len(args) < 4 or not args[3] or not _counts(mode, out) or not indices:
            return
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return
        count = prod(torch.broadcast_shapes(*(index.shape for index in indices)))
        if not count:
            return
        rows = prod(out.shape[row] for row, index in enumerate(args[1]) if index is not None)
        temporary = sort_bytes(count, 8, 8, self.target.gpu or ANY_GPU, bits=max(1, (rows - 1).bit_length()))
        sizes = [8 * count, _copy(values), *[8 * count] * 3, temporary]
        mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


class OtherTypes(Correction):
    """Records copies in another dtype, on all devices.

    They are inputs that are accumulated in another dtype (`cumsum`, `sum` of a mask: ReduceOps.cpp, and
    make_reduction in ReduceOpsUtils.h), results that are computed in another dtype (`abs` of complex numbers,
    UnaryOps.cpp), and what `where` chooses from (TensorCompare.cpp).
    """

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        running = (aten.cumsum.default, aten.cumprod.default)
        reduced: tuple[Any, ...] = (
            *(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default),
            *(aten.mean.default, aten.mean.dim, aten.prod.default, aten.prod.dim_int),
        )
        if self.target.device_type == "cuda":  # reductions.py
            reduced = ()
        return {
            **dict.fromkeys((*running, *reduced), _accumulated),
            **dict.fromkeys((aten.abs.default, aten.angle.default), _complex),
            aten.where.self: _chosen_from,
        }


def copied_around(
    mode: CountingFakeMode, func: Any, first: Any, run: Callable[[], Any], last: Any = None
) -> Any:
    """Return the results of `run`, and record the contiguous copies of two arguments that a kernel makes.

    That of `first` is made before there are results, that of `last` after them.
    """
    if first.fake_device.type != mode.ledger.device_type:
        return run()
    scope, row = mode.layers.scope(), mode.ledger.device_row(first.fake_device)
    size = _copy(first)
    block = mode.allocate(size, func, scope, Category.TEMPORARY, row) if size else None
    out = run()
    mode.see(out, func)
    if last is not None:
        mode.passing([_copy(last)], func, scope, row)
    if block is not None:
        mode.ledger.free(block, scope)
    return out


class ContiguousCopies(Correction):
    """Records the contiguous copies that kernels make of arguments that are not contiguous.

    Sources: layer_norm.cpp, SoftMax.cpp and Embedding.cpp, for CPU and CUDA (`expect_contiguous`,
    `contiguous`).
    """

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for `layer_norm` on a GPU. That of its derivative is in result_strides.py."""
        return {aten.native_layer_norm.default: _normalized} if self.target.device_type == "cuda" else {}

    def after(self) -> dict[Any, After]:
        """Return a function for each operator; `reads` is how many of its first arguments are copied."""
        reads = {  # on a GPU, _embedding handles the last one
            aten.native_layer_norm.default: 1,
            aten.native_layer_norm_backward.default: 2,
            aten._softmax.default: 1,
            aten._softmax_backward_data.default: 2,
            aten._log_softmax.default: 1,
            aten._log_softmax_backward_data.default: 2,
            aten.embedding_dense_backward.default: 1,
        }
        if self.target.device_type == "cuda":
            del reads[aten._softmax_backward_data.default]  # _weighted
            reads |= dict.fromkeys((aten.cumsum.default, aten.cumprod.default), 1)
            for normalization in (aten.native_layer_norm, aten.native_layer_norm_backward):
                del reads[normalization.default]  # copied_around
        return {operator: _straightened(count) for operator, count in reads.items()}


def _normalized(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return copied_around(mode, func, args[0], lambda: mode.quietly(func, *args, **kwargs))


def _straightened(count: int) -> After:
    def run(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
        first = args[0]
        if first.fake_device.type != mode.ledger.device_type:
            return
        if func is aten.embedding_dense_backward.default and first.fake_device.type == "cuda":
            return
        sizes = [_copy(tensor) for tensor in args[:count]]
        mode.passing(sizes, func, scope, mode.ledger.device_row(first.fake_device))

    return run


def _copy(tensor: torch.Tensor) -> int:
    """Return the bytes of a contiguous copy, 0 if the tensor is contiguous already."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _accumulated(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    if args[0].dim():
        _converted(mode, func, args[:1], out, scope)


def _chosen_from(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    _converted(mode, func, args[1:3], out, scope)


def _converted(mode: CountingFakeMode, func: Any, tensors: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record copies of tensors in the dtype of the result."""
    if _counts(mode, out):
        sizes = [tensor.numel() * out.element_size() for tensor in tensors if tensor.dtype is not out.dtype]
        mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


def _complex(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    tensor = args[0]
    if tensor.dtype.is_complex and _counts(mode, out):
        size = tensor.numel() * tensor.element_size()
        mode.passing([size], func, scope, mode.ledger.device_row(out.fake_device))


def _scattered(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the prefix sum of the mask, 8 bytes for each element, and the expanded mask if it is broadcast.

    Source: maskPrefixSum of masked_scatter_cuda in IndexKernel.cpp.
    """
    mask = args[1]
    if not _counts(mode, out):
        return
    spread = out.numel() if mask.numel() < out.numel() else 0
    mode.passing([spread, 8 * out.numel()], func, scope, mode.ledger.device_row(out.fake_device))


def _counts(mode: CountingFakeMode, out: Any) -> bool:
    return bool(out.fake_device.type == mode.ledger.device_type and out.numel())


class SafeSoftmax(Correction):
    """Records the buffers with which the softmax of masked scores looks for rows that are fully masked.

    They were seen on the CPU; the code is the same for all devices
    (aten/src/ATen/native/transformers/attention.cpp, _safe_softmax).
    """

    def after(self) -> dict[Any, After]:
        """Return a function for the operator, if this version of torch has it."""
        packet = getattr(aten, "_safe_softmax", None)
        return {packet.default: _masked_rows} if packet is not None else {}


def _masked_rows(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record a byte for each score, a byte for each row and a zero, while scores and result are live."""
    if _counts(mode, out):
        rows = out.numel() // out.shape[args[1]]
        sizes = [out.numel(), rows, out.element_size()]
        mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


def _weighted(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the product of gradient and result, which the kernel reads (cuda/SoftMax.cu)."""
    if _counts(mode, out):
        size = args[0].numel() * args[0].element_size()
        mode.passing([size], func, scope, mode.ledger.device_row(out.fake_device))


def _bags(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record a copy of the gradient, and what sums and means of bags sort (cuda/EmbeddingBag.cu)."""
    gradient, indices, weights, by_frequency, kind = args[0], args[1], args[6], args[7], args[8]
    if not _counts(mode, out):
        return
    sizes = [_copy(gradient)]
    if kind != _MAXIMUM:
        sizes += [indices.numel() * indices.element_size()] * by_frequency
        sizes += _sorted(indices, weights, gradient)
    mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


def _embedding(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the sorted indices, segments of equal indices, and a float32 row for each partial sum."""
    gradient, indices, weights, _, by_frequency = args[:5]
    count = indices.numel()
    if out.fake_device.type != "cuda":
        return
    if count <= _WITHOUT_SORTING and not by_frequency:
        mode.passing([_copy(gradient)], func, scope, mode.ledger.device_row(out.fake_device))
        return
    counts = [count * indices.element_size()] * bool(by_frequency)
    mode.passing(
        [_copy(gradient), *counts, *_sorted(indices, weights, gradient)],
        func,
        scope,
        mode.ledger.device_row(out.fake_device),
    )


def _differences(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record a gradient for each coordinate of each pair of points (cuda/DistanceKernel.cu)."""
    if not _counts(mode, out):
        return
    pairs = args[0].numel()
    if func is aten._pdist_backward.default:
        pairs = args[1].shape[0] * (args[1].shape[0] - 1)
    size = pairs * out.shape[-1] * out.element_size()
    mode.passing([size], func, scope, mode.ledger.device_row(out.fake_device))


def _averaged(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record how many elements meet at each place, ones that are counted, and a mask (scatter_reduce)."""
    if args[4] == "mean" and _counts(mode, out):
        sizes = [out.numel() * out.element_size(), args[3].numel() * out.element_size(), out.numel()]
        mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


def _searched(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record contiguous copies of the sorted rows and of what is looked for (cuda/Bucketization.cu)."""
    if _counts(mode, out):
        sizes = [_copy(tensor) for tensor in args[:2]]
        mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


def _probabilities(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record the probabilities in float32 (cuda/DistributionTemplates.h, bernoulli_kernel)."""
    probabilities = args[-1]
    if _counts(mode, out) and isinstance(probabilities, torch.Tensor) and probabilities.device.type == "cuda":
        size = 0 if probabilities.dtype in (torch.float32, torch.float64) else 4 * probabilities.numel()
        mode.passing([size], func, scope, mode.ledger.device_row(out.fake_device))


def _drawn(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record random numbers for each probability and the largest of them, or three tensors of probabilities.

    Sources: Distributions.cpp (multinomial_out) and cuda/MultinomialKernel.cu, which draws with replacement.
    """
    probabilities, count, again = args[0], args[1], len(args) > 2 and args[2]
    if _counts(mode, out):
        size, several = probabilities.numel() * probabilities.element_size(), count > 1
        largest = out.numel() * probabilities.element_size() * several
        sizes = [size] * 3 if again and several else [size, largest]
        mode.passing(sizes, func, scope, mode.ledger.device_row(out.fake_device))


def _sorted(indices: torch.Tensor, weights: int, gradient: torch.Tensor) -> list[int]:
    count, width, index = indices.numel(), gradient.shape[-1], indices.element_size()
    segments = min(count, weights)
    partial = count // _ROWS_A_THREAD + segments
    sums = partial * width * max(4, gradient.element_size())
    return [count * index] * 3 + [8, segments * index, segments * index, 8, partial * index, sums]
