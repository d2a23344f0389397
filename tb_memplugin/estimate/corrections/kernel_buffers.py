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
        return {aten.embedding_dense_backward.default: _embedding}


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
    if out.fake_device.type == mode.ledger.device_type and out.numel():
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
