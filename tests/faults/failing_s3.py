"""moto's S3 on loopback, whose requests fail when a test says so: refused, or done without an answer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import fsspec
import pytest

SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
INTERNAL = "<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
STATUSES = {"503": ("503 Slow Down", SLOW_DOWN), "500": ("500 Internal Server Error", INTERNAL)}


class FailingS3:
    """A store in a server of this process. The real client, s3fs, reads and writes it.

    An error is "503" or "500", or any other, for which the connection closes without an answer.
    """

    root = "s3://logs/"
    stride = int(os.environ.get("TB_MEMPLUGIN_S3_STRIDE", "3"))
    """Every which request fails in a test. With 1, the tests take four minutes."""

    texts: ClassVar = {
        "503": ("reduce your request rate", "Service Unavailable"),
        "500": ("an internal error", "Internal Server Error"),
        "timeout": ("",),
        "reset": ("",),
    }
    """What a client says of each error. An answer to HEAD has only the status."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, *_: object) -> None:
                """Print nothing, neither requests nor the connections that fail."""

        self._answer = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._failing, threaded=True, request_handler=Silent)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.count, self.hit, self.error = 0, False, ""
        self.at, self.lasts, self.is_done = 0, 0, False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def failing(self, error: str, at: int, *, lasts: int, is_done: bool) -> Iterator[None]:
        """Let the `at`-th request of the block fail and so many after it.

        With `is_done` the store does what the first of them asks and only its answer is lost.
        """
        self.count, self.hit, self.error = 0, False, error
        self.at, self.lasts, self.is_done = at, lasts, is_done
        try:
            yield
        finally:
            self.error = ""

    @contextmanager
    def whole(self) -> Iterator[None]:
        error, self.error = self.error, ""
        try:
            yield
        finally:
            self.error = error

    def _failing(self, environ: dict[str, Any], start_response: Any) -> Any:
        if not self.error:
            return self._answer(environ, start_response)
        self.count += 1
        if not self.at <= self.count <= self.at + self.lasts:
            return self._answer(environ, start_response)
        self.hit = True
        if self.is_done and self.count == self.at:
            answer = self._answer(environ, lambda *_: lambda _: None)
            b"".join(answer)
        if self.error not in STATUSES:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response("200 OK", [])
            return [b""]
        status, body = STATUSES[self.error]
        if environ["REQUEST_METHOD"] == "HEAD":
            body = ""
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body.encode()]


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[FailingS3]:
    """Yield a store with a bucket "logs", to which s3fs speaks with one attempt for each request."""
    pytest.importorskip("moto.moto_server.werkzeug_app")
    pytest.importorskip("s3fs")
    store = FailingS3()
    for name, value in {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        patch.setenv(name, value)
    patch.setattr("s3fs.core.S3FileSystem.retries", 1)
    store.start()
    system = type(fsspec.filesystem("s3"))
    system.clear_instance_cache()
    try:
        with suppress(FileExistsError):  # moto keeps its buckets in the process
            fsspec.filesystem("s3").mkdir("logs")
        yield store
    finally:
        system.clear_instance_cache()
        store.stop()
