"""The Memory tab's backend: routes that answer JSON, and the bundled frontend."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from tensorboard.backend import http_util
from tensorboard.errors import PublicError
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from tb_memplugin.errors import MemPluginError, NotRecordedError, UnreadableFileError
from tb_memplugin.server import static_files
from tb_memplugin.server.catalogue import Catalogue
from tb_memplugin.server.monitored import Monitored
from tb_memplugin.server.routes import ROUTES
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session, error_body
from tb_memplugin.server.shapes import Json
from tb_memplugin.server.windows import Windows
from tb_memplugin.store.paths import PLUGIN_NAME

_log = logging.getLogger("tb_memplugin")

Answer = Callable[[Session, Request], Json]


class MemoryPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # tensorboard has no types
    """Serves what docs/http_api.md says. Handlers run side by side; none writes anything."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        logdir = context.logdir or ""
        data = context.data_provider
        self._catalogue = Catalogue(data)
        self._session = Session(self._catalogue, Monitored(data), Windows(logdir), logdir)

    def get_plugin_apps(self) -> dict[str, Any]:
        """The routes, each a WSGI application."""
        apps = {route: self._app(answer) for route, answer in ROUTES.items()}
        return apps | {"/static/*": wrappers.Request.application(static_files.serve)}

    def is_active(self) -> bool:
        """TensorBoard itself looks for our tags; without any, files that cannot be read are worth a tab."""
        return bool(self._session.unreadable_files())

    def data_plugin_names(self) -> frozenset[str]:
        """The tab is active as soon as a run holds a tag of ours."""
        return frozenset({PLUGIN_NAME})

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """The tab."""
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Memory")

    def _app(self, answer: Answer) -> Any:
        @wrappers.Request.application
        def app(request: wrappers.Request) -> wrappers.Response:
            code, body = self._answer(answer, request)
            text = json.dumps(body, separators=(",", ":"))
            response: wrappers.Response = http_util.Respond(request, text, "application/json", code=code)
            return response

        return app

    def _answer(self, answer: Answer, request: wrappers.Request) -> tuple[int, Json]:
        if request.method not in ("GET", "HEAD"):
            return 405, error_body(MemPluginError(f"{request.method} is not served.", fix="Use GET."))
        try:
            return 200, answer(self._session, Request.of(request))
        except (NotRecordedError, UnreadableFileError) as error:
            return 404, error_body(error)
        except MemPluginError as error:
            return 400, error_body(error)
        except PublicError as error:
            return int(getattr(error, "http_code", 500)), error_body(error)
        except Exception as error:  # noqa: BLE001  # a request's failure is told to who asked
            _log.exception("The Memory tab's request %s failed", request.path)
            return 500, error_body(error)
