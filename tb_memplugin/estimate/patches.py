"""Attributes of other libraries that are replaced while an estimate runs, and put back when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """What was replaced, in order. `undo` puts everything back, the last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class; it may be one that is not there."""
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self.on_undo(
            (lambda: delattr(owner, name)) if old is _ABSENT else (lambda: setattr(owner, name, old))
        )

    def on_undo(self, action: Callable[[], object]) -> None:
        """Something else to do when it ends."""
        self._undo.append(action)

    def undo(self) -> None:
        """Put back what was there."""
        while self._undo:
            self._undo.pop()()
