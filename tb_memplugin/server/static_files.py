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


def respond(
    request: wrappers.Request, content: str | bytes, content_type: str, **options: Any
) -> wrappers.Response:
    """Return an answer in TensorBoard's own way; `options` are those of `http_util.Respond`."""
    response: wrappers.Response = http_util.Respond(request, content, content_type, **options)
    return response


def message_script(*lines: str) -> str:
    """Return an ES module whose `render` shows lines of text, the first as a heading."""
    return _SCRIPT % json.dumps(lines).replace("<", "\\u003c")


def message_app(*lines: str) -> Any:
    """Return a WSGI application that answers every request with a `message_script`."""
    script = message_script(*lines)

    @wrappers.Request.application
    def app(request: wrappers.Request) -> wrappers.Response:
        return respond(request, script, "text/javascript")

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
        return respond(request, message_script(*NOT_BUILT), "text/javascript")
    if path is None:
        return respond(request, "No such file in the Memory tab's bundle.", "text/plain", code=404)
    expires = _YEAR if _HASHED.search(path.name) else 0
    content = _content(path, path.stat().st_mtime_ns)
    return respond(request, content, CONTENT_TYPES[path.suffix], expires=expires)


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
