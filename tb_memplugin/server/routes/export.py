"""`export` and `export_about`: the window of a step as a file for another program.

The files are identical to those that `tb-memplugin export` writes from the window's side file. They are in
the folder for temporary files, and each is downloaded once.
"""

from __future__ import annotations

import threading
import unicodedata
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypedDict
from urllib.parse import quote

from werkzeug import wrappers, wsgi

from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.formats import FORMATS, Format, write_as
from tb_memplugin.exports.output import at_most
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.turns import holding
from tb_memplugin.temporary import new_folder
from tb_memplugin.trace import MemoryTrace

MOST_WAITING = 2
"""How many files may wait to be fetched. A file of a million events can have hundreds of megabytes."""

MOST_BYTES = 1_000_000_000
"""The largest file: a recording of some kilobytes can name far more than a disk has."""

_Key = tuple[str, int, int, str]


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported file."""

    path: Path
    bytes: int
    notes: tuple[str, ...]
    """Sentences about what had to be made up or left out."""


class Exports:
    """Writes one file at a time, because each may need hundreds of megabytes of memory for a few seconds.

    A file is deleted when it has been fetched, when too many newer ones wait, and at the end of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[_Key, Exported] = OrderedDict()
        self._folder: Path | None = None
        self._count = 0

    def written(self, key: _Key, trace: MemoryTrace, title: str) -> Exported:
        """Return the file of a window in a format; write it if it does not exist yet.

        Args:
            key: the side file's path, size and time of change, and the format's name.

        Raises:
            MemPluginError: the file cannot be written.
        """
        with holding(self._lock):
            return self._write(key, trace, title)

    def fetched(self, key: _Key, trace: MemoryTrace, title: str) -> tuple[Exported, BinaryIO]:
        """Return the file, opened for reading, and delete its name.

        Windows keeps the name of an open file: there the caller must call `forget` after closing it.

        Raises:
            MemPluginError: the file cannot be written.
        """
        with holding(self._lock):
            exported = self._write(key, trace, title)
            del self._waiting[key]
            stream = exported.path.open("rb")
            self.forget(exported)
            return exported, stream

    def forget(self, exported: Exported) -> None:
        """Delete a file, if it still exists."""
        with suppress(OSError):
            exported.path.unlink(missing_ok=True)

    def _write(self, key: _Key, trace: MemoryTrace, title: str) -> Exported:
        exported = self._waiting.get(key)
        if exported is None or not exported.path.is_file():
            path = self._new_path()
            notes = _written(key[-1], trace, path, title)
            exported = self._waiting[key] = Exported(path, path.stat().st_size, notes)
        self._waiting.move_to_end(key)
        while len(self._waiting) > MOST_WAITING:
            self.forget(self._waiting.popitem(last=False)[1])
        return exported

    def _new_path(self) -> Path:
        if self._folder is None or not self._folder.is_dir():
            try:
                folder = new_folder()
            except OSError as error:
                raise _no_room(str(error)) from error
            weakref.finalize(self, folder.cleanup)
            self._folder = Path(folder.name)
        self._count += 1
        return self._folder / f"{self._count}.export"


def _written(format_: str, trace: MemoryTrace, path: Path, title: str) -> tuple[str, ...]:
    try:
        with at_most(MOST_BYTES, "Write it with the command, which takes more: tb-memplugin export."):
            return write_as(format_, trace, path, title)
    except MemPluginError as error:
        if isinstance(error.__cause__, OSError):
            raise _no_room(error.what) from error
        if error.where == str(path):  # which says nothing to the client
            raise MemPluginError(error.what, where=title, fix=error.fix) from error
        raise


def _no_room(reason: str) -> MemPluginError:
    return MemPluginError(
        f"The server has no place to write the file: {reason}",
        where="TensorBoard's folder for temporary files",
        fix="Make room there, start TensorBoard with another TMPDIR, or use: tb-memplugin export",
    )


LONGEST_NAME = 60
"""The most bytes of a run's or a worker's name in a file name; file systems accept 255 bytes in all."""

NEVER_INLINE = "sandbox; default-src 'none'"
"""Content security policy of a download: if a browser shows it instead of saving it, no script can run."""


EXPORTS = Exports()


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
    written = EXPORTS.written(download.key, download.trace, download.title)
    return {"name": download.name, "bytes": written.bytes, "notes": list(written.notes)}


def respond(session: Session, request: wrappers.Request) -> wrappers.Response:
    """Return the file as a download."""
    download = _Download(session, Request.of(request))
    if request.method == "HEAD":
        return download.answer(EXPORTS.written(download.key, download.trace, download.title))
    file, stream = EXPORTS.fetched(download.key, download.trace, download.title)
    answer = download.answer(file, wsgi.wrap_file(request.environ, stream))

    def close() -> None:
        stream.close()
        EXPORTS.forget(file)

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
