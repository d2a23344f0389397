"""Support `grouped_mm` of experts in fp32 and fp16: torch's fake implementation accepts only bf16.

Real kernels accept all three dtypes. In fp32 and fp16 the product of each group is written into the result,
with no other buffers (aten/src/ATen/native/GroupedMMUtils.h, _grouped_mm_fallback).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule

_WITHOUT_A_RULE = (torch.float32, torch.float16)
_ALIGNED = 16
"""On a GPU, rows of a result begin at multiples of this number of bytes."""


class GroupedProducts(Correction):
    """Returns results with the kernel's shape and strides."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for the operator, if this version of torch has it."""
        packet = getattr(torch.ops.aten, "_grouped_mm", None)
        return {packet.default: _product} if packet is not None else {}


def _product(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    left, right = args[:2]
    if left.dtype not in _WITHOUT_A_RULE or right.dtype is not left.dtype:
        return mode.quietly(func, *args, **kwargs)
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = len(offsets) if offsets is not None else None
    shape = _shape(left, right, groups)
    with mode:
        return torch.empty_strided(
            shape, _strides(shape, left), dtype=kwargs.get("out_dtype") or left.dtype, device=left.device
        )


def _shape(left: torch.Tensor, right: torch.Tensor, groups: int | None) -> list[int]:
    """Return the shape of the result.

    Either the rows, the columns or the inner dimension are divided into groups, or both operands are stacks.
    """
    if left.dim() == 2 and right.dim() == 2 and groups is not None:
        return [groups, left.shape[0], right.shape[1]]
    if left.dim() == 3 and right.dim() == 3:
        return [left.shape[0], left.shape[1], right.shape[2]]
    return [left.shape[-2], right.shape[-1]]


def _strides(shape: Sequence[int], like: torch.Tensor) -> list[int]:
    step = _ALIGNED // like.element_size() if like.device.type == "cuda" else 1
    row = -(-shape[-1] // step) * step
    return [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]
