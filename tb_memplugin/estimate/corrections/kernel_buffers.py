"""Temporary buffers that kernels allocate within one operator, with sizes from PyTorch's source."""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.corrections.fused_kernels import HAS_RMS_NORM
from tb_memplugin.estimate.fake_ledger import Place
from tb_memplugin.estimate.fake_mode import After, CountingFakeMode

aten = torch.ops.aten

_WITHOUT_SORTING = 3072
"""With at most this many indices, an embedding's gradient needs no buffers for sorting.

Source: aten/src/ATen/native/cuda/Embedding.cu.
"""

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
        }


class OtherTypes(Correction):
    """Records copies in another dtype, on all devices.

    They are inputs that are accumulated in another dtype (`cumsum`, `sum` of a mask: ReduceOps.cpp, and
    make_reduction in ReduceOpsUtils.h), results that are computed in another dtype (`abs` of complex numbers,
    UnaryOps.cpp), and what `where` chooses from (TensorCompare.cpp).
    """

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        running = (aten.cumsum.default, aten.cumprod.default)
        reduced = (
            *(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default),
            *(aten.mean.default, aten.mean.dim, aten.prod.default, aten.prod.dim_int),
        )
        return {
            **dict.fromkeys(running, _accumulated),
            **dict.fromkeys(reduced, _reduced),
            **dict.fromkeys((aten.abs.default, aten.angle.default), _complex),
            aten.where.self: _chosen_from,
        }


class ContiguousCopies(Correction):
    """Records the contiguous copies that kernels make of arguments that are not contiguous.

    Sources: layer_norm.cpp, SoftMax.cpp and Embedding.cpp, for CPU and CUDA (`expect_contiguous`,
    `contiguous`).
    """

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
        if self.target.device_type == "cuda" and HAS_RMS_NORM:
            reads[aten._fused_rms_norm.default] = 1
            reads[aten._fused_rms_norm_backward.default] = 2
        return {operator: _straightened(count) for operator, count in reads.items()}


def _straightened(count: int) -> After:
    def run(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
        first = args[0]
        if first.fake_device.type != mode.ledger.device_type:
            return
        if func is aten.embedding_dense_backward.default and first.fake_device.type == "cuda":
            return
        sizes = [_copy(one) for one in args[:count]]
        mode.passing(sizes, func, place, mode.ledger.device_row(first.fake_device))

    return run


def _copy(tensor: torch.Tensor) -> int:
    """Return the bytes of a contiguous copy, 0 if the tensor is contiguous already."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _accumulated(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    if args[0].dim():
        _converted(mode, func, args[:1], out, place)


def _reduced(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    """Record the copy, which a GPU does not need to sum half precision in float32."""
    halves = (torch.float16, torch.bfloat16)
    on_gpu = out.fake_device.type == "cuda"
    if not (on_gpu and args[0].dtype in halves and out.dtype is torch.float32):
        _accumulated(mode, func, args, out, place)


def _chosen_from(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    _converted(mode, func, args[1:3], out, place)


def _converted(mode: CountingFakeMode, func: Any, given: tuple[Any, ...], out: Any, place: Place) -> None:
    """Record copies of tensors in the dtype of the result."""
    if _counts(mode, out):
        sizes = [one.numel() * out.element_size() for one in given if one.dtype is not out.dtype]
        mode.passing(sizes, func, place, mode.ledger.device_row(out.fake_device))


def _complex(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    given = args[0]
    if given.dtype.is_complex and _counts(mode, out):
        size = given.numel() * given.element_size()
        mode.passing([size], func, place, mode.ledger.device_row(out.fake_device))


def _scattered(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    """Record the prefix sum of the mask, 8 bytes for each element, and the expanded mask if it is broadcast.

    Source: maskPrefixSum of masked_scatter_cuda in IndexKernel.cpp.
    """
    mask = args[1]
    if not _counts(mode, out):
        return
    spread = out.numel() if mask.numel() < out.numel() else 0
    mode.passing([spread, 8 * out.numel()], func, place, mode.ledger.device_row(out.fake_device))


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


def _masked_rows(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    """Record a byte for each score and a byte for each row, while scores and result are live."""
    if _counts(mode, out):
        rows = out.numel() // out.shape[args[1]]
        mode.passing([out.numel(), rows], func, place, mode.ledger.device_row(out.fake_device))


def _embedding(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    """Record the sorted indices, segments of equal indices, and a float32 row for each partial sum."""
    gradient, indices, weights, _, by_frequency = args[:5]
    count, width = indices.numel(), gradient.shape[-1]
    if out.fake_device.type != "cuda":
        return
    if count <= _WITHOUT_SORTING and not by_frequency:
        mode.passing([_copy(gradient)], func, place, mode.ledger.device_row(out.fake_device))
        return
    segments = min(count, weights)
    partial = count // _ROWS_A_THREAD + segments
    index = indices.element_size()
    sums = partial * width * max(4, gradient.element_size())
    sizes = (
        [_copy(gradient)]
        + [count * index] * 3
        + [8, segments * index, segments * index, 8, partial * index, sums]
    )
    mode.passing(sizes, func, place, mode.ledger.device_row(out.fake_device))
