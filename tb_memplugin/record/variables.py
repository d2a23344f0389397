"""Name tensors by the variables that hold them, such as `buffer.states`.

No code of the program runs: neither properties nor `__getattr__`, `__len__`, `__iter__` or `__eq__`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from tb_memplugin.record.tensors_inside import held_by
from tb_memplugin.record.torch_private.dispatch import without_functions_of_subclasses
from tb_memplugin.record.torch_private.modules import MODULE_TABLES
from tb_memplugin.record.torch_private.tensors import storage_key

MOST_OBJECTS = 20_000
"""The largest number of objects that are looked into."""

MOST_ITEMS = 1_000
"""The largest number of items of one container that are looked into."""

DEEPEST = 6
"""How many attributes and indices a name has at most."""

_CLOSED = (ModuleType, FunctionType, type, str, bytes, bytearray, int, float, complex, bool, type(None))
_RUNNING = (torch.optim.Optimizer, torch.profiler.profile)
"""Objects that do not name what they hold: a parameter in `optimizer.param_groups` is the model's."""


def variable_names() -> dict[int, str]:
    """Return the names of storages by their `storage_key`: that of the variable nearest to the running code.

    The variables are those of the modules whose functions run on this thread, the innermost first.
    (Local variables are not searched: before Python 3.13, reading them keeps what they hold alive.)
    """
    names: dict[int, str] = {}
    pending: deque[tuple[str, int, Any]] = deque()
    for space in _namespaces(sys._getframe(1)):
        pending.extend(
            (name, 0, value)
            for name, value in list(space.items())
            if type(name) is str and not name.startswith("__")
        )
    visited: set[int] = set()
    while pending and len(visited) < MOST_OBJECTS:
        name, depth, value = pending.popleft()
        if id(value) in visited or issubclass(type(value), _CLOSED):
            continue
        visited.add(id(value))
        if issubclass(type(value), torch.Tensor):
            _note(names, name, value)
        elif depth < DEEPEST and not issubclass(type(value), _RUNNING):
            pending.extend((name + part, depth + 1, inner) for part, inner in _inside(value))
    return names


def _namespaces(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the global variables of the modules that run, without those of torch and of this package."""
    visited: set[int] = set()
    while frame is not None:
        space, package = frame.f_globals, str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if id(space) not in visited and package not in ("torch", "tb_memplugin"):
            visited.add(id(space))
            yield space
        frame = frame.f_back


def _note(names: dict[int, str], name: str, tensor: torch.Tensor) -> None:
    try:
        with without_functions_of_subclasses():
            names.setdefault(storage_key(torch.Tensor.untyped_storage(tensor)), name)
    except (RuntimeError, NotImplementedError):
        return  # without a storage: functorch's, sparse


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (".name" or "[key]", object) of everything in a container or an instance."""
    is_module = issubclass(type(value), torch.nn.Module)
    for key, inner, is_attribute in held_by(value, MOST_ITEMS):
        is_table = is_attribute and key in MODULE_TABLES
        if is_module and is_table and issubclass(type(inner), dict):  # a scripted module has other tables
            yield from ((f".{name}", member) for name, member in list(dict.items(inner)))
        elif not is_attribute:
            yield (f"[{key!r}]" if type(key) in (str, int) else "[…]"), inner
        elif type(key) is str:
            yield f".{key}", inner
