"""What TensorBoard's entry point names: it loads the plugin, and puts any failure into the tab."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from tensorboard.plugins import base_plugin

PLUGIN_NAME = "tb_memplugin"
_log = logging.getLogger("tb_memplugin")


class MemoryPluginLoader(base_plugin.TBLoader):  # type: ignore[misc]  # tensorboard has no types
    """Loads the Memory tab. If its code cannot be imported, the tab says why, instead of being absent."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Keep every step: by default TensorBoard keeps ten, picked at random, of what is not a scalar."""
        samples = getattr(flags, "samples_per_plugin", None)
        if samples is not None:
            samples.setdefault(PLUGIN_NAME, 0)

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin:
        """The plugin, or one that shows in the tab why it could not be loaded."""
        try:
            from tb_memplugin.server.plugin import MemoryPlugin

            return MemoryPlugin(context)
        except Exception as error:  # noqa: BLE001  # any failure is shown, rather than no tab
            _log.exception("The Memory tab could not be loaded")
            return BrokenPlugin(context, error)


class BrokenPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # tensorboard has no types
    """A tab that shows one message. Needs nothing but TensorBoard."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext, error: Exception) -> None:
        super().__init__(context)
        self._reason = f"{type(error).__name__}: {error}"

    def get_plugin_apps(self) -> dict[str, Any]:
        """The tab's script alone."""
        from tb_memplugin.server.placeholder import message_app

        text = (
            "The Memory tab could not be loaded on TensorBoard's side.",
            self._reason,
            "Run: tb-memplugin doctor LOGDIR",
        )
        return {"/static/*": message_app(*text)}

    def is_active(self) -> bool:
        """Always: there is something to say."""
        return True

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The tab."""
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Memory")
