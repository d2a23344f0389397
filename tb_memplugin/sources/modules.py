"""Record when each module runs, with hooks that exist only while a profiler records; and name modules.

The hooks log times and autograd sequence numbers instead of opening profiler ranges: this does not change
the traces that other handlers make of the same profile, and costs less than a range.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from threading import get_ident
from time import time_ns
from typing import Any

import torch
from torch import nn

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
    `owner_of` maps `id(parameter or buffer)` to (row of the owning module, FQN of the tensor).
    """

    modules: list[Module] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)
    owner_of: dict[int, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Mapping[str, nn.Module]) -> ModuleNames:
        """Name every module of the models. Each FQN begins with its model's key in `models`, if not empty."""
        names = cls()
        rows: dict[str, int] = {}
        for prefix, model in models.items():
            for fqn, module in model.named_modules(prefix=prefix):
                key = clean_name(fqn)
                if key not in rows:
                    rows[key] = len(names.modules)
                    names.modules.append(Module(key, _parent(key, rows), type(module).__name__))
                names.row_of[id(module)] = rows[key]
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            label = f"{key}.{name}" if key else name
                            names.owner_of.setdefault(id(tensor), (rows[key], label))
        return names


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

    An endless `zip` reads the three numbers in one C call: if a profile records stacks, each Python call
    would be an event in the user's own profile.
    """
    note, compiling = log.append, torch.compiler.is_dynamo_compiling
    now = zip(iter(time_ns, None), repeat(crossing), iter(_sequence_number, None), iter(get_ident, None))

    def crossed(*_: object) -> None:
        if not compiling():
            note(next(now))

    return crossed


class ModuleRecorder:
    """Logs when modules are entered and left. `start` adds the hooks, `stop` removes all of them.

    Modules inside a compiled module get no hooks: only the compiled module's own call is logged, so that its
    compiled code stays valid.
    """

    def __init__(self) -> None:
        self.log: list[Crossing] = []
        """The logged crossings, in time order for each thread."""
        self._handles: list[Any] = []
        self._patched: list[tuple[weakref.ref[nn.Module], Any]] = []

    def start(self, models: Mapping[str, nn.Module], names: ModuleNames) -> None:
        """Add hooks to every module of the models that runs as Python code."""
        self.log = []
        seen: set[int] = set()
        for model in models.values():
            self._hook_tree(model, names, seen)

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

    def _hook_tree(self, module: nn.Module, names: ModuleNames, seen: set[int]) -> None:
        pending = [module]
        while pending:
            module = pending.pop()
            if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
                continue
            seen.add(id(module))
            row = names.row_of.get(id(module))
            if row is None:
                continue
            if getattr(module, "_compiled_call_impl", None) is not None:
                self._wrap_compiled(module, row)
                continue
            self._hook(module, row)
            if not _is_compiled(module):
                pending.extend(module.children())

    def _hook(self, module: nn.Module, row: int) -> None:
        """Add the first and the last hook, so that what the module's own hooks allocate belongs to it."""
        for crossing, register, order in (
            (row, module.register_forward_pre_hook, {"prepend": True}),
            (-1 - row, module.register_forward_hook, {"always_call": True}),
        ):
            self._handles.append(register(PassingHook(_logging(self.log, crossing)), **order))

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
