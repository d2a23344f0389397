"""What a library plugin is: a few replaced attributes of a library, for as long as an estimate runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from tb_memplugin.estimate.patches import Patches


@runtime_checkable
class Plugin(Protocol):
    """Makes one library run on fake tensors.

    A plugin is asked once, when an estimate begins. It replaces what would wait for another process, start a
    kernel of the library's own, or read values; everything else stays the library's own code.

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
        """The library, as it is installed."""

    def applies(self) -> bool:
        """Whether the library is imported; where it is not the plugin is skipped without a word."""

    def patch(self) -> AbstractContextManager[None]:
        """What replaces the library's attributes when it is entered, and puts them back when it is left."""


@contextmanager
def replaced(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Replace attributes, (owner, name, value) each, and put back what was there, the last first."""
    patches = Patches()
    try:
        for owner, name, value in changes:
            patches.set(owner, name, value)
        yield
    finally:
        patches.undo()
