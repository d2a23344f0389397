"""`load`: read a trace from any supported file or object, recognized by its content, not by its name."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pickletools import genops
from typing import Any, BinaryIO

from tb_memplugin.budget import out_of_memory
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.read.content import (
    GZIP_MAGIC,
    HEAD_BYTES,
    STDIN,
    ZIP_MAGIC,
    Events,
    FileStream,
    GzipStream,
    Progress,
    ReadRange,
    content_limit,
    embedded_file,
    read_json,
    standard_input,
    too_large,
)
from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.snapshot.columns.rest import read_columns
from tb_memplugin.read.snapshot.safe_pickle import RefusedPickleError, read_pickle
from tb_memplugin.read.snapshot.trace import (
    as_pickled,
    check_not_shared,
    from_traces,
    is_snapshot,
    only_snapshot,
    trace_from_snapshot,
)
from tb_memplugin.store import files
from tb_memplugin.store.paths import HEAD_MAGIC
from tb_memplugin.trace import MemoryTrace, Note

PICKLE_MAGIC = b"\x80"
MOST_OPCODE_BYTES = 1 << 20
"""A refused pickle of protocol 0 that is longer is called a file of another kind."""

TORCH_SAVE_MAGIC = 0x1950A86A20F9469CFC6C
"""The pickle with which files of `torch.save` begin that are no zip archives."""

FOREIGN = (
    *((magic, "compressed twice", "Unpack it once: gunzip") for magic in (GZIP_MAGIC, ZIP_MAGIC)),
    (b"<", "a page or XML that was compressed", "Unpack it: gunzip"),
    (b"BZh", "compressed with bzip2; only gzip is read", "Unpack it: bunzip2"),
    (b"\xfd7zXZ", "compressed with xz; only gzip is read", "Unpack it: unxz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; only gzip is read", "Unpack it: unzstd"),
    (b"version https://git-lfs", "a pointer of Git LFS: the file itself was not downloaded", "git lfs pull"),
    (b"\x93NUMPY", "an array of NumPy", "Save the snapshot itself: torch.cuda.memory._dump_snapshot(path)"),
)
"""How files of other kinds begin, what they are, and what to do."""

EVENT_FILE_MARK = b"brain.Event:"
"""Bytes that are in the first record of every TensorBoard event file."""

DEVICE_TYPE = re.compile(r"[a-z_]{1,32}")

READABLE = (
    "Readable files: memory snapshots (torch.cuda.memory._dump_snapshot, pickle or JSON), Kineto "
    "traces (*.pt.trace.json), raw timelines (export_memory_timeline, *.raw.json), each also as .gz or "
    "saved by torch.save, and windows that memory_trace_handler recorded (window-*.mem)."
)
IN_MEMORY = "an object in memory"


def load(
    source: str | os.PathLike[str] | dict[str, Any] | list[Any],
    *,
    device_type: str = "cuda",
    limit_bytes: int | None = None,
    progress: Progress | None = None,
    untrusted: bool = False,
) -> MemoryTrace:
    """Return the memory trace in a file or an object. Nothing in the file is executed.

    The format is recognized by content, whatever the file's name: a memory snapshot (pickle or JSON), a
    Kineto trace, a raw file of `export_memory_timeline`, each optionally compressed with gzip, in a zip
    archive (`torch.save`) or, a snapshot, in a page of memory_viz; or what `memory_trace_handler` recorded: a
    window's file, or a run's folder, of which the window with the highest peak is returned.

    Args:
        source: a path; a URL that fsspec opens, or a pattern in one that matches one file; `-` for standard
            input (a file of this name is `./-`); or a snapshot or trace in memory, as
            `torch.cuda.memory._snapshot()` returns it.
        device_type: the device type of a snapshot or timeline ("cuda", "xpu", "cpu", …), which the file
            does not contain.
        limit_bytes: the largest size of the uncompressed content, in bytes. Default: the environment
            variable TB_MEMPLUGIN_LIMIT_BYTES, else a quarter of this machine's memory, at least 2 GiB, and
            100 times a gzip file's size, at least 64 MiB.
        progress: called as `progress(done_bytes, total_bytes)` while a file is read.
        untrusted: read in a new process that the system ends if it takes more memory or time than a file of
            its size may: 1 GB or 10 times that, and 60 CPU seconds;
            see `tb_memplugin.budget`. It takes about half a second longer, and reports no progress. Without
            it, content that would fill the memory is refused where that can be counted, and nothing limits
            the time.

    Raises:
        UnreadableFileError: the content has none of these formats, is truncated, damaged, newer than this
            reader or larger than the limit, takes too much memory or time, or is a pickle that would run
            code.
        MemPluginError: an argument is wrong.
        OSError: the file cannot be read.

    Example:
        >>> from tb_memplugin.analysis.moments import peak
        >>> peak(load("snapshot.pickle"), device="cuda:0").bytes
    """
    if not DEVICE_TYPE.fullmatch(device_type):
        raise MemPluginError(
            f"{device_type[:80]!r} is not a device type.", where="load", fix='Give "cuda", "xpu" or "cpu".'
        )
    if isinstance(source, dict | list):
        return _trace_of(source, IN_MEMORY, device_type)
    name = files.only_match(os.fspath(source))
    if untrusted:
        from tb_memplugin.untrusted import load_apart

        return load_apart(name, device_type=device_type, limit_bytes=limit_bytes)
    most = content_limit(limit_bytes)
    if name != STDIN and files.is_folder(name):
        return _highest_window(name)
    opened = standard_input(most) if name == STDIN else files.open_ranges(name)
    try:
        with opened as (read, size), collector_at_rest():
            head = read(0, HEAD_BYTES)
            if head.startswith(HEAD_MAGIC):
                from tb_memplugin.store.windows import read_window  # only recorded windows need protobuf

                return read_window(read, size, name)
            content, first = _unpacked(read, size, name, limit_bytes, progress)
            try:
                return _trace_in(content, first, name, device_type)
            except RefusedPickleError as error:
                if not head.startswith(ZIP_MAGIC):
                    raise
                raise _foreign(name, "The file has tensors or objects, as a checkpoint does.") from error
    except MemoryError as error:
        raise out_of_memory(name) from error


def kineto_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON of a Kineto trace, with its events in `traceEvents`.

    Raises:
        UnreadableFileError: it is no JSON, or is damaged or too large.
        OSError: the file cannot be read.
    """
    name = os.fspath(path)
    with files.open_ranges(name) as (read, size), collector_at_rest():
        content_of, _ = _unpacked(read, size, name)
        content, _ = read_json(content_of(), name, lambda batches: list(chain.from_iterable(batches)))
    return content if isinstance(content, dict) else {"traceEvents": content}


def _unpacked(
    read: ReadRange, size: int, name: str, limit_bytes: int | None = None, progress: Progress | None = None
) -> tuple[Callable[[], Any], bytes]:
    """Return what opens the uncompressed content of a recording, and its first bytes."""
    read, size = embedded_file(read, size, name)
    head = read(0, HEAD_BYTES)
    is_packed = head.startswith(GZIP_MAGIC)
    limit = content_limit(limit_bytes, size if is_packed else None)
    if size > limit and not is_packed:
        raise too_large(limit, name)

    def content() -> Any:
        stream: Any = FileStream(read, size, progress)
        return GzipStream(stream, name, limit) if is_packed else stream

    return content, content().read(HEAD_BYTES) if is_packed else head


def _trace_in(content_of: Callable[[], BinaryIO], head: bytes, name: str, device_type: str) -> MemoryTrace:
    """Return the trace in an uncompressed stream that begins with the bytes `head`."""
    _refuse_known(head, name)
    stream = content_of()
    begin = head.decode(json.detect_encoding(head), errors="replace").lstrip()[:1]
    if begin and begin in "{[":
        content, notes = read_json(stream, name, _written_events)
        trace = _trace_of(
            content, name, device_type, lambda content: as_pickled(content, name, stream.tell())
        )
        return _with_notes(trace, notes)
    columns = read_columns(stream, name)
    if columns is not None:
        with suppress(UnreadableFileError):  # it is read again for the message
            content = only_snapshot(columns, name)
            return _trace_of_snapshot(content, stream.tell(), name, device_type)
    stream = content_of()
    try:
        content, notes = read_pickle(stream, name)
    except RefusedPickleError as error:
        if head.startswith(PICKLE_MAGIC) or _is_pickle(content_of().read(MOST_OPCODE_BYTES)):
            raise
        raise _foreign(name, "The kind of this file is not known.") from error
    except UnreadableFileError as error:
        if not head or head.startswith(PICKLE_MAGIC):
            raise
        raise _foreign(name, "The kind of this file is not known.") from error
    if content == TORCH_SAVE_MAGIC:
        raise UnreadableFileError(
            "The file was written by torch.save in its old form.",
            where=name,
            fix=(
                "If a snapshot was saved so, save it as a pickle: "
                "pickle.dump(torch.load(FILE, weights_only=True), open('snapshot.pickle', 'wb'))"
            ),
        )
    content = from_traces(only_snapshot(content, name))
    if not is_snapshot(content):
        raise _foreign(name, f"The pickle contains {_told(content)}, not a memory snapshot.")
    return _trace_of_snapshot(content, stream.tell(), name, device_type, notes)


def _is_pickle(beginning: bytes) -> bool:
    """Whether bytes are a pickle to its end; none of it runs.

    A text or an image can begin as a pickle of protocol 0 does: `class Net:` with the name of a global, `PNG`
    with that of a persistent object.
    """
    try:
        deque(genops(beginning), maxlen=0)
    except ValueError:
        return False
    return True


def _written_events(batches: Events) -> object:
    from tb_memplugin.read.kineto.trace import written_events  # snapshots need none of it

    return written_events(batches)


def _trace_of_snapshot(
    content: object, content_bytes: int, name: str, device_type: str, notes: tuple[Note, ...] = ()
) -> MemoryTrace:
    """Return the trace in a snapshot from a pickle of so many bytes."""
    checked = check_not_shared(content, name, content_bytes)
    return with_inferred_layers(_with_notes(trace_from_snapshot(checked, name, device_type), notes))


def _with_notes(trace: MemoryTrace, notes: tuple[Note, ...]) -> MemoryTrace:
    return replace(trace, notes=(*notes, *trace.notes), paired=trace.allocations) if notes else trace


def _trace_of(
    content: object,
    name: str,
    device_type: str,
    prepared: Callable[[object], object] = lambda content: content,
) -> MemoryTrace:
    """Return the trace in an object, whose format is recognized by its keys and elements."""
    from tb_memplugin.read.timeline import is_timeline, trace_from_timeline

    content = from_traces(only_snapshot(content, name))
    first = content[0] if isinstance(content, list) and content else None
    if (isinstance(content, dict) and "traceEvents" in content) or (
        isinstance(first, dict) and "ph" in first
    ):
        from tb_memplugin.read.kineto.trace import trace_from_kineto  # snapshots need none of it

        return trace_from_kineto(content, name)
    if is_timeline(content):
        return trace_from_timeline(content, name, "cpu" if device_type == "cpu" else f"{device_type}:0")
    if isinstance(content, list) and len(content) == 2 and all(isinstance(part, list) for part in content):
        raise UnreadableFileError(
            "This memory timeline is already summed over time: it does not contain single events.",
            where=name,
            fix=(
                "Export the raw timeline: prof.export_memory_timeline('timeline.raw.json.gz', "
                "device='cuda:0')."
            ),
        )
    if isinstance(content, dict) and str(content.get("format")).startswith("tb_memplugin."):
        raise UnreadableFileError(
            "This file was exported for other programs; it is not read back.",
            where=name,
            fix=(
                "Give the recording that it was made from. To save that as JSON which can be read: "
                "tb-memplugin json FILE -o OUT --layout snapshot"
            ),
        )
    if is_snapshot(content):
        return with_inferred_layers(trace_from_snapshot(prepared(content), name, device_type))
    raise _foreign(name, f"The file contains {_told(content)}, not a memory trace.")


def _told(content: object) -> str:
    """Describe an object for an error message."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return f"a list that begins with {_told(content[0])}"
    if not isinstance(content, dict):
        return f"an object of type {type(content).__name__}"
    keys = ", ".join(repr(key[:40]) for key in list(content)[:5] if isinstance(key, str))
    return f"a dict with the keys {keys or '(none)'}"


def _foreign(name: str, what: str) -> UnreadableFileError:
    return UnreadableFileError(what, where=name, fix=READABLE)


def _refuse_known(head: bytes, name: str) -> None:
    """Refuse files that are easily mistaken for a trace, with advice on what to do instead."""
    folder = name.rpartition("/")[0] or "."
    if EVENT_FILE_MARK in head[:64]:
        raise UnreadableFileError(
            "This is a TensorBoard event file. The recordings that it names are in files next to it.",
            where=name,
            fix=f"Show them with: tb-memplugin peak {folder}  or: tensorboard --logdir {folder}",
        )
    for magic, what, fix in FOREIGN:
        if head.lstrip().startswith(magic):
            raise UnreadableFileError(f"The file is {what}.", where=name, fix=fix)


def _highest_window(folder: str) -> MemoryTrace:
    """Return the window with the highest peak in a folder, with notes on others and on files not readable."""
    from tb_memplugin.store.reader import load_window, read_recordings  # only folders need protobuf's events

    recordings = read_recordings(folder)
    steps = [step for step in recordings.steps if step.side_file]
    if not steps:
        raise UnreadableFileError(
            "This folder has no memory recording.",
            where=folder,
            fix=f"Find out why with: tb-memplugin doctor {folder}. Or give a file in it. {READABLE}",
        )
    highest = max(
        steps, key=lambda step: max((device.stats.peak_bytes for device in step.metadata.devices), default=0)
    )
    path, count = str(highest.side_file), len({step.side_file for step in steps})
    notes = [Note(f"{problem.where}: {problem.what}", "file_not_read") for problem in recordings.problems]
    if count > 1:
        notes.append(Note(f"{path} has the highest peak of {count:,} windows.", "highest_window"))
    return _with_notes(load_window(path, highest.metadata), tuple(notes))
