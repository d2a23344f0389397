"""Find the models of a program and their calls, without its help."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.guard import Failed
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.torch_private.modules import children_of, parameters_of


def models_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, nn.Module]:
    """Return the outermost modules that hold parameters of optimizers, by name.

    A single module has the name "", several have those of their classes; of several of one class, each has
    that of its global variable in the main program, if it has one. They are found from the first parameter
    of each group upwards, by asking Python's garbage collector who refers to it: some passes over the
    program's objects, and no object is changed.
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
    return _by_name([module for module in _outermost(modules) if _has_parameters(module)])


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in inner]


def _by_name(outermost: Sequence[nn.Module]) -> dict[str, nn.Module]:
    if len(outermost) == 1:
        return {"": outermost[0]}
    classes = Counter(type(module).__name__ for module in outermost)
    program = reversed([*vars(sys.modules["__main__"]).items()])  # of several names, the first
    variables = {id(value): name for name, value in program if type(name) is str}
    models: dict[str, nn.Module] = {}
    for module in outermost:
        name = type(module).__name__
        if classes[name] > 1:
            name = variables.get(id(module), name)
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


def _parameters(module: nn.Module) -> Iterator[int]:
    """Yield the ids of all parameters in a module and the modules in it. No method of theirs is called."""
    pending, visited = [module], set[int]()
    while pending:
        current = pending.pop()
        if id(current) not in visited:
            visited.add(id(current))
            yield from (
                id(parameter) for parameter in parameters_of(current).values() if parameter is not None
            )
            pending += _children(current)


def _has_parameters(module: nn.Module) -> bool:
    return next(_parameters(module), None) is not None


class OutermostCalls:
    """Tells the calls of modules with parameters that are within no other module's call.

    They are the steps of a program that trains nothing.

    Only those of the thread that makes the first one are told. A call is also told of to functions that begin
    to watch modules as it begins.

    Args:
        begins: is called before each call.
        ends: is called after it, also when it raised.
    """

    def __init__(self, begins: Callable[[], object], ends: Callable[[], object]) -> None:
        self._begins, self._ends = begins, ends
        self._calls = ModuleCalls()
        self._outermost: dict[int, weakref.ref[nn.Module]] = {}
        self._thread: int | None = None
        self._depth = 0

    def start(self, failed: Failed) -> None:
        """Begin to tell. `failed` is called if telling raises, which stops it.

        After `stop`, only calls of modules that were outermost before are told: it may be within such a call.
        """
        self._depth = 0
        modules = [module for module in (each() for each in self._outermost.values()) if module is not None]
        for module in modules:
            self._calls.watch(module, self._entered, self._left, failed)
        if not modules:
            self._calls.watch_all(self._entered, self._left, failed)

    def stop(self) -> None:
        """Stop telling. Safe to call within the functions that are told, and twice."""
        self._calls.stop()

    def _entered(self, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            return
        if not self._depth:
            if not _has_parameters(module):
                return
            self._thread, self._depth = thread, 1
            self._outermost[id(module)] = weakref.ref(module)
            self._begins()
        else:
            self._depth += 1

    def _left(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if self._depth and self._thread == threading.get_ident():
            self._depth -= 1
            if not self._depth:
                self._ends()
