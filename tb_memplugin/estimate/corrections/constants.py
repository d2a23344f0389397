"""Keep the values of small CPU tensors that a program creates from its own numbers.

Examples are rates of stochastic depth (`torch.linspace(0, rate, layers).tolist()`), lengths, and tables of
window sizes. Fake tensors lose the values, and models would be built differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._mode_utils import no_dispatch

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.patches import Patches

MOST = 4096
"""The most elements of a tensor that keeps its values; torch's limit is 1 (CONSTANT_NUMEL_LIMIT)."""

_MAKERS = ("arange", "linspace", "logspace", "full", "ones", "zeros", "scalar_tensor", "eye")


class Constants(Correction):
    """Lets FakeTensorMode compute with small constant tensors, as it does with single numbers."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Raise torch's limit."""
        if hasattr(fake_tensor, "CONSTANT_NUMEL_LIMIT"):
            patches.set(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST)

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for every operator that creates a tensor from numbers."""
        packets = [getattr(torch.ops.aten, name) for name in _MAKERS]
        return {
            getattr(packet, overload): _made
            for packet in packets
            for overload in packet.overloads()
            if "out" not in overload.split("_")
        }


def constant(mode: CountingFakeMode, real: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor that keeps the values of a real one."""
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def _made(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    if out.fake_device.type != "cpu" or out.numel() > MOST or out.layout is not torch.strided:
        return out
    with no_dispatch():
        real = func(*args, **kwargs)
    return constant(mode, real)
