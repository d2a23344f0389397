"""Module hooks that a copy or a pickle of the module does not take along."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class PassingHook:
    """A hook of ours that does nothing where it is copied or pickled with its module.

    That is `copy.deepcopy(model)` and `torch.save(model)`: a function made inside another could not be
    pickled at all, and would go on calling us from a copy. What takes its place is of Python's own library,
    so the model loads where this package is not installed.

    Args:
        call: what the hook does.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        """Called by torch."""
        self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        """What takes its place: a method that ignores what it is given."""
        return getattr, (nullcontext(), "__exit__")
