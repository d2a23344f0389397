"""Optimizers choose their kernels by the type of the parameters: fake ones count like real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.patches import Patches

_FUSED = ("adam", "adamw", "sgd", "adagrad")


class ForeachByDefault(Correction):
    """On CUDA the optimizers of torch.optim take their foreach kernels, which hold a parameter-sized
    temporary, unless told otherwise. They would not for fake tensors (torch/optim/optimizer.py,
    `_default_to_fused_or_foreach`).
    """

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Put FakeTensor on the lists of types that these kernels take; gradient clipping has one, too."""
        for home in (optimizer, _foreach_utils):
            types = [*home._foreach_supported_types, FakeTensor]
            patches.set(home, "_foreach_supported_types", types)


class FusedOptimizers(Correction):
    """Fused kernels work in place and hold nothing beside: torch has no fake rule for all of them."""

    def rules(self) -> dict[Any, Rule]:
        """One for every fused kernel that this torch has."""
        found: dict[Any, Rule] = {}
        for name in _FUSED:
            packet = getattr(torch.ops.aten, f"_fused_{name}_", None)
            for overload in packet.overloads() if packet is not None else ():
                found[getattr(packet, overload)] = _nothing
        return found


def _nothing(mode: CountingFakeMode, func: Any, args: Any, kwargs: Any) -> None:
    return None
