"""GradScaler asks the device whether gradients overflowed: in an estimate they never do."""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode
from tb_memplugin.estimate.patches import Patches


class LossScaling(Correction):
    """The optimizer's step is taken, as in every training step but the first few."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Leave out the question, `found_inf.item()`; unscaling and growth stay as they are."""

        def step(scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

        patches.set(torch.amp.GradScaler, "_maybe_opt_step", step)
        patches.set(torch.amp.GradScaler, "get_scale", _scale)


def _scale(scaler: Any) -> float:
    return float(scaler._init_scale) if scaler.is_enabled() else 1.0
