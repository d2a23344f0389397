"""Module hooks that are not carried over when the module is copied, pickled or scripted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn


class PassingHook(partial[None]):
    """A module hook whose copy or pickle does nothing.

    In `copy.deepcopy(model)` and `torch.save(model)` it is replaced by a function of the standard library,
    so that the model loads where this package is not installed. (A nested function could not be pickled,
    and its copy would still call tb_memplugin.) `torch.jit.script(model)`, which would compile the hook,
    does not see it.

    The class is a `partial` because calling one is not a Python call: if a profile records stacks, each
    Python call is an event in it.

    Args:
        call: what the hook does.
    """

    def __new__(cls, call: Callable[..., None]) -> PassingHook:
        """Create a hook; the first one also makes `torch.jit` ignore these hooks."""
        _hide_from_script()
        return super().__new__(cls, call)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the replacement: a method that ignores its arguments."""
        return getattr, (nullcontext(), "__exit__")


_lock = threading.Lock()
_recursive: Any = torch.jit._recursive
_create: Callable[..., Any] | None = None


def _hide_from_script() -> None:
    """Patch `torch.jit`, once, to script modules without these hooks."""
    global _create
    with _lock:
        if _create is None and hasattr(_recursive, "create_script_module"):
            _create = _recursive.create_script_module
            _recursive.create_script_module = _create_script_module


def _create_script_module(module: nn.Module, *given: Any, **named: Any) -> Any:
    assert _create is not None
    with _without_ours(module):
        return _create(module, *given, **named)


@contextmanager
def _without_ours(module: nn.Module) -> Iterator[None]:
    """Remove these hooks from a module and its submodules in the block, and restore them afterwards."""
    with_ours: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for one in module.modules():
        for hooks in (one._forward_pre_hooks, one._forward_hooks):
            if any(isinstance(hook, PassingHook) for hook in hooks.values()):
                with_ours.append((hooks, dict(hooks)))
    for hooks, before in with_ours:
        for number, hook in before.items():
            if isinstance(hook, PassingHook):
                del hooks[number]
    try:
        yield
    finally:
        for hooks, before in with_ours:
            hooks.clear()
            hooks.update(before)
