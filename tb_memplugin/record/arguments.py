"""Arguments that the recording classes share: checks with the same messages, and what is held weakly."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from tb_memplugin.errors import MemPluginError

Optimizers = (
    torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None
)
"""One optimizer, several (perhaps by name), or none."""


Held = TypeVar("Held")


def referents(references: Iterable[weakref.ref[Held]]) -> list[Held]:
    """Return what is still there of what is held weakly."""
    return [referent for reference in references if (referent := reference()) is not None]


def checked_model(model: Any) -> nn.Module:
    """Return the argument if it is a module.

    Raises:
        TypeError: it is not an `nn.Module`, or it is a `weakref.proxy`, which cannot be held weakly.
    """
    if not isinstance(model, nn.Module) or isinstance(model, weakref.ProxyTypes):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    return model


def checked_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return one optimizer, several (those of a dict, too), or none as a list.

    Raises:
        TypeError: the argument is or contains something else.
    """
    single = (
        optimizers is None
        or isinstance(optimizers, torch.optim.Optimizer)
        or not isinstance(optimizers, Iterable)
    )
    values = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    several = [] if optimizers is None else [optimizers] if single else list(values)
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}; "
                "give torch.optim.Optimizer, or a list or dict of them"
            )
    return several


def with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers and those that they wrap, each once.

    A wrapper keeps another optimizer in an attribute, and only the inner one steps and has state. Examples
    are accelerate's wrapper, `ZeroRedundancyOptimizer`, mixed precision with master weights, and chains.
    """
    optimizers_by_id: dict[int, torch.optim.Optimizer] = {}
    pending = list(optimizers)
    while pending:
        optimizer = pending.pop(0)
        if id(optimizer) not in optimizers_by_id:
            optimizers_by_id[id(optimizer)] = optimizer
            for value in vars(optimizer).values():
                values = value if isinstance(value, list | tuple) else (value,)
                pending += [inner for inner in values if isinstance(inner, torch.optim.Optimizer)]
    return list(optimizers_by_id.values())


def at_least_one(name: str, number: Any, where: str) -> int:
    """Return the argument if it is a whole number of at least 1.

    Raises:
        TypeError: it is not a whole number.
        MemPluginError: it is below 1.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} is a {type(number).__name__}; give a whole number")
    if number < 1:
        raise MemPluginError(f"{name} is {number}.", where=where, fix="Give a whole number, 1 or larger.")
    return number


def checked_device(device: Any, where: str) -> torch.device | None:
    """Return the argument as a `torch.device`, None for None. The device need not exist on this machine.

    Raises:
        MemPluginError: torch has no device of that name.
    """
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise MemPluginError(
            f"{device!r} is not a torch device.", where=where, fix='Give "cpu", "cuda:0", or a torch.device.'
        ) from error


def refuse_absent(device: torch.device, where: str, fix: str) -> None:
    """Refuse a device that is neither the CPU nor an accelerator of this machine.

    Raises:
        MemPluginError: this machine does not have the device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type != "cpu" and (accelerator is None or accelerator.type != device.type):
        raise MemPluginError(f"This machine has no device {str(device)!r}.", where=where, fix=fix)


def default_worker_name() -> str:
    """Return `rank<N>` under torchrun or an initialised process group, else `<host>_<pid>`."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return f"rank{torch.distributed.get_rank()}"
    rank = os.environ.get("RANK")
    return f"rank{rank}" if rank else f"{platform.node()}_{os.getpid()}"
