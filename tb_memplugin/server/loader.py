"""The entry point for TensorBoard: it loads the plugin, and shows any failure to do so in the tab."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from tensorboard.plugins import base_plugin

PLUGIN_NAME = "tb_memplugin"
_log = logging.getLogger("tb_memplugin")


class MemoryPluginLoader(base_plugin.TBLoader):  # type: ignore[misc]  # tensorboard has no types
    """Loads the Memory tab. If its code cannot be imported, the tab shows the error."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Keep every step; by default TensorBoard keeps ten random steps of data that is not scalar."""
        samples = getattr(flags, "samples_per_plugin", None)
        if samples is not None:
            samples.setdefault(PLUGIN_NAME, 0)

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin:
        """Return the plugin, or one that shows in the tab why it could not be loaded."""
        try:
            from tb_memplugin.server.plugin import MemoryPlugin

            return MemoryPlugin(context)
        except Exception as error:  # noqa: BLE001  # any failure is shown, rather than no tab
            _log.exception("The Memory tab could not be loaded")
            return BrokenPlugin(context, error)


class BrokenPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # tensorboard has no types
    """A tab that shows one message. It needs only TensorBoard."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext, error: Exception) -> None:
        super().__init__(context)
        self._reason = f"{type(error).__name__}: {error}"

    def get_plugin_apps(self) -> dict[str, Any]:
        """Return the only route: the tab's script."""
        from tb_memplugin.server.placeholder import message_app

        text = (
            "The backend of the Memory tab could not be loaded into TensorBoard.",
            self._reason,
            "Run: tb-memplugin doctor LOGDIR",
        )
        return {"/static/*": message_app(*text)}

    def is_active(self) -> bool:
        """Return True, because there is always a message to show."""
        return True

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name and the script of the tab."""
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Memory")
