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
