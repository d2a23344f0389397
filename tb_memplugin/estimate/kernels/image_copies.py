"""Record the contiguous copies that kernels of a GPU for images make of what they read.

Pooling, interpolation and reflecting pads read gradients in the memory format of their input, and a gradient
that is one number expanded to a shape is copied first. Sources in aten/src/ATen/native/cuda, such as
DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu, UpSampleBilinear2d.cu, ReflectionPad.cu.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from tb_memplugin.estimate.kernels.convolutions import copied_bytes
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode

_READ = (
    "max_pool2d_with_indices",
    *(f"upsample_{kind}{n}d_backward" for kind, n in (("nearest", 1), ("nearest", 2), ("nearest", 3))),
    *(f"_upsample_nearest_exact{n}d_backward" for n in (1, 2, 3)),
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    *(f"_upsample_{kind}2d_aa_backward" for kind in ("bilinear", "bicubic")),
    "upsample_trilinear3d_backward",
    *(f"max_pool{n}d_with_indices_backward" for n in (2, 3)),
    *(f"avg_pool{n}d_backward" for n in (2, 3)),
    *(f"_adaptive_avg_pool{n}d_backward" for n in (2, 3)),
    *(f"adaptive_max_pool{n}d_backward" for n in (2, 3)),
    *(f"reflection_pad{n}d_backward" for n in (1, 2, 3)),
)
"""Operators that copy their first argument."""

_READS_STRIDES = "aten::_adaptive_avg_pool2d_backward"
"""With a channels-last input, this one reads any gradient as it is."""


class ImageCopies(Correction):
    """Records the copies of these operators."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        return {getattr(torch.ops.aten, name).default: _copied for name in _READ}


def _copied(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    read = args[0]
    if read.device.type != "cuda":
        return
    like = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else read
    form = suggest_memory_format(like)
    if func._schema.name != _READS_STRIDES or form is torch.contiguous_format:
        mode.passing([copied_bytes(read, form)], func, scope, mode.ledger.device_row(read.device))
