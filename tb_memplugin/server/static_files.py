"""The bundled frontend: serves the files of one folder, or a message where it or the backend is missing."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tensorboard.backend import http_util
from werkzeug import wrappers

_SCRIPT = """\
// Stands in for the Memory tab's frontend. Text is set as text: nothing in it is markup.
const lines = %s;
export function render() {
  const box = document.createElement("main");
  box.setAttribute("role", "alert");
  box.style.cssText = "font:15px/1.6 system-ui,sans-serif;max-width:44em;margin:12vh auto;padding:0 2em";
  lines.forEach((line, row) => {
    const part = document.createElement(row === 0 ? "h1" : "p");
    part.textContent = line;
    part.style.cssText = row === 0 ? "font-size:1.3em" : "white-space:pre-wrap;overflow-wrap:anywhere";
    box.append(part);
  });
  const dark = window.parent !== window && window.parent.document.body.classList.contains("dark-mode");
  document.body.style.cssText = dark ? "background:#303030;color:#eee" : "background:#fff;color:#222";
  document.body.append(box);
}
"""


def message_script(*lines: str) -> str:
    """Return an ES module whose `render` shows lines of text, the first as a heading."""
    return _SCRIPT % json.dumps(lines).replace("<", "\\u003c")


def message_app(*lines: str) -> Any:
    """Return a WSGI application that answers every request with a `message_script`."""
    script = message_script(*lines)

    @wrappers.Request.application
    def app(request: wrappers.Request) -> wrappers.Response:
        response: wrappers.Response = http_util.Respond(request, script, "text/javascript")
        return response

    return app


BUNDLE = Path(__file__).parent / "static"

CONTENT_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".wasm": "application/wasm",
    ".txt": "text/plain",
}

_HASHED = re.compile(r"-[A-Za-z0-9_-]{8,}\.[a-z0-9]+$")
_YEAR = 365 * 24 * 3600

NOT_BUILT = (
    "The Memory tab's frontend is not built.",
    "This is a source checkout. In its folder, run:\n\n    make bundle\n\nthen reload this page. "
    "Wheels and source distributions include the bundle.",
)


def serve(request: wrappers.Request, root: Path = BUNDLE) -> wrappers.Response:
    """Return a file of the bundle; browsers may cache files with a content hash in their name.

    Args:
        request: its path ends in `/static/<name>`.
    """
    name = request.path.rpartition("/static/")[2]
    path = find(name, root)
    if path is None and name == "index.js":
        return _respond(request, message_script(*NOT_BUILT).encode(), "text/javascript", 200, 0)
    if path is None:
        return _respond(request, b"No such file in the Memory tab's bundle.", "text/plain", 404, 0)
    expires = _YEAR if _HASHED.search(path.name) else 0
    return _respond(
        request, _content(path, path.stat().st_mtime_ns), CONTENT_TYPES[path.suffix], 200, expires
    )


def find(name: str, root: Path = BUNDLE) -> Path | None:
    """Return the file with this name; None unless it is a regular file of a known type in the bundle."""
    if not name or "\0" in name or "\\" in name:
        return None
    base = root.resolve()
    try:
        path = (base / name).resolve()
        inside = path.is_relative_to(base) and path.is_file()
    except (OSError, ValueError):
        return None
    return path if inside and path.suffix in CONTENT_TYPES else None


@cache
def _content(path: Path, changed_ns: int) -> bytes:  # noqa: ARG001  # cache key: a new build is read again
    return path.read_bytes()


def _respond(
    request: wrappers.Request, content: bytes, content_type: str, code: int, expires: int
) -> wrappers.Response:
    response: wrappers.Response = http_util.Respond(
        request, content, content_type, code=code, expires=expires
    )
    return response
