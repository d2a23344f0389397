"""How tensors get their first, random values, which an estimate does not need.

`trunc_normal_` draws again until all values are within bounds; here it draws again once. DTensor draws
through a higher-order operator that sets the GPU's random state around the draw; here it draws.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims import rng_prims
from torch.nn import init

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches


class Initialisers(Correction):
    """Runs the loop of torch/nn/init.py once, and what DTensor draws without its random state."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace the part of `trunc_normal_` that loops, if this version of torch has it."""
        if hasattr(init, "_no_grad_trunc_normal_"):
            patches.set(init, "_no_grad_trunc_normal_", _draw)
        random_operator = getattr(rng_prims, "run_dtensor_rng_op", None)  # PyTorch 2.13
        if random_operator is not None:
            handlers = random_operator.python_key_table
            handlers[CountingFakeMode] = _draw_shard
            patches.on_undo(lambda: handlers.pop(CountingFakeMode, None))


def _draw_shard(mode: CountingFakeMode, _begin: int, _end: int, draw: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return draw(*args, **kwargs)


def _draw(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    with torch.no_grad():
        result = tensor.normal_(mean, std)
        outside = (result < a) | (result > b)
        result = torch.where(outside, torch.empty_like(result).normal_(mean, std), result)
        return tensor.copy_(result)
