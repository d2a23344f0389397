"""A tab that shows a message instead of the frontend: it is not built, or the backend did not load."""

from __future__ import annotations

import json
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
