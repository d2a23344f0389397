"""Record when each module runs, only while a profiler records; and name modules, also those that come later.

Times and autograd sequence numbers are logged instead of opening profiler ranges: this does not change
the traces that other handlers make of the same profile, and costs less than a range.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from threading import get_ident
from time import time_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tb_memplugin.record.beside_compiler import not_compiled_alone
from tb_memplugin.record.guard import UNOWNED, Failed, entry
from tb_memplugin.record.module_calls import Entered, Left, ModuleCalls, compiled_call
from tb_memplugin.record.torch_private.autograd import sequence_number
from tb_memplugin.record.torch_private.compiler import is_optimized
from tb_memplugin.record.torch_private.modules import (
    WRAPPERS,
    buffers_of,
    children_of,
    items_of,
    modules_in,
    parameters_of,
)
from tb_memplugin.trace import Module

if TYPE_CHECKING:
    from tb_memplugin.record.storages import OuterCalls


def clean_name(fqn: str) -> str:
    """Return the FQN of a module or parameter without the segments that wrappers insert."""
    if "_" not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


@dataclass(slots=True)
class ModuleNames:
    """The modules of the models at one moment: one row each, parents before children.

    `row_of` maps `id(module)` to its row; a shared module is listed under its first name.
    `owner_of` maps `id(parameter or buffer)` to (row of the owning module, FQN of the tensor). `version`
    counts how often `rename` was called.
    """

    modules: list[Module] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)
    owner_of: dict[int, tuple[int, str]] = field(default_factory=dict)
    version: int = 0
    _rows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Mapping[str, nn.Module]) -> ModuleNames:
        """Name every module of the models. Each FQN begins with its model's key in `models`, if not empty.

        A module of several models keeps the name that it has in the first.
        """
        names = cls()
        for prefix, model in models.items():
            for tensor, owner in names.add(prefix, model, named=frozenset(names.row_of)):
                names.owner_of.setdefault(id(tensor), owner)
        return names

    def add(
        self, prefix: str, model: nn.Module, named: Container[int] = ()
    ) -> Iterator[tuple[torch.Tensor, tuple[int, str]]]:
        """Name a module and all below it, except those whose id is in `named`.

        Yield their parameters and buffers, with their owners.
        """
        for fqn, module in modules_in(model, prefix):
            if id(module) in named:
                continue
            key = clean_name(fqn)
            row = self._rows.setdefault(key, len(self.modules))
            if row == len(self.modules):
                self.modules.append(Module(key, _parent(key, self._rows), type(module).__name__))
            self.row_of[id(module)] = row
            for tensors in (parameters_of(module), buffers_of(module)):
                for name, tensor in items_of(tensors):
                    if tensor is not None:
                        yield tensor, (row, f"{key}.{name}" if key else name)

    def below(self, parent: nn.Module, name: str) -> str:
        """Return the FQN of what a module has under a name."""
        key = self.modules[self.row_of[id(parent)]].key
        return f"{key}.{name}" if key else name

    def rename(self, modules: Sequence[nn.Module]) -> None:
        """Name the tensors that these modules hold now: a new one may have the id of one that is gone.

        A tensor with several names gets its first. No Python call is made per tensor (`held_storages.py`).
        """
        owned: list[tuple[torch.Tensor, tuple[int, str]]] = []
        for table_of in (parameters_of, buffers_of):
            rows = map(self.row_of.get, map(id, modules))
            owned += [
                (tensor, (row, f"{key}.{name}" if (key := self.modules[row].key) else name))
                for row, tensors in zip(rows, map(dict.items, map(table_of, modules)), strict=True)
                if row is not None
                for name, tensor in tensors
                if tensor is not None
            ]
        owned.reverse()
        self.owner_of.update(zip(map(id, map(itemgetter(0), owned)), map(itemgetter(1), owned), strict=True))
        self.version += 1


def _parent(key: str, rows: Mapping[str, int]) -> int:
    while key:
        key = key.rpartition(".")[0]
        if key in rows:
            return rows[key]
    return -1


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled with `torch.compile(module)` or `module.compile()`."""
    return compiled_call(module) is not None or is_optimized(module)


Crossing = tuple[int, int, int, int]
"""(epoch ns, row of the entered module or -1 - row of the left one, sequence number, thread ident)"""


OuterResult = Callable[[Any], object]
"""Called with the result of such a call, if it ran on another thread than `start`."""


class ModuleRecorder:
    """Logs when modules are entered and left, from `start` to `stop`.

    Within a compiled module only its own call is logged: no Python call happens there.
    """

    def __init__(self, *, scripted: bool = False) -> None:
        self._scripted = scripted
        self._outer_calls: OuterCalls | None = None
        self._outer_result: OuterResult | None = None
        self._failed: Failed | None = None
        self._module_calls = ModuleCalls()
        self.names = ModuleNames()
        """Those of the modules that are watched."""
        self.log: list[Crossing] = []
        """The logged crossings, in time order for each thread."""

    def start(
        self,
        models: Mapping[str, nn.Module],
        names: ModuleNames,
        outer_calls: OuterCalls | None = None,
        outer_result: OuterResult | None = None,
        failed: Failed = UNOWNED.end,
    ) -> None:
        """Watch every module of the models whose calls Python makes.

        Args:
            outer_calls: is told of each call that is within no other on its thread.
            outer_result: is called at the end of each such call on another thread.
            failed: is called when recording a call raised, which stops the watch.
        """
        self.log, self.names, self._failed = [], names, failed
        self._outer_calls, self._outer_result = outer_calls, outer_result
        self._depth = _Depth()
        self._depth.is_first = True
        for model in models.values():
            self.watch(model)

    def stop(self) -> None:
        """Stop watching. Safe to call at any time, and twice."""
        self._module_calls.stop()
        self._outer_calls = self._outer_result = self._failed = None  # they may hold who holds this

    def is_watching(self, module: nn.Module) -> bool:
        """Whether this recorder logs the calls of the module."""
        return self._module_calls.is_watching(module)

    def watch(self, module: nn.Module) -> None:
        """Watch a module and those below it, where they have a name and are not watched yet."""
        pending, failed = [module], self._failed
        assert failed is not None
        while pending:
            module = pending.pop()
            row, scripted = self.names.row_of.get(id(module)), isinstance(module, torch.jit.ScriptModule)
            if row is None or self.is_watching(module) or (scripted and not self._scripted):
                continue
            self._module_calls.watch(module, *self._functions(row), failed)
            if not scripted and not is_compiled(module):
                pending += [child for _, child in items_of(children_of(module)) if child is not None]

    def _functions(self, row: int) -> tuple[Entered, Left]:
        """Return the functions that log the start and the end of a module's calls.

        An endless `zip` reads time, sequence number and thread in one C call: if a profile records stacks,
        each Python call would be an event in the user's own profile.
        """
        note, depth, outer_calls = self.log.append, self._depth, self._outer_calls
        outer_result = self._outer_result
        entering, leaving = (_numbers(crossing) for crossing in (row, -1 - row))

        def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            is_outer = not depth.calls
            if is_outer and outer_calls is not None:
                outer_calls.entered(module, args, kwargs)
            depth.calls += 1
            note(next(entering))
            return is_outer and outer_result is not None and not depth.is_first

        def left(_: nn.Module, __: tuple[Any, ...], result: Any) -> None:
            if depth.calls:  # else the call began before the watch did
                depth.calls -= 1
                if not depth.calls and outer_calls is not None:
                    outer_calls.left()
                if not (depth.calls or depth.is_first) and outer_result is not None:
                    outer_result(result)
            note(next(leaving))

        return not_compiled_alone(entered), not_compiled_alone(left)


def _numbers(crossing: int) -> Iterator[Crossing]:
    return zip(iter(time_ns, None), repeat(crossing), iter(sequence_number, None), iter(get_ident, None))


class _Depth(threading.local):
    """How many watched calls run on this thread, and whether it is the one that began to watch."""

    calls = 0
    is_first = False


class Newcomers:
    """Listens to modules and parameters that modules of the models get, until `handles` are removed.

    Without it, what a new module allocates would be its parent's, and a new parameter would have no owner.
    torch reports neither what is written to `module._modules` directly (as `nn.Sequential.insert` does)
    nor what is put into a compiled or scripted module.

    Args:
        modules: the recorder of module calls, which watches new modules. Its names get those of them.
        failed: is told when and why something could not be named, perhaps by an error of a module's own.
    """

    def __init__(self, modules: ModuleRecorder, failed: Failed) -> None:
        self._modules = modules
        self.handles = [
            register_module_module_registration_hook(entry(self._got_module, failed, "adding a module")),
            register_module_parameter_registration_hook(
                entry(self._got_parameter, failed, "adding a parameter")
            ),
        ]

    def _got_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and self._watches(parent):
            names = self._modules.names
            for tensor, owner in names.add(names.below(parent, name), module):
                names.owner_of[id(tensor)] = owner
            self._modules.watch(module)

    def _got_parameter(self, parent: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if self._watches(parent):
            names = self._modules.names
            names.owner_of[id(parameter)] = names.row_of[id(parent)], names.below(parent, name)

    def _watches(self, parent: nn.Module) -> bool:
        return not torch.compiler.is_dynamo_compiling() and self._modules.is_watching(parent)
