"""Combine masks in place where derivatives do so, as those of `clamp` with tensors, `max` and `min`.

For fake tensors they allocate a result (FunctionsManual.cpp, clamp_backward and evenly_distribute_backward:
areAnyTensorSubclassLike).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule

aten = torch.ops.aten


class MasksInPlace(Correction):
    """Writes into the first mask what autograd's engine computes from two."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for the operator."""
        return {aten.logical_and.default: _combined}


def _combined(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    first, second = args
    fits = torch.broadcast_shapes(first.shape, second.shape) == first.shape
    if first.dtype is torch.bool and fits and mode.is_called_by_engine():
        return mode.quietly(aten.logical_and_.default, first, second)
    return mode.quietly(func, *args, **kwargs)
