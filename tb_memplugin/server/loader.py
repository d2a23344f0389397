"""The entry point for TensorBoard. It imports nothing else of ours, so that TensorBoard starts as ever."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tensorboard.plugins import base_plugin

PLUGIN_NAME = "tb_memplugin"
_log = logging.getLogger("tb_memplugin")


class MemoryPluginLoader(base_plugin.TBLoader):  # type: ignore[misc]  # tensorboard has no types
    """Loads the Memory tab."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Keep every step; by default TensorBoard keeps ten random steps of data that is not scalar."""
        samples = getattr(flags, "samples_per_plugin", None)
        if samples is not None:
            samples.setdefault(PLUGIN_NAME, 0)

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin:
        """Return the plugin."""
        return MemoryPlugin(context)


class MemoryPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # tensorboard has no types
    """The Memory tab. The first request imports its backend; if that fails, the tab shows the error."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._context = context
        self._importing = threading.Lock()
        self._backend: Any = None

    def get_plugin_apps(self) -> dict[str, Any]:
        """Return one WSGI application for all routes; the backend chooses among its own."""
        return {"/*": self._respond}

    def is_active(self) -> bool:
        """Return whether unreadable files justify the tab; TensorBoard itself looks for our tags."""
        return bool(self.backend().is_active())

    def data_plugin_names(self) -> frozenset[str]:
        """Return the names of plugins whose tags in a run make the tab active: our own."""
        return frozenset({PLUGIN_NAME})

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name and the script of the tab."""
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Memory")

    def backend(self) -> Any:
        """Return the backend, imported once; one that shows why, where it cannot be imported."""
        with self._importing:
            if self._backend is None:
                try:
                    from tb_memplugin.server.backend import Backend

                    self._backend = Backend(self._context)
                except Exception as error:  # noqa: BLE001  # any failure is shown, rather than no tab
                    _log.exception("The Memory tab could not be loaded")
                    self._backend = BrokenBackend(error)
            return self._backend

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        response: Iterable[bytes] = self.backend().respond(environ, start_response)
        return response


class BrokenBackend:
    """A tab that shows one message. It needs only TensorBoard."""

    def __init__(self, error: Exception) -> None:
        from tb_memplugin.server.static_files import message_app

        self.respond = message_app(
            "The backend of the Memory tab could not be loaded into TensorBoard.",
            f"{type(error).__name__}: {error}",
            "Run: tb-memplugin doctor LOGDIR",
        )

    def is_active(self) -> bool:
        """Return True, because there is always a message to show."""
        return True
