"""The Memory tab's backend: routes that answer JSON, exported files, and the bundled frontend.

An answer is computed once for all clients who ask the same, and kept until its sources change. Memory that
was freed goes back to the system: TensorBoard handles every request in a thread of its own, and glibc has up
to eight pools for each core, which keep what their threads needed once, several hundred megabytes.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import logging
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tensorboard.errors import PublicError
from tensorboard.plugins.base_plugin import TBContext
from werkzeug import wrappers

from tb_memplugin.budget import give_back_freed
from tb_memplugin.errors import MemPluginError, NotRecordedError, UnreadableFileError
from tb_memplugin.server import static_files
from tb_memplugin.server.cache import MIB, Cache
from tb_memplugin.server.catalog import Catalog
from tb_memplugin.server.monitored import Monitored
from tb_memplugin.server.routes import ROUTES, export
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session, error_body
from tb_memplugin.server.shapes import Json
from tb_memplugin.server.turns import ClientGoneError, Turns
from tb_memplugin.server.windows import Read, Windows, is_unchanged, noted_reads
from tb_memplugin.store.paths import PLUGIN_NAME
from tb_memplugin.store.scratch import release
from tb_memplugin.trace.result import json_value

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_ARENA_MAX = -3, -1, -8  # glibc's malloc.h
_OPTIONS = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 20, _M_ARENA_MAX: 1}
"""Smaller blocks, and the last free bytes of each pool, stay for the next request: pages that come back take
longer than most computations on them. With higher limits, much would stay in the pools of threads."""

AFTER_SECONDS = 2.0
"""How long after the last request smaller blocks and pages of scratch files go back.

It takes some milliseconds, in which others compute, and the next request reads the pages again.
"""


class FreedMemory:
    """Has glibc, but no other C library, give freed memory back, and the system pages of scratch files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits, self._asked = False, 0.0
        with suppress(AttributeError, OSError):
            if sys.platform == "linux":
                library = ctypes.CDLL(None)
                for option, value in _OPTIONS.items():
                    library.mallopt(option, value)

    def give_back_soon(self) -> None:
        """Give freed memory back when nobody has asked for two seconds."""
        with self._lock:
            self._asked = time.monotonic()
            if self._waits:
                return
            self._waits = True
        threading.Thread(target=self._give_back, daemon=True).start()

    def _give_back(self) -> None:
        while (rest := self._asked + AFTER_SECONDS - time.monotonic()) > 0:
            time.sleep(rest)
        self._waits = False
        release(0)
        give_back_freed()


MOST_BYTES = 32 * MIB
COMPRESSION = 1
"""The fastest level. TensorBoard's own, 3, takes longer than the network of one building saves."""

CHANGING = frozenset({"/runs", "/steps", "/step_figures", "/ranks", "/fleet", "/export_about"})
"""Routes whose answers are never kept: they say what is new, or write a file."""

Answer = Callable[[Session, Request], object]


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer in gzip format, and what it was computed from."""

    body: bytes
    listing: int
    """The number of the listing, 0 of an answer that is not kept. The listing itself may be large."""
    reads: tuple[Read, ...]


class Answers:
    """Answers requests, and keeps the answers."""

    def __init__(self, session: Session, turns: Turns) -> None:
        self._session, self._turns = session, turns
        self._kept = Cache(MOST_BYTES)

    def body(
        self, route: str, answer: Answer, request: Request, client: str, is_gone: Callable[[], bool]
    ) -> bytes:
        """Return the JSON answer to a request, in gzip format.

        Args:
            is_gone: whether the client has closed the connection.

        Raises:
            ClientGoneError: the client has gone before its request had a turn.
        """
        key = (route, request.experiment, *sorted(request.parameters.items()))
        before = self._kept.kept(key)
        if isinstance(before, _Kept):
            if self._is_current(before, request):
                return before.body
            self._kept.forget(key, before)

        def compute() -> _Kept:
            with self._turns.turn(client, route, is_gone):
                return self._computed(answer, request, keeps=route not in CHANGING)

        result = self._kept.get(key, compute)
        if route in CHANGING:
            self._kept.forget(key, result)
        return result.body

    def _computed(self, answer: Answer, request: Request, *, keeps: bool) -> _Kept:
        listing = self._session.catalog.listing(request.ctx, request.experiment).number if keeps else 0
        with noted_reads() as reads:
            shape = answer(self._session, request)
        text = json.dumps(shape, separators=(",", ":"), default=json_value)
        return _Kept(gzip.compress(text.encode(), COMPRESSION, mtime=0), listing, tuple(reads))

    def _is_current(self, kept: _Kept, request: Request) -> bool:
        listing = self._session.catalog.listing(request.ctx, request.experiment)
        return kept.listing == listing.number and all(map(is_unchanged, kept.reads))


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
            response = static_files.respond(request, body, "application/json", content_encoding="gzip")
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
    return static_files.respond(
        request, json.dumps(body, separators=(",", ":")), "application/json", code=code
    )
