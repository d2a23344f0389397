"""Module hooks that a copy, a pickle or a script of the module does not take along."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn


class PassingHook(partial[None]):
    """A hook of ours that does nothing where it is copied or pickled with its module.

    That is `copy.deepcopy(model)` and `torch.save(model)`: a function made inside another could not be
    pickled at all, and would go on calling us from a copy. What takes its place is of Python's own library,
    so the model loads where this package is not installed. `torch.jit.script(model)`, which would compile
    the hook, does not meet it.

    A partial, because its call is none of Python: where a profile records stacks, such calls are events.

    Args:
        call: what the hook does.
    """

    def __new__(cls, call: Callable[..., None]) -> PassingHook:
        """From the first one on, `torch.jit` is told not to look at them."""
        _hide_from_script()
        return super().__new__(cls, call)

    def __reduce__(self) -> tuple[Any, ...]:
        """What takes its place: a method that ignores what it is given."""
        return getattr, (nullcontext(), "__exit__")


_lock = threading.Lock()
_recursive: Any = torch.jit._recursive
_create: Callable[..., Any] | None = None


def _hide_from_script() -> None:
    """From the first hook on, have `torch.jit` make scripts of modules as they are without ours."""
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
    """Take our hooks off a module and those inside it, and put them back where they were."""
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
