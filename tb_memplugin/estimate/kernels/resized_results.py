"""Results that live in a tensor of another size, which was resized: they keep the larger memory.

Losses are reduced in the memory of the losses of all elements (Loss.cpp). `unfold` and `fold` begin with a
tensor as large as their input (Im2Col.cu, Col2Im.cu, and the same for CPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from tb_memplugin.estimate.kernels.convolutions import copied_bytes
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode, Rule

aten = torch.ops.aten

LOSSES = (aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss)

_COLUMNS = (aten.im2col.default, aten.col2im.default)

_MEAN = 1
"""The default of `reduction`; 0 is no reduction (Reduction.h)."""


class ResizedResults(Correction):
    """Gives these results the memory that they have in a real run."""

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for each operator."""
        return {**{loss.default: _loss for loss in LOSSES}, **dict.fromkeys(_COLUMNS, _columns)}

    def after(self) -> dict[Any, After]:
        """Return a function for `unfold` and `fold`, which also read their input in one piece."""
        return dict.fromkeys(_COLUMNS, _read)


def is_reduced(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a loss has one number as its result."""
    position = next(
        row for row, argument in enumerate(func._schema.arguments) if argument.name == "reduction"
    )
    return bool(args[position] if len(args) > position else kwargs.get("reduction", _MEAN))


def _loss(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    if not is_reduced(func, args, kwargs):
        return out
    return _within(mode, out, prod(torch.broadcast_shapes(args[0].shape, args[1].shape)))


def _columns(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    return _within(mode, out, args[0].numel()) if args[0].numel() > out.numel() else out


def _within(mode: CountingFakeMode, out: Any, elements: int) -> Any:
    """Return a tensor like `out` in the memory of so many elements."""
    buffer = mode.quietly(aten.empty.memory_format, [elements], dtype=out.dtype, device=out.device)
    return mode.quietly(aten.resize_.default, buffer, out.shape)


def _read(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    """Record a copy of an input that is not contiguous, and what the result is before it grows."""
    tensor = args[0]
    if tensor.device.type == mode.ledger.device_type:
        small = tensor.numel() * tensor.element_size() if tensor.numel() < out.numel() else 0
        sizes = [small, copied_bytes(tensor, torch.contiguous_format)]
        mode.passing(sizes, func, scope, mode.ledger.device_row(tensor.device))
