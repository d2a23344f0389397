"""Buffers that kernels take and give back within one operator, where PyTorch's source tells their sizes."""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_ledger import Place
from tb_memplugin.estimate.fake_mode import After, CountingFakeMode

aten = torch.ops.aten

_WITHOUT_SORTING = 3072
"""Up to so many indices an embedding's gradient needs no buffers (aten/src/ATen/native/cuda/Embedding.cu)."""

_ROWS_A_THREAD = 10
"""NROWS_PER_THREAD of EmbeddingBackwardKernel.cu."""


class KernelBuffers(Correction):
    """Those that grow with the batch."""

    def after(self) -> dict[Any, After]:
        """The operators."""
        return {
            aten.embedding_dense_backward.default: _embedding,
            aten.masked_scatter.default: _scattered,
            aten.masked_scatter_.default: _scattered,
        }


class OtherTypes(Correction):
    """Copies of another type, on all devices: of what is summed up in another (`cumsum`, ReduceOps.cpp), and
    of results whose type is not that of the formula (`abs` of complex numbers, UnaryOps.cpp).
    """

    def after(self) -> dict[Any, After]:
        """The operators."""
        summed = (aten.cumsum.default, aten.cumprod.default)
        return dict.fromkeys(summed, _summed) | dict.fromkeys(
            (aten.abs.default, aten.angle.default), _complex
        )


def _summed(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    given = args[0]
    if given.dtype is not out.dtype and given.dim() and _counts(mode, out):
        mode.passing([out.numel() * out.element_size()], func, place, mode.ledger.device_row(out.fake_device))


def _complex(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    given = args[0]
    if given.dtype.is_complex and _counts(mode, out):
        size = given.numel() * given.element_size()
        mode.passing([size], func, place, mode.ledger.device_row(out.fake_device))


def _scattered(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    """Where each selected element goes, a number of 8 bytes for each of the mask (IndexKernel.cpp,
    masked_scatter_cuda: maskPrefixSum); and the mask, where it is spread over more elements.
    """
    mask = args[1]
    if not _counts(mode, out):
        return
    spread = out.numel() if mask.numel() < out.numel() else 0
    mode.passing([spread, 8 * out.numel()], func, place, mode.ledger.device_row(out.fake_device))


def _counts(mode: CountingFakeMode, out: Any) -> bool:
    return bool(out.fake_device.type == mode.ledger.device_type and out.numel())


class SafeSoftmax(Correction):
    """The softmax of masked scores looks for rows that are masked as a whole: seen on the CPU, and one
    program for all devices (aten/src/ATen/native/transformers/attention.cpp, _safe_softmax).
    """

    def after(self) -> dict[Any, After]:
        """The operator, where this torch has it."""
        packet = getattr(aten, "_safe_softmax", None)
        return {packet.default: _masked_rows} if packet is not None else {}


def _masked_rows(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    """A byte for each score, and one for each row; while the scores and the result are there, too."""
    if _counts(mode, out):
        rows = out.numel() // out.shape[args[1]]
        mode.passing([out.numel(), rows], func, place, mode.ledger.device_row(out.fake_device))


def _embedding(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, place: Place) -> None:
    """Sorted indices, segments of equal ones, and a float32 row for each partial sum."""
    gradient, indices, weights, _, by_frequency = args[:5]
    count, width = indices.numel(), gradient.shape[-1]
    if out.fake_device.type != "cuda" or (count <= _WITHOUT_SORTING and not by_frequency):
        return
    segments = min(count, weights)
    partial = count // _ROWS_A_THREAD + segments
    index = indices.element_size()
    sums = partial * width * max(4, gradient.element_size())
    sizes = [count * index] * 3 + [8, segments * index, segments * index, 8, partial * index, sums]
    mode.passing(sizes, func, place, mode.ledger.device_row(out.fake_device))
