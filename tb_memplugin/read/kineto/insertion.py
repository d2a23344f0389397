"""A Kineto trace as the bytes that it is, and where in them, and from when on, events can be added."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.content import GZIP_MAGIC, Events, GzipStream, content_limit, read_json, too_large
from tb_memplugin.read.kineto.events import FIX, arguments_of
from tb_memplugin.read.kineto.fields import base_ns, time_column, whole_column
from tb_memplugin.trace.tables import Int64, UInt64

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]', re.DOTALL)
_EVENTS = b'"traceEvents"'
_ARRAY = re.compile(rb"\s*:\s*\[")

MOST_PID = 1 << 30


@dataclass(frozen=True, slots=True)
class KinetoText:
    """A trace, unchanged, and what is to be known to add events to it.

    Attributes:
        content: the unpacked file.
        begin: where in it the list of events begins.
        has_events: whether the list has any.
        base_ns: the epoch nanoseconds of the trace's time 0.
        first_ns, last_ns: the times of its first and last event, epoch nanoseconds.
        free_pid: this id of a process and those above are not used.
        memory_ns, memory_address: the `[memory]` events: epoch nanoseconds, and addresses; 0 where unknown.
    """

    content: bytes
    begin: int
    has_events: bool
    base_ns: int
    first_ns: int
    last_ns: int
    free_pid: int
    memory_ns: Int64
    memory_address: UInt64


def read_text(file: bytes, path: str, limit_bytes: int | None = None) -> KinetoText:
    """Read a Kineto trace to which events are to be added.

    Args:
        file: the content of the file, which gzip may have packed.
        limit_bytes: as for `tb_memplugin.load`.

    Raises:
        UnreadableFileError: it is not one, is larger than the limit, or has no event with a time.
    """
    is_packed = file.startswith(GZIP_MAGIC)
    limit = content_limit(limit_bytes, len(file) if is_packed else None)
    if not is_packed and len(file) > limit:
        raise too_large(limit, path)
    content = GzipStream(io.BytesIO(file), path, limit).read() if is_packed else file
    document, _ = read_json(io.BytesIO(content), path, _fields_read)
    head: dict[str, Any] = document if isinstance(document, dict) else {}
    written = head.get("traceEvents") if head else document
    begin = _begin(content)
    if not isinstance(written, list) or begin is None:
        raise UnreadableFileError("The file does not contain a list of traceEvents.", where=path, fix=FIX)
    events = [event for event in written if type(event) is dict]
    of_time = [event for event in events if event.get("ph") != "M"]
    time, timed = time_column([event.get("ts") for event in of_time])
    if not timed.any():
        raise UnreadableFileError("No event of the trace has a time.", where=path, fix=FIX)
    base = base_ns(head.get("baseTimeNanoseconds"), int(time[timed].min()))
    pids, _ = whole_column([event.get("pid") for event in events if type(event.get("pid")) is int])
    memory = np.array([event.get("name") == "[memory]" for event in of_time], bool) & timed
    addresses, _ = whole_column(
        [arguments_of(of_time[row]).get("Addr") for row in np.flatnonzero(memory).tolist()]
    )
    return KinetoText(
        content=content,
        begin=begin,
        has_events=bool(written),
        base_ns=base,
        first_ns=int(time[timed].min()) + base,
        last_ns=int(time[timed].max()) + base,
        free_pid=1 + int(pids[(pids >= 0) & (pids < MOST_PID)].max(initial=0)),
        memory_ns=time[memory] + base,
        memory_address=addresses.view(np.uint64),
    )


def _fields_read(batches: Events) -> list[Any]:
    """Return all events, each with the fields that are read: a GPU's trace has hundreds of megabytes."""
    fields = {False: ("ph", "ts", "pid", "name"), True: ("ph", "ts", "pid", "name", "args")}
    return [
        {key: event[key] for key in fields[event.get("name") == "[memory]"] if key in event}
        if type(event) is dict
        else event
        for event in chain.from_iterable(batches)
    ]


def _begin(content: bytes) -> int | None:
    """Return the place behind the bracket with which the list of events begins."""
    depth = 0
    for token in _TOKEN.finditer(content):
        sign = token[0]
        if sign == b"[" and depth == 0:
            return token.end()
        if depth == 1 and sign == _EVENTS and (array := _ARRAY.match(content, token.end())):
            return array.end()
        depth += (sign in b"[{") - (sign in b"]}") if len(sign) == 1 else 0
    return None
