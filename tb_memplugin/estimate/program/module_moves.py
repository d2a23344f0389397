"""`Module.to`, `.cuda` and `.half` convert fake parameters in place, as real ones; lazy modules.

PyTorch would swap fake parameters for converted ones. It refuses to if anything holds a weak reference to
them, as FakeTensorMode does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import FakeLedger
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

Convert = Callable[[torch.Tensor], torch.Tensor]


class ModuleMoves(Correction):
    """Makes `Module._apply` assign to `.data`, as it does for real tensors."""

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
            if kinds - {FakeTensor, _LazyParameter, _LazyBuffer}:  # DTensor and other wrappers
                untouched: nn.Module = original(module, fn, recurse)
                return untouched
            if recurse:
                for child in module.children():
                    child._apply(fn)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _converted(parameter, fn, mode.ledger)
            for name, buffer in module._buffers.items():
                if isinstance(buffer, _Lazy):
                    _become(buffer, fn(buffer), mode.ledger)
                elif buffer is not None:
                    module._buffers[name] = fresh = fn(buffer)
                    _same_purpose(buffer, fresh, mode.ledger)
            return module

        patches.set(nn.Module, "_apply", apply)


class _Lazy(FakeTensor):
    """A fake tensor without elements, which gets its shape in its module's first forward."""

    shape = torch.Tensor.shape
    original: type[Any]

    def materialize(self, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """Become a fake tensor of this shape."""
        data = torch.empty(shape, device=device or self.fake_device, dtype=dtype or self.dtype)
        self.__class__ = FakeTensor  # type: ignore[assignment]
        self.data = data
        self.fake_device = data.device

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another one without a shape."""
        if id(self) not in memo:
            memo[id(self)] = self.original(self.requires_grad, self.fake_device, self.dtype)
        return memo[id(self)]


class _LazyParameter(_Lazy, UninitializedParameter):
    """As `nn.LazyLinear` makes it: torch asks for its own type."""

    original = UninitializedParameter


class _LazyBuffer(_Lazy, UninitializedBuffer):
    """As `nn.LazyBatchNorm2d` makes it."""

    original = UninitializedBuffer


class LazyModules(Correction):
    """Makes parameters and buffers without a shape fake, too, which torch makes of plain tensors."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace what creates them."""
        for lazy in (_LazyParameter, _LazyBuffer):
            patches.set(lazy.original, "__new__", _made_lazy(mode, lazy))


def _made_lazy(mode: CountingFakeMode, lazy: type[_Lazy]) -> Callable[..., Any]:
    original, is_parameter = lazy.original.__new__, lazy is _LazyParameter

    def new(kind: Any, requires_grad: bool = is_parameter, *args: Any, **options: Any) -> Any:
        if not mode.is_on():
            return original(kind, requires_grad, *args, **options)
        factory = dict(zip(("device", "dtype", "persistent"), args, strict=False)) | options
        persistent = factory.pop("persistent", True)
        tensor: Any = torch.empty(0, requires_grad=requires_grad, **factory)
        tensor.__class__ = lazy
        if is_parameter:
            tensor._is_param = True
        else:
            tensor._is_buffer, tensor.persistent = True, persistent
        return tensor

    return new


def _kinds(module: nn.Module) -> set[type]:
    """Return the types of a module's own parameters and buffers."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return {type(tensor) for tensor in tensors if tensor is not None}


def _refused(module: nn.Module) -> MemPluginError:
    """Return the error for a real model, whose parameters would become fake and lose their values."""
    return MemPluginError(
        "A model that was built before the estimate, or read with its weights, is moved or converted in it.",
        where=type(module).__name__,
        fix=(
            "Build the model inside `with MemoryEstimator():`, where it uses no memory; in place of "
            "from_pretrained of transformers, use from_config."
        ),
    )


def _converted(parameter: Any, fn: Convert, ledger: FakeLedger) -> Any:
    """Return the same parameter with converted memory, or a new one if it was on the device `meta`."""
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
    """Give a fake tensor the memory, values, dtype and device of another; it stays the same Python object."""
    if converted is not tensor:
        _same_purpose(tensor, converted, ledger)
        tensor.data = converted
        tensor.fake_device = converted.fake_device
        tensor.constant = converted.constant


def _same_purpose(old: torch.Tensor, new: torch.Tensor, ledger: FakeLedger) -> None:
    before, after = ledger.block_of(old.untyped_storage()), ledger.block_of(new.untyped_storage())
    if before is not None and after is not None:
        after.category, after.label, after.module = before.category, before.label, before.module
