"""Hooks around the step of every optimizer, which can be added and removed while other threads step.

torch calls such hooks while it iterates over the dictionary that contains them, and a training fails if one
is added or removed meanwhile ("OrderedDict mutated during iteration"). So, while hooks of this module are on,
torch iterates over a copy instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch.optim import optimizer as torch_optimizer

Hook = Callable[..., None]
"""A function that is called with the optimizer, and the positional and keyword arguments of its step."""

_lock = threading.Lock()
_users = 0
_module: Any = torch_optimizer
_original: Any = getattr(_module, "chain", None)
"""The `chain` of torch's optimizer module; None in versions of torch that iterate in another way."""


class _Chain:
    """An `itertools.chain` that copies all its items when called."""

    from_iterable = staticmethod(chain.from_iterable)

    def __call__(self, *several: Iterable[Any]) -> Iterator[Any]:
        return iter(tuple(chain(*several)))  # in one C call, which no other thread can interrupt


_at_once = _Chain()


class StepHooks:
    """Calls functions before and after every optimizer's step, on any thread, until `remove`."""

    def __init__(self, before: Hook, after: Hook) -> None:
        global _users
        with _lock:
            if not _users and _original is not None:
                _module.chain = _at_once
            _users += 1
            self._handles = [
                torch_optimizer.register_optimizer_step_pre_hook(before),
                torch_optimizer.register_optimizer_step_post_hook(after),
            ]

    def remove(self) -> None:
        """Remove the hooks. Safe to call twice."""
        global _users
        with _lock:
            if not self._handles:
                return
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            _users -= 1
            if not _users and _original is not None and _module.chain is _at_once:
                _module.chain = _original
