"""Hooks around the step of every optimizer, which come and go while other threads step.

torch calls such hooks while it goes through the dictionary that holds them, and a training fails where one is
added or taken off meanwhile ("OrderedDict mutated during iteration"). So, as long as ours are on, it goes
through those that there were when it began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch.optim import optimizer as torch_optimizer

Hook = Callable[..., None]
"""Called with the optimizer, the positional and the named arguments of its step."""

_lock = threading.Lock()
_users = 0
_module: Any = torch_optimizer
_original: Any = getattr(_module, "chain", None)
"""None where a torch goes through its hooks in another way."""


class _Chain:
    """`itertools.chain` that takes everything at once."""

    from_iterable = staticmethod(chain.from_iterable)

    def __call__(self, *several: Iterable[Any]) -> Iterator[Any]:
        return iter(tuple(chain(*several)))  # in one go: no other thread comes between


_at_once = _Chain()


class StepHooks:
    """Calls something before and after every optimizer's step, on whichever thread, until `remove`."""

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
        """Call them no more. Safe to call twice."""
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
