"""Replace attributes of other libraries while an estimate runs, and restore them when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ABSENT = object()


class Patches:
    """The replaced attributes, in order. `undo` restores them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class, or add one that does not exist."""
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._replaced.append((owner, name, old, value))
        self.on_undo(lambda: _restore(owner, name, old))

    def register(self, operator: str, kernel: Callable[..., Any], dispatch_key: str) -> None:
        """Register a kernel of an operator of aten, such as `lstm.input`.

        torch remembers in Python which kernel it found for an operator, and dynamo uses that. It forgets it
        neither when a kernel is added nor when one goes, so a model that is compiled later would run another.
        """
        name, _, overload = operator.partition(".")
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        library = torch.library.Library("aten", "IMPL")
        self.on_undo(op._dispatch_cache.clear)
        self.on_undo(library._destroy)
        library.impl(operator, kernel, dispatch_key)
        op._dispatch_cache.clear()

    def on_undo(self, action: Callable[[], object]) -> None:
        """Add another action that `undo` runs."""
        self._undo.append(action)

    @contextmanager
    def put_back(self, *, but: Callable[[Any], bool] = lambda _: False) -> Iterator[None]:
        """Restore the attributes inside this context, but not those of owners for which `but` is true."""
        back = [patch for patch in self._replaced if not but(patch[0])]
        for owner, name, old, _ in reversed(back):
            _restore(owner, name, old)
        try:
            yield
        finally:
            for owner, name, _, new in back:
                setattr(owner, name, new)

    def originals(self) -> frozenset[int]:
        """Return the `id()`s of the replaced functions and values, which these patches keep alive."""
        return frozenset(id(old) for _, _, old, _ in self._replaced) - {id(None), id(True), id(False)}

    def undo(self) -> None:
        """Restore everything that was replaced."""
        while self._undo:
            self._undo.pop()()
        self._replaced.clear()


def _restore(owner: Any, name: str, old: Any) -> None:
    if old is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, old)
