"""A Kineto trace with a recording's memory counters in it, for Perfetto. Its own events stay as they are."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import islice
from typing import BinaryIO

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.output import replacing
from tb_memplugin.exports.perfetto import ROWS_AT_ONCE, counters
from tb_memplugin.exports.recorded import first_time, times_are_known
from tb_memplugin.read.kineto.insertion import KinetoText
from tb_memplugin.trace import Kind, MemoryTrace


def write(trace: MemoryTrace, kineto: KinetoText, path: str | os.PathLike[str]) -> Iterator[str]:
    """Write the Kineto trace with the counters of the recording, packed if the path ends in `.gz`.

    The counters are processes of their own, `memory of cuda:0`. Yields a sentence on how exactly the times of
    both agree.

    Raises:
        MemPluginError: the recording has no times, or none of the trace's; or the file cannot be written.
    """
    start, end = first_time(trace), int(trace.events.time_ns[-1]) if len(trace.events) else 0
    if not times_are_known(trace):
        raise MemPluginError(
            "The recording has no times.", where=trace.source, fix="Record it with PyTorch 2.2 or newer."
        )
    if end < kineto.first_ns or start > kineto.last_ns:
        raise MemPluginError(
            f"The recording ({_clock(start)} to {_clock(end)}) and the trace ({_clock(kineto.first_ns)} to "
            f"{_clock(kineto.last_ns)}) have no time in common.",
            where=trace.source,
            fix="Give the trace and the recording of the same run.",
        )
    with replacing(path) as stream:
        if os.fspath(path).endswith(".gz"):
            with gzip.GzipFile(fileobj=stream, mode="wb", filename="", mtime=0) as packed:
                _write(trace, kineto, packed)
        else:
            _write(trace, kineto, stream)
    yield _agreement(trace, kineto)


def _write(trace: MemoryTrace, kineto: KinetoText, stream: BinaryIO | gzip.GzipFile) -> None:
    records = counters(trace, kineto.free_pid, kineto.base_ns)
    stream.write(kineto.content[: kineto.begin])
    stream.write(b"\n" + next(records).encode("ascii"))
    while chunk := list(islice(records, ROWS_AT_ONCE)):
        stream.write("".join(f",\n{record}" for record in chunk).encode("ascii"))
    stream.write(b"," * kineto.has_events)
    stream.write(kineto.content[kineto.begin :])


def _agreement(trace: MemoryTrace, kineto: KinetoText) -> str:
    """Say how many allocations and frees of the recording the trace has, at the same nanosecond."""
    own = np.flatnonzero(np.isin(trace.events.kind, (Kind.ALLOC, Kind.FREE_COMPLETED)))
    time, address = trace.events.time_ns[own], trace.events.address[own]
    inside = (time >= kineto.first_ns) & (time <= kineto.last_ns)
    theirs = set(zip(kineto.memory_ns.tolist(), kineto.memory_address.tolist(), strict=True))
    pairs = zip(time[inside].tolist(), address[inside].tolist(), strict=True)
    if not theirs:
        return "The trace has no memory events (profile_memory=True) that could show how exactly times agree."
    common, count = sum(pair in theirs for pair in pairs), int(np.count_nonzero(inside))
    return (
        f"{common:,} of the {count:,} allocations and frees that the recording has in the time of the trace "
        "are memory events in it, at the same nanosecond."
    )


def _clock(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
