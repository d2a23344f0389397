"""Keep the values of small tensors that a program creates from its own numbers.

Examples are rates of stochastic depth (`torch.linspace(0, rate, layers).tolist()`), lengths, and tables of
window sizes. Fake tensors lose the values, and models would be built differently.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.known_values import MOST, forget, values_of
from tb_memplugin.estimate.run.patches import Patches

_DRAWN = ("randperm", "randint")
"""Operators whose whole numbers are really drawn, on the CPU: programs shuffle and choose with them."""

_SAMPLED = ("multinomial",)
"""Operators that really draw from a tensor on the CPU, if its values are known."""

_TOSSED = ("rand", "randn", "uniform_", "normal_", "bernoulli_")
"""Operators that really draw a single number, on the CPU: programs toss coins with them."""

_MAKERS = ("arange", "linspace", "logspace", "full", "ones", "zeros", "scalar_tensor", "eye")

_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""Operators that take nothing from a tensor but its shape, dtype and device."""


class Constants(Correction):
    """Lets FakeTensorMode compute with small constant tensors, as it does with single numbers."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Raise torch's limit, which is one element, and let `copy.deepcopy` copy the values, too."""
        if hasattr(fake_tensor, "CONSTANT_NUMEL_LIMIT"):
            patches.set(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST)

        with torch.device("cpu"):  # torch remembers which functions follow `with torch.device`, by identity
            torch.empty(0)
        for name in ("tensor", "as_tensor"):
            patches.set(torch, name, _of_tensors(mode, vars(torch)[name]))
        original: Any = torch.Tensor.__deepcopy__

        def deepcopy_real(tensor: Any, memo: dict[int, Any]) -> Any:
            if type(tensor) is not torch.Tensor:
                return original(tensor, memo)
            with unset_fake_temporarily():  # a batch of a data loader, for example
                return original(tensor, memo)

        def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
            if not mode.is_on() or tensor.constant is None:
                return original(tensor, memo)
            if id(tensor) not in memo:
                memo[id(tensor)] = _copied(mode, tensor, memo)
            return memo[id(tensor)]

        data: Any = torch.Tensor.data

        def assign(tensor: Any, value: Any) -> None:
            data.__set__(tensor, value)
            forget(tensor)
            if (values := values_of(value)) is not None:
                mode.keep_values(tensor, values)

        patches.set(FakeTensor, "data", property(data.__get__, assign))
        patches.set(torch.Tensor, "__deepcopy__", deepcopy_real)
        patches.set(FakeTensor, "__deepcopy__", deepcopy)

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for every operator that creates a tensor from numbers."""
        return {
            getattr(packet, overload): rule
            for rule, names in (
                (_created, _MAKERS),
                (_created_like, _LIKE),
                (_drawn, _DRAWN),
                (_tossed, _TOSSED),
                (_sampled, _SAMPLED),
            )
            for packet in (getattr(torch.ops.aten, name) for name in names)
            for overload in packet.overloads()
            if "out" not in overload.split("_")
        }


def _of_tensors(mode: CountingFakeMode, original: Any) -> Any:
    """Return `torch.tensor`, which also takes lists with fake tensors; their numbers may be unknown."""

    def tensor(data: Any, *rest: Any, device: Any = None, **options: Any) -> Any:
        in_list = isinstance(data, list | tuple) and mode.is_on()
        numbers = [each for each in tree_leaves(data) if isinstance(each, torch.Tensor)] if in_list else []
        if not numbers:
            return original(data, *rest, device=device, **options)
        known = {id(each): values_of(each) for each in numbers}
        with no_dispatch():
            plain = {number: 1 if values is None else values.tolist() for number, values in known.items()}
            types = [each.dtype for each in numbers if each.dtype.is_floating_point]
        filled = tree_map(lambda each: plain.get(id(each), each), data)
        options.setdefault("dtype", types[0] if types else None)
        if all(values is not None for values in known.values()):
            return original(filled, *rest, device=device, **options)
        asked_for = options.pop("requires_grad", False)
        form = original(filled, *rest, **options)
        return torch.empty(form.shape, dtype=form.dtype, device=device, requires_grad=asked_for)

    return tensor


def constant(mode: CountingFakeMode, real: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor that keeps the values of a real one."""
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def _copied(mode: CountingFakeMode, tensor: Any, memo: dict[int, Any]) -> Any:
    """Return a tensor with the same values. PyTorch would copy the storage, and a fake one has no values."""
    with no_dispatch():
        real = tensor.constant.clone()
    out: Any = constant(mode, real)
    mode.see([out], torch.ops.aten.clone.default)
    if isinstance(tensor, nn.Parameter):
        out = nn.Parameter(out, tensor.requires_grad)
    out.grad = copy.deepcopy(tensor.grad, memo)
    return out


def _drawn(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return _created(mode, func, args, kwargs) if on_cpu else mode.quietly(func, *args, **kwargs)


def _sampled(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    out, source = mode.quietly(func, *args, **kwargs), values_of(args[0])
    if out.fake_device.type == "cpu" and source is not None:
        with no_dispatch():
            mode.keep_values(out, func(source, *args[1:], **kwargs))
    return out


def _tossed(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    if out.fake_device.type == "cpu" and out.numel() == 1 and out.layout is torch.strided:
        written = func._schema.is_mutable
        with no_dispatch():
            first = (torch.empty(out.shape, dtype=out.dtype), *args[1:]) if written else args
            mode.keep_values(out, func(*first, **kwargs))
    return out


def _created(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    if out.fake_device.type == "meta" or out.numel() > MOST or out.layout is not torch.strided:
        return out
    with no_dispatch():
        real = func(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))
    if out.fake_device.type == "cpu":
        return constant(mode, real)
    mode.keep_values(out, real)
    return out


def _created_like(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Not on the CPU, where FakeTensorMode makes new tensors of what writes into a constant."""
    out, name = mode.quietly(func, *args, **kwargs), func.__name__
    if out.numel() <= MOST and out.layout is torch.strided and out.fake_device.type not in ("cpu", "meta"):
        fill = args[-1] if "full" in name else int("ones" in name)
        with no_dispatch():
            mode.keep_values(out, torch.full(out.shape, fill, dtype=out.dtype))
    return out
