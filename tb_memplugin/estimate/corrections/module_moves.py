"""`Module.to`, `.cuda`, `.half`: parameters change in place, as real ones do.

PyTorch swaps fake parameters for converted ones, and refuses where anything holds a weak reference to them,
as FakeTensorMode itself does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_ledger import FakeLedger
from tb_memplugin.estimate.fake_mode import CountingFakeMode
from tb_memplugin.estimate.patches import Patches

Convert = Callable[[torch.Tensor], torch.Tensor]


class ModuleMoves(Correction):
    """A `Module._apply` that assigns to `.data`, which is what it does for real tensors."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.nn.Module._apply`."""
        original: Any = nn.Module._apply

        def apply(module: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
            if not mode.is_here:
                elsewhere: nn.Module = original(module, fn, recurse)
                return elsewhere
            kinds = _kinds(module)
            if {nn.Parameter, torch.Tensor} & kinds:
                raise _refused(module)
            if kinds - {FakeTensor}:  # DTensor and other wrappers
                untouched: nn.Module = original(module, fn, recurse)
                return untouched
            if recurse:
                for child in module.children():
                    child._apply(fn)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _converted(parameter, fn, mode.ledger)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fresh = fn(buffer)
                    _same_purpose(buffer, fresh, mode.ledger)
            return module

        patches.set(nn.Module, "_apply", apply)


def _kinds(module: nn.Module) -> set[type]:
    """The types of a module's own parameters and buffers."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return {type(one) for one in tensors if one is not None}


def _refused(module: nn.Module) -> MemPluginError:
    """A real model would be fake afterwards, and its weights lost."""
    return MemPluginError(
        "A model that was built before the estimate is moved or converted inside of it.",
        where=type(module).__name__,
        fix="Build the model inside `with MemoryEstimator():`; it takes no memory there.",
    )


def _converted(parameter: Any, fn: Convert, ledger: FakeLedger) -> Any:
    """The parameter itself with another memory; a new one where it was on the device `meta`."""
    with torch.no_grad():
        fresh: Any = fn(parameter)
        if not torch._has_compatible_shallow_copy_type(parameter, fresh):
            return nn.Parameter(fresh, parameter.requires_grad)
        _become(parameter, fresh, ledger)
        if parameter.grad is not None:
            gradient = parameter.grad
            _become(gradient, fn(gradient), ledger)
    return parameter


def _become(tensor: Any, converted: Any, ledger: FakeLedger) -> None:
    """Let a fake tensor have another's memory, type and device; it stays the object that it is."""
    if converted is not tensor:
        _same_purpose(tensor, converted, ledger)
        tensor.data = converted
        tensor.fake_device = converted.fake_device


def _same_purpose(old: torch.Tensor, new: torch.Tensor, ledger: FakeLedger) -> None:
    before, after = ledger.block_of(old.untyped_storage()), ledger.block_of(new.untyped_storage())
    if before is not None and after is not None:
        after.category, after.label, after.module = before.category, before.label, before.module
