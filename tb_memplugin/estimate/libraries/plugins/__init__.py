"""Plugins for libraries that need help to run on fake tensors; all are on by default.

They replace a few attributes of a library while an estimate runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.libraries.plugins.distributed import (
    DeviceMeshes,
    Distributed,
    FullySharded,
    Pipelining,
)
from tb_memplugin.estimate.libraries.plugins.megatron import Megatron
from tb_memplugin.estimate.libraries.plugins.transformer_engine import TransformerEngine
from tb_memplugin.estimate.run.patches import replaced

__all__ = ["PLUGINS", "Plugin", "chosen_plugins", "replaced"]


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


PLUGINS: list[Plugin] = [
    Distributed(),
    DeviceMeshes(),
    FullySharded(),
    Pipelining(),
    Megatron(),
    TransformerEngine(),
]
"""The plugins that every estimate uses. Append your own, or remove one, before the estimate begins."""


def chosen_plugins(wanted: Sequence[str | Plugin] | None) -> tuple[Plugin, ...]:
    """Return the plugins that are named or given, in that order; for None, all of `PLUGINS`.

    Raises:
        MemPluginError: no plugin in `PLUGINS` has one of the names, or an object is not a plugin.
    """
    if wanted is None:
        return tuple(PLUGINS)
    plugins = {plugin.name: plugin for plugin in PLUGINS}
    names = [wanted] if isinstance(wanted, str) else wanted
    return tuple(_plugin(name, plugins) for name in names)


def _plugin(wanted: object, plugins: dict[str, Plugin]) -> Plugin:
    if isinstance(wanted, str) and wanted in plugins:
        return plugins[wanted]
    if isinstance(wanted, Plugin) and not isinstance(wanted, str):
        return wanted
    raise MemPluginError(
        f"There is no plugin {str(wanted)[:80]!r}.",
        where="MemoryEstimator(plugins=...)",
        fix=(
            f"Use names among {', '.join(plugins)}; objects with name, applies() and patch(); or () for none."
        ),
    )
