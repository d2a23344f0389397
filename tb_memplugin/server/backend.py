"""The Memory tab's backend: routes that answer JSON, exported files, and the bundled frontend."""

from __future__ import annotations

import json
import logging
import select
import socket
from collections.abc import Callable, Iterable
from typing import Any

from tensorboard.backend import http_util
from tensorboard.errors import PublicError
from tensorboard.plugins.base_plugin import TBContext
from werkzeug import wrappers

from tb_memplugin.errors import MemPluginError, NotRecordedError, UnreadableFileError
from tb_memplugin.server import static_files
from tb_memplugin.server.answers import Answer, Answers
from tb_memplugin.server.catalog import Catalog
from tb_memplugin.server.freed_memory import FreedMemory
from tb_memplugin.server.monitored import Monitored
from tb_memplugin.server.routes import ROUTES, export
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session, error_body
from tb_memplugin.server.shapes import Json
from tb_memplugin.server.turns import ClientGoneError, Turns
from tb_memplugin.server.windows import Windows
from tb_memplugin.store.paths import PLUGIN_NAME

_log = logging.getLogger("tb_memplugin")

CLIENT_GONE = 499
"""A status that nobody sees, as other servers log it."""

Respond = Callable[[wrappers.Request], wrappers.Response]


class Backend:
    """Answers the tab's requests. They are handled in parallel; none changes the logdir.

    Attributes:
        apps: the WSGI application of each route; `/static/*` serves the frontend.
    """

    def __init__(self, context: TBContext) -> None:
        self._freed_memory = FreedMemory()
        logdir = context.logdir or ""
        data = context.data_provider
        self._session = Session(Catalog(data), Monitored(data), Windows(logdir), logdir)
        self._turns = Turns()
        self._answers = Answers(self._session, self._turns)
        self.apps: dict[str, Any] = {
            route: _app(self._as_json(route, answer)) for route, answer in ROUTES.items()
        }
        self.apps |= {
            "/export": _app(self._export),
            "/static/*": wrappers.Request.application(static_files.serve),
        }

    def respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request for `/data/plugin/tb_memplugin/ROUTE`, as WSGI wants it."""
        route = "/" + environ["PATH_INFO"].partition(f"/plugin/{PLUGIN_NAME}/")[2]
        name = "/static/*" if route.startswith("/static/") else route
        response: Iterable[bytes] = self.apps.get(name, _NO_ROUTE)(environ, start_response)
        return response

    def is_active(self) -> bool:
        """Return whether unreadable files justify the tab; TensorBoard itself looks for our tags."""
        return bool(self._session.unreadable_files())

    def _as_json(self, route: str, answer: Answer) -> Respond:
        def respond(request: wrappers.Request) -> wrappers.Response:
            client, gone = _client(request), lambda: has_gone(request)
            body = self._answers.body(route, answer, Request.of(request), client, gone)
            response: wrappers.Response = http_util.Respond(
                request, body, "application/json", content_encoding="gzip"
            )
            self._freed_memory.give_back_soon()
            return response

        return respond

    def _export(self, request: wrappers.Request) -> wrappers.Response:
        with self._turns.turn(_client(request), "/export", lambda: has_gone(request)):
            return export.respond(self._session, request)


def _client(request: wrappers.Request) -> str:
    return request.remote_addr or ""


def has_gone(request: wrappers.Request) -> bool:
    """Return whether the client has closed its connection, where TensorBoard's server shows it to us."""
    connection = request.environ.get("werkzeug.socket")
    if connection is None:
        return False
    try:
        return bool(select.select([connection], [], [], 0)[0]) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True


def _app(respond: Respond) -> Any:
    """Return a route as a WSGI application that answers with JSON if an error is raised."""

    @wrappers.Request.application
    def app(request: wrappers.Request) -> wrappers.Response:
        if request.method not in ("GET", "HEAD"):
            refused = MemPluginError(f"{request.method} is not supported.", fix="Use GET.")
            return _json(request, 405, error_body(refused))
        try:
            return respond(request)
        except ClientGoneError:
            return wrappers.Response(status=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001  # every failure is reported to the client
            return _json(request, _status(error, request.path), error_body(error))

    return app


def _refuse(request: wrappers.Request) -> wrappers.Response:
    raise NotRecordedError("There is no such route.", where=request.path, fix="docs/http_api.md lists them.")


_NO_ROUTE = _app(_refuse)


def _status(error: Exception, path: str) -> int:
    """Return the HTTP status for an error; log it if it is a bug of ours (500)."""
    if isinstance(error, NotRecordedError | UnreadableFileError):
        return 404
    if isinstance(error, MemPluginError):
        return 400
    if isinstance(error, PublicError):
        return int(getattr(error, "http_code", 500))
    _log.error("The Memory tab's request %s failed", path, exc_info=error)
    return 500


def _json(request: wrappers.Request, code: int, body: Json) -> wrappers.Response:
    text = json.dumps(body, separators=(",", ":"))
    response: wrappers.Response = http_util.Respond(request, text, "application/json", code=code)
    return response
