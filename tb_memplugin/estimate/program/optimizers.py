"""What optimizers and GradScaler ask of parameters and gradients: their type, and whether any overflowed."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from tb_memplugin.estimate.answer.hints import EVERY_STEP
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches, do_nothing

_FUSED = ("adam", "adamw", "sgd", "adagrad")


class ForeachByDefault(Correction):
    """Lets optimizers use their foreach kernels for fake tensors.

    On CUDA, the optimizers of torch.optim use these by default; they need a temporary as large as the
    parameters. For FakeTensor they would not (torch/optim/optimizer.py, `_default_to_fused_or_foreach`).
    """

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Add FakeTensor to the lists of supported types, of optimizers and of gradient clipping."""
        for home in (optimizer, _foreach_utils):
            types = [*home._foreach_supported_types, FakeTensor]
            patches.set(home, "_foreach_supported_types", types)


class FusedOptimizers(Correction):
    """Makes fused kernels do nothing: they work in place without buffers.

    Torch does not have a fake implementation for all of them.
    """

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for every fused kernel that this version of torch has."""
        rules: dict[Any, Rule] = {}
        for name in _FUSED:
            packet = getattr(torch.ops.aten, f"_fused_{name}_", None)
            for overload in packet.overloads() if packet is not None else ():
                rules[getattr(packet, overload)] = do_nothing
        return rules


class LossScaling(Correction):
    """Makes GradScaler always run the optimizer's step, as in all but the first few training steps."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Skip the check `found_inf.item()`; unscaling and growth of the scale are unchanged."""

        def step(scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
            self.target.note(EVERY_STEP)
            return optimizer.step(*args, **kwargs)

        patches.set(torch.amp.GradScaler, "_maybe_opt_step", step)
        patches.set(torch.amp.GradScaler, "get_scale", _scale)


def _scale(scaler: Any) -> float:
    return float(scaler._init_scale) if scaler.is_enabled() else 1.0
