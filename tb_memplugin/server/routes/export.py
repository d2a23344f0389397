"""`export` and `export_about`: the window of a step as a file for another program.

The files are identical to those that `tb-memplugin export` writes from the window's side file.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TypedDict
from urllib.parse import quote

from werkzeug import wrappers, wsgi

from tb_memplugin.exports.formats import FORMATS, Format
from tb_memplugin.server.exported import Exported
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.trace import MemoryTrace

LONGEST_NAME = 60
"""The most bytes of a run's or a worker's name in a file name; file systems accept 255 bytes in all."""

NEVER_INLINE = "sandbox; default-src 'none'"
"""Content security policy of a download: if a browser shows it instead of saving it, no script can run."""


class ExportAbout(TypedDict):
    """A file that was written."""

    name: str
    """The name of the file, such as `memory-baseline-rank0-steps-38-39.html`."""
    bytes: int
    """Its size."""
    notes: list[str]
    """What had to be made up or left out, in sentences."""


def about(session: Session, request: Request) -> ExportAbout:
    """Write the file, so that errors are reported as JSON; `export` then returns the file."""
    download = _Download(session, request)
    written = session.exports.written(download.key, download.trace, download.title)
    return {"name": download.name, "bytes": written.bytes, "notes": list(written.notes)}


def respond(session: Session, request: wrappers.Request) -> wrappers.Response:
    """Return the file as a download."""
    download = _Download(session, Request.of(request))
    if request.method == "HEAD":
        return download.answer(session.exports.written(download.key, download.trace, download.title))
    file, stream = session.exports.fetched(download.key, download.trace, download.title)
    answer = download.answer(file, wsgi.wrap_file(request.environ, stream))

    def close() -> None:
        stream.close()
        session.exports.forget(file)

    answer.call_on_close(close)
    return answer


class _Download:
    """The window, format and file name that a request asks for."""

    def __init__(self, session: Session, request: Request) -> None:
        chosen = session.chosen(request)
        self._format = FORMATS[request.choice("to", tuple(FORMATS))]
        self.trace = session.opened(chosen).trace
        path, stamp = session.windows.file(chosen.entry)
        self.key = (path, *stamp, request.text("to"))
        self.title = PurePosixPath(path).name
        self.name = file_name(chosen.entry.run, chosen.entry.worker, self.trace, self._format)

    def answer(self, file: Exported, body: Iterable[bytes] | None = None) -> wrappers.Response:
        return wrappers.Response(
            body,
            headers={
                "Content-Type": self._format.content_type,
                "Content-Length": str(file.bytes),
                "Content-Disposition": disposition(self.name),
                "X-Content-Type-Options": "nosniff",
                "Content-Security-Policy": NEVER_INLINE,
                "Cache-Control": "no-store",
            },
            direct_passthrough=True,
        )


def file_name(run: str, worker: str, trace: MemoryTrace, format_: Format) -> str:
    """Return a name such as `memory-baseline-rank0-steps-2-3.html`, safe on every system."""
    first, last = trace.steps[0].number, trace.steps[-1].number
    steps = f"step-{first}" if first == last else f"steps-{first}-{last}"
    parts = ["memory", *(part for part in map(_plain, (run, worker)) if part), steps]
    return "-".join(parts) + format_.ending


def _plain(name: str) -> str:
    """Keep letters, digits, dots and dashes of a name; replace everything else by underscores."""
    shown = unicodedata.normalize("NFC", name)[: 4 * LONGEST_NAME]
    text = "".join(sign if sign.isalnum() or sign in ".-_" else " " for sign in shown)
    joined = "_".join(text.split()).strip("._-")
    return joined.encode()[:LONGEST_NAME].decode("utf-8", "ignore").strip("._-")


def disposition(name: str) -> str:
    """Return the Content-Disposition header that makes a browser save a file under this name (RFC 6266)."""
    plain = name.encode("ascii", "replace").decode().replace("?", "_")
    header = f'attachment; filename="{plain}"'
    return header if plain == name else f"{header}; filename*=UTF-8''{quote(name, safe='')}"
