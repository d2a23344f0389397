"""`trunc_normal_` draws again until all values are within bounds; in an estimate it draws again once."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import init

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches


class Initialisers(Correction):
    """Runs the loop of torch/nn/init.py once: every iteration takes the same memory."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace the part of `trunc_normal_` that loops, if this version of torch has it."""
        if hasattr(init, "_no_grad_trunc_normal_"):
            patches.set(init, "_no_grad_trunc_normal_", _draw)


def _draw(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    with torch.no_grad():
        result = tensor.normal_(mean, std)
        outside = (result < a) | (result > b)
        result = torch.where(outside, torch.empty_like(result).normal_(mean, std), result)
        return tensor.copy_(result)
