"""`load`: a trace from whatever wrote it. The content decides, not the name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, BinaryIO

from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.sources.collector import collector_at_rest
from tb_memplugin.sources.content import (
    GZIP_MAGIC,
    FileStream,
    GzipStream,
    Progress,
    content_limit,
    read_json,
    too_large,
)
from tb_memplugin.sources.kineto.trace import trace_from_kineto
from tb_memplugin.sources.snapshot.from_json import as_pickled, check_not_shared
from tb_memplugin.sources.snapshot.safe_pickle import RefusedPickleError, load_plain
from tb_memplugin.sources.snapshot.trace import trace_from_snapshot
from tb_memplugin.sources.timeline import is_timeline, trace_from_timeline
from tb_memplugin.store import files
from tb_memplugin.store.envelope import HEAD_MAGIC
from tb_memplugin.store.windows import read_window
from tb_memplugin.trace import MemoryTrace

HEAD_BYTES = 4096
PICKLE_MAGIC = b"\x80"
ZIP_MAGIC = b"PK\x03\x04"
EVENT_FILE_MARK = b"brain.Event:"
"""Stands in the first record of every TensorBoard event file."""

DEVICE_TYPE = re.compile(r"[a-z_]{1,32}")

READABLE = (
    "What can be read: memory snapshots (torch.cuda.memory._dump_snapshot, pickle or JSON), Kineto traces "
    "(*.pt.trace.json), raw timelines (export_memory_timeline, *.raw.json), each also as .gz, and windows "
    "that memory_trace_handler recorded (window-*.mem)."
)
IN_MEMORY = "an object in memory"


def load(
    source: str | os.PathLike[str] | dict[str, Any] | list[Any],
    *,
    device_type: str = "cuda",
    limit_bytes: int | None = None,
    progress: Progress | None = None,
) -> MemoryTrace:
    """The memory trace in a file or an object. Nothing in the file is executed.

    The content tells what it is, whatever the file's name: a memory snapshot (pickle or JSON), a Kineto
    trace, a raw file of `export_memory_timeline`, each also packed with gzip, or a window that
    `memory_trace_handler` recorded.

    Args:
        source: a path (local, or any that fsspec opens), or a snapshot or trace in memory, as
            `torch.cuda.memory._snapshot()` gives it.
        device_type: of a snapshot's or a timeline's device: "cuda", "xpu", "cpu", … The file does not tell.
        limit_bytes: how many bytes the content may have when unpacked. By default what the environment
            variable TB_MEMPLUGIN_LIMIT_BYTES says, else a quarter of this machine's memory.
        progress: called as `progress(done_bytes, total_bytes)` while a file is read.

    Raises:
        UnreadableFileError: none of these, truncated, damaged, newer than this reader, larger than the
            limit, or a pickle that wants to run code.
        MemPluginError: an argument is wrong.
        OSError: the file cannot be read.

    Example:
        >>> from tb_memplugin.analysis.peak import peak
        >>> peak(load("snapshot.pickle"), device="cuda:0").bytes
    """
    if not DEVICE_TYPE.fullmatch(device_type):
        raise MemPluginError(
            f"{device_type[:80]!r} is no type of device.", where="load", fix='Give "cuda", "xpu" or "cpu".'
        )
    if isinstance(source, dict | list):
        return _trace_of(source, IN_MEMORY, device_type)
    name = os.fspath(source)
    limit = content_limit(limit_bytes)
    if not files.is_remote(name) and files.is_folder(name):
        raise _folder(name)
    with files.open_ranges(name) as (read, size), collector_at_rest():
        head = read(0, HEAD_BYTES)
        if head.startswith(HEAD_MAGIC):
            return read_window(read, size, name)
        stream: Any = FileStream(read, size, progress)
        if head.startswith(GZIP_MAGIC):
            head = GzipStream(stream, name, limit).read(HEAD_BYTES)
            stream.seek(0)
            stream = GzipStream(stream, name, limit)
        elif size > limit:
            raise too_large(limit, name)
        return _trace_in(stream, head, name, device_type)


def _trace_in(stream: BinaryIO, head: bytes, name: str, device_type: str) -> MemoryTrace:
    """The trace in an unpacked stream, of which the first bytes are known."""
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if begin and begin in b"{[":
        content, notes = read_json(stream, name)
        trace = _trace_of(
            content, name, device_type, lambda content: as_pickled(content, name, stream.tell())
        )
        return replace(trace, notes=(*notes, *trace.notes)) if notes else trace
    _refuse_known(head, name)
    try:
        content = load_plain(stream, name)
    except RefusedPickleError:
        raise
    except UnreadableFileError as error:
        if not head or head.startswith(PICKLE_MAGIC):
            raise
        raise _foreign(name, "The file is of no known kind.") from error
    if not isinstance(content, dict | list) or (isinstance(content, dict) and "segments" not in content):
        raise _foreign(name, f"The pickle holds {_told(content)}, and no memory snapshot.")
    return trace_from_snapshot(check_not_shared(content, name, stream.tell()), name, device_type)


def _trace_of(
    content: object,
    name: str,
    device_type: str,
    prepared: Callable[[object], object] = lambda content: content,
) -> MemoryTrace:
    """The trace in an object, by its shape."""
    first = content[0] if isinstance(content, list) and content else None
    if (isinstance(content, dict) and "traceEvents" in content) or (
        isinstance(first, dict) and "ph" in first
    ):
        return trace_from_kineto(content, name)
    if is_timeline(content):
        return trace_from_timeline(content, name, "cpu" if device_type == "cpu" else f"{device_type}:0")
    if isinstance(content, list) and len(content) == 2 and all(isinstance(part, list) for part in content):
        raise UnreadableFileError(
            "The file is a memory timeline that was summed up per moment: it holds no events any more.",
            where=name,
            fix="Export it raw: prof.export_memory_timeline('timeline.raw.json.gz', device='cuda:0').",
        )
    if isinstance(content, list) or (isinstance(content, dict) and "segments" in content):
        return trace_from_snapshot(prepared(content), name, device_type)
    raise _foreign(name, f"The file holds {_told(content)}, and no memory trace.")


def _told(content: object) -> str:
    """What an object is, for people."""
    if not isinstance(content, dict):
        return f"a {type(content).__name__}"
    keys = ", ".join(repr(key[:40]) for key in list(content)[:5] if isinstance(key, str))
    return f"a dict with the keys {keys or '(none)'}"


def _foreign(name: str, what: str) -> UnreadableFileError:
    return UnreadableFileError(what, where=name, fix=READABLE)


def _refuse_known(head: bytes, name: str) -> None:
    """Refuse files that people may take for a trace, each with what to do."""
    folder = name.rpartition("/")[0] or "."
    if EVENT_FILE_MARK in head[:64]:
        raise UnreadableFileError(
            "The file is a TensorBoard event file: the recordings that it names lie beside it.",
            where=name,
            fix=f"Show them with: tb-memplugin peak {folder}  or: tensorboard --logdir {folder}",
        )
    if head.startswith(ZIP_MAGIC):
        raise _foreign(name, "The file is a zip archive, as torch.save writes it: it holds no memory trace.")
    if head.startswith(GZIP_MAGIC):
        raise _foreign(name, "The file is packed twice.")


def _folder(name: str) -> UnreadableFileError:
    return UnreadableFileError(
        "The path is a folder, and load takes one file.",
        where=name,
        fix=f"For a logdir: tb-memplugin peak {name}  Else give a file in it. {READABLE}",
    )
