"""The interface of library plugins, which replace a few attributes of a library while an estimate runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from tb_memplugin.estimate.run.patches import Patches


@runtime_checkable
class Plugin(Protocol):
    """Makes one library run on fake tensors.

    A plugin is asked once, when an estimate begins. It replaces code that would wait for another process, run
    a kernel of the library's own, or read values. Everything else stays the library's own code.

    Example:
        >>> class Quiet:
        ...     name = "my-library"
        ...     def applies(self) -> bool:
        ...         return "my_library" in sys.modules
        ...     def patch(self) -> AbstractContextManager[None]:
        ...         return replaced((my_library, "launch", lambda *tensors: tensors[0].clone()))
    """

    @property
    def name(self) -> str:
        """The name under which the library is installed."""

    def applies(self) -> bool:
        """Return whether the library is imported; if not, the plugin is skipped silently."""

    def patch(self) -> AbstractContextManager[None]:
        """Return a context manager that replaces the library's attributes, and restores them at its end."""


@contextmanager
def replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Replace attributes, given as (owner, name, value), and restore them afterwards, the last one first."""
    patches = Patches()
    try:
        for owner, name, value in changes:
            patches.set(owner, name, value)
        yield
    finally:
        patches.undo()
