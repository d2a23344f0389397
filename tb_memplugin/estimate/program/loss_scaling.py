"""GradScaler reads from the device whether gradients overflowed; in an estimate they never do."""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches


class LossScaling(Correction):
    """Makes GradScaler always run the optimizer's step, as in all but the first few training steps."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Skip the check `found_inf.item()`; unscaling and growth of the scale are unchanged."""

        def step(scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

        patches.set(torch.amp.GradScaler, "_maybe_opt_step", step)
        patches.set(torch.amp.GradScaler, "get_scale", _scale)


def _scale(scaler: Any) -> float:
    return float(scaler._init_scale) if scaler.is_enabled() else 1.0
