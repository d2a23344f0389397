"""A real TensorBoard on loopback, on a free port, that ends with the test."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

START_SECONDS = 60.0


@dataclass(frozen=True)
class TensorBoard:
    """Where a server listens, and its process."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fetch(self, path: str, **parameters: Any) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of any path."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(f"{self.url}/{path}{query}", timeout=30) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)

    def get(self, route: str, **parameters: Any) -> Any:
        """A route of the plugin, as JSON."""
        status, body, _ = self.fetch(f"data/plugin/tb_memplugin/{route}", **parameters)
        assert status == 200, body
        return json.loads(body)

    def wait_for(self, route: str, wanted: Callable[[Any], bool], seconds: float = 30.0) -> Any:
        """Ask until the answer is as wanted: TensorBoard loads in the background."""
        end = time.monotonic() + seconds
        while True:
            answer = self.get(route)
            if wanted(answer):
                return answer
            assert time.monotonic() < end, answer
            time.sleep(0.2)


@contextlib.contextmanager
def tensorboard(
    logdir: Any, *arguments: str, program: Sequence[str] = ("-m", "tensorboard.main")
) -> Iterator[TensorBoard]:
    """Run TensorBoard over a folder.

    Args:
        logdir: the folder; "" where the arguments say it another way.
        arguments: more of its command line.
        program: what starts it.
    """
    port = _free_port()
    where = ["--logdir", str(logdir)] if logdir else []
    command = [sys.executable, *program, *where, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--reload_interval", "1", *arguments], stdout=log, stderr=log)
        try:
            _wait_until_it_listens(process, port, log)
            yield TensorBoard(port, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.01)
    log.seek(0)
    raise AssertionError(f"TensorBoard does not answer:\n{log.read().decode(errors='replace')}")
