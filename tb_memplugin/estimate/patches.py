"""Replace attributes of other libraries while an estimate runs, and restore them when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """The replaced attributes, in order. `undo` restores them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class, or add one that does not exist."""
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self.on_undo(
            (lambda: delattr(owner, name)) if old is _ABSENT else (lambda: setattr(owner, name, old))
        )

    def on_undo(self, action: Callable[[], object]) -> None:
        """Add another action that `undo` runs."""
        self._undo.append(action)

    def undo(self) -> None:
        """Restore everything that was replaced."""
        while self._undo:
            self._undo.pop()()
