"""Record the copies that the CPU makes of operands in another dtype than the one that is computed in.

An example is a mask times a float. A GPU converts each element when it reads it (TensorIterator.cpp,
compute_types).
"""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode

_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPUTING = ("add", "sub", "mul", "div", "pow", "fmod", "remainder", "maximum", "minimum", "atan2", "hypot")
_FLOATING = (
    "sqrt",
    "rsqrt",
    "reciprocal",
    "exp",
    "log",
    "log1p",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sigmoid",
    "erf",
)
"""Functions of one operand that turn integers into floats."""


class Promotions(Correction):
    """Records these copies for operators that compute each element from one element of each operand."""

    def after(self) -> dict[Any, After]:
        """Return a function for each operator."""
        names = (*_COMPARING, *_COMPUTING, *_FLOATING)
        packets = (getattr(torch.ops.aten, name + end, None) for name in names for end in ("", "_"))
        return {
            getattr(packet, overload): _promoted
            for packet in packets
            if packet is not None
            for overload in packet.overloads()
            if "out" not in overload.split("_")
        }


def _promoted(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    if not isinstance(out, torch.Tensor) or out.device.type != mode.ledger.device_type:
        return
    compared, in_place = out.dtype is torch.bool, func._schema.is_mutable
    common = torch.result_type(*args[:2]) if len(args) > 1 and (compared or in_place) else out.dtype
    copied = [
        operand
        for operand in args
        if isinstance(operand, torch.Tensor) and operand.dim() and operand.dtype is not common
    ]
    if in_place and out.dtype is not common:
        copied.append(out)  # the result is computed in a copy, too
    size = common.itemsize
    mode.passing(
        [operand.numel() * size for operand in copied], func, scope, mode.ledger.device_row(out.device)
    )
