"""Record when each module runs, with hooks that exist only while a profiler records; and name modules.

The hooks log times and autograd sequence numbers instead of opening profiler ranges: this does not change
the traces that other handlers make of the same profile, and costs less than a range.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, itemgetter
from threading import get_ident
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.sources.beside_dynamo import not_compiled_alone
from tb_memplugin.sources.passing_hooks import PassingHook
from tb_memplugin.trace import Module

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path segments that torch.compile, FSDP and checkpoint wrappers insert into names."""


def clean_name(fqn: str) -> str:
    """Return the FQN of a module or parameter without the segments that wrappers insert."""
    if "_" not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


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
        for fqn, module in model.named_modules(prefix=prefix):
            if id(module) in named:
                continue
            key = clean_name(fqn)
            row = self._rows.setdefault(key, len(self.modules))
            if row == len(self.modules):
                self.modules.append(Module(key, _parent(key, self._rows), type(module).__name__))
            self.row_of[id(module)] = row
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        yield tensor, (row, f"{key}.{name}" if key else name)

    def rename(self, modules: Sequence[nn.Module]) -> None:
        """Name the tensors that these modules hold now: a new one may have the id of one that is gone.

        A tensor with several names gets its first. The code makes no Python call per tensor (`held.py`).
        """
        owned: list[tuple[torch.Tensor, tuple[int, str]]] = []
        for held in (attrgetter("_parameters"), attrgetter("_buffers")):
            rows = map(self.row_of.get, map(id, modules))
            owned += [
                (tensor, (row, f"{key}.{name}" if (key := self.modules[row].key) else name))
                for row, tensors in zip(rows, map(dict.items, map(held, modules)), strict=True)
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


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile wrapped the module. Does not load dynamo, which takes seconds, to find out."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


Crossing = tuple[int, int, int, int]
"""(time_ns, row or -1 - row, sequence number, thread ident)"""


def _logging(log: list[Crossing], crossing: int) -> Callable[..., None]:
    """Return a function that logs one crossing, except while dynamo traces it into a graph.

    torch.compile calls the hooks of a compiled module itself outside of its graph.

    An endless `zip` reads the three numbers in one C call: if a profile records stacks, each Python call
    would be an event in the user's own profile.
    """
    note, compiling = log.append, torch.compiler.is_dynamo_compiling
    now = zip(iter(time_ns, None), repeat(crossing), iter(_sequence_number, None), iter(get_ident, None))

    def crossed(*_: object) -> None:
        if not compiling():
            note(next(now))

    return not_compiled_alone(crossed)


class ModuleRecorder:
    """Logs when modules are entered and left. `start` adds the hooks, `stop` removes all of them.

    Modules inside a compiled or scripted module get no hooks: only the outer module's own call is logged.
    Compiled code stays valid, and TorchScript calls no hooks of inner modules.

    Args:
        scripted: whether scripted modules are recorded, too.
    """

    def __init__(self, *, scripted: bool = False) -> None:
        self._scripted = scripted
        self.log: list[Crossing] = []
        """The logged crossings, in time order for each thread."""
        self._hooked: dict[int, weakref.ref[nn.Module]] = {}
        self._handles: list[Any] = []
        self._patched: list[tuple[weakref.ref[nn.Module], Any]] = []

    def start(self, models: Mapping[str, nn.Module], names: ModuleNames) -> None:
        """Add hooks to every module of the models that runs as Python code."""
        self.log, self._hooked = [], {}
        for model in models.values():
            self.hook(model, names)

    def stop(self) -> None:
        """Remove all hooks. Safe to call at any time, and twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for reference, original in self._patched:
            module = reference()
            if module is not None:
                module._compiled_call_impl = original
        self._patched.clear()
        self._hooked.clear()

    def has_hooked(self, module: nn.Module) -> bool:
        """Whether the module has hooks of this recorder."""
        known = self._hooked.get(id(module))
        return known is not None and known() is module

    def hook(self, module: nn.Module, names: ModuleNames) -> None:
        """Add hooks to a module and to those below it, where they have a name and no hooks yet."""
        pending = [module]
        while pending:
            module = pending.pop()
            row, scripted = names.row_of.get(id(module)), isinstance(module, torch.jit.ScriptModule)
            if row is None or self.has_hooked(module) or (scripted and not self._scripted):
                continue
            self._hooked[id(module)] = weakref.ref(module)
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._wrap_compiled(module, row)
                continue
            self._hook(module, row)
            if not scripted and not _is_compiled(module):
                pending.extend(module.children())

    def _hook(self, module: nn.Module, row: int) -> None:
        """Add the first and the last hook, so that what the module's own hooks allocate belongs to it.

        A scripted module refuses hooks by its own methods, but its call from Python does run them.
        """
        for crossing, register, order in (
            (row, nn.Module.register_forward_pre_hook, {"prepend": True}),
            (-1 - row, nn.Module.register_forward_hook, {"always_call": True}),
        ):
            self._handles.append(register(module, PassingHook(_logging(self.log, crossing)), **order))

    def _wrap_compiled(self, module: nn.Module, row: int) -> None:
        """Log around the compiled call of `Module.compile()`, which replaces the call including its hooks."""
        original: Any = module._compiled_call_impl
        enter, leave = _logging(self.log, row), _logging(self.log, -1 - row)

        def logged(*args: Any, **kwargs: Any) -> Any:
            enter()
            try:
                return original(*args, **kwargs)
            finally:
                leave()

        module._compiled_call_impl = logged
        self._patched.append((weakref.ref(module), original))
