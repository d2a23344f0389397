"""Find the models of a program, without its help."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.torch_private.modules import children_of, parameters_of


def models_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, nn.Module]:
    """Return the outermost modules that hold parameters of optimizers, by name.

    A single module has the name "", several have those of their classes. They are found from the first
    parameter of each group upwards, by asking Python's garbage collector who refers to it: some passes over
    the program's objects, and no object is changed.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    tensors = [group["params"][0] for group in groups if group["params"]]
    holders = _holders(tensors)
    ids = set(map(id, tensors))
    return _by_name([module for module in _outermost(holders) if ids & set(_parameters(module))])


def models_alive() -> dict[str, nn.Module]:
    """Return the outermost modules with parameters of the whole program, named as by `models_of`.

    It is one pass over the program's objects, and no object is changed.
    """
    modules: list[nn.Module] = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return _by_name([module for module in _outermost(modules) if _parameters(module)])


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in inner]


def _by_name(outermost: Sequence[nn.Module]) -> dict[str, nn.Module]:
    if len(outermost) == 1:
        return {"": outermost[0]}
    models: dict[str, nn.Module] = {}
    for module in outermost:
        name = type(module).__name__
        models[name if name not in models else f"{name}_{len(models)}"] = module
    return models


def _holders(tensors: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Return all modules from which a tensor is reached through modules and dicts alone."""
    holders: list[nn.Module] = []
    visited: set[int] = set()
    reached: list[Any] = list(tensors)
    while reached:
        visited |= set(map(id, reached))
        referrers = [
            referrer
            for referrer in gc.get_referrers(*reached)
            if id(referrer) not in visited and issubclass(type(referrer), dict | nn.Module)
        ]
        holders += [referrer for referrer in referrers if not issubclass(type(referrer), dict)]
        reached = referrers
    return holders


def _children(module: nn.Module) -> Iterable[nn.Module]:
    children: Iterable[nn.Module | None] = children_of(module).values()
    return [child for child in children if child is not None]


def _parameters(module: nn.Module) -> list[int]:
    """Return the ids of all parameters in a module and the modules in it."""
    parameters: list[int] = []
    pending, visited = [module], set[int]()
    while pending:
        current = pending.pop()
        if id(current) not in visited:
            visited.add(id(current))
            parameters += map(id, parameters_of(current).values())
            pending += _children(current)
    return parameters
