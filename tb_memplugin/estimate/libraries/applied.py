"""Apply library plugins while an estimate runs."""

from __future__ import annotations

from collections.abc import Sequence

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.libraries.plugins import PLUGINS, Plugin
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches


class Libraries(Correction):
    """Enters the patch of every plugin that applies."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Enter the plugins' patches; the last one is exited first."""
        for plugin in self.target.plugins:
            if plugin.applies():
                patch = plugin.patch()
                patch.__enter__()
                patches.on_undo(lambda patch=patch: patch.__exit__(None, None, None))  # type: ignore[misc]


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
