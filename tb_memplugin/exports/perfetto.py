"""Chrome trace JSON, for ui.perfetto.dev and chrome://tracing: levels as counters, ranges as slices.

Format: "Trace Event Format" of the Chromium project. Times are microseconds since the first time in the
trace, which is `otherData.epoch_ns`.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import Any

import numpy as np

from tb_memplugin.analysis.annotations import annotation_ranges
from tb_memplugin.exports.output import replacing
from tb_memplugin.trace import STACKING_ORDER, MemoryTrace, Phase
from tb_memplugin.trace.replay import live_levels
from tb_memplugin.trace.tables import Int64

ROWS_AT_ONCE = 1 << 15
PROGRAM = 1
"""The process id of steps, phases and module calls; devices have the following ids."""

STEPS, PHASES, MODULES = 1, 1_000, 2_000
"""The first thread id of each kind of lane."""

Span = tuple[int, int, str]
"""Start and end, in nanoseconds since the first time in the trace, and a name."""


def write(trace: MemoryTrace, path: str | os.PathLike[str]) -> None:
    """Write counters of each device's allocated bytes (also by category) and reserved bytes, and slices.

    Raises:
        MemPluginError: the file cannot be written.
    """
    with replacing(path) as stream:
        about = {
            "epoch_ns": str(trace.first_time_ns),
            "source": trace.source,
            "times_known": trace.times_are_known,
            "notes": list(trace.notes),
        }
        head = f'{{"displayTimeUnit":"ns","otherData":{_text(about)},"traceEvents":[\n'
        stream.write(head.encode("ascii"))
        records = _records(trace)
        stream.write(next(records).encode("ascii"))
        while chunk := list(islice(records, ROWS_AT_ONCE)):
            stream.write("".join(f",\n{record}" for record in chunk).encode("ascii"))
        stream.write(b"\n]}\n")


def _records(trace: MemoryTrace) -> Iterator[str]:
    epoch = trace.first_time_ns
    yield _meta("process_name", PROGRAM, 0, "program")
    yield from _program(trace, epoch)
    for row, process in _processes(trace, PROGRAM + 1):
        yield from _lanes(_annotated(trace, row, epoch), process, STEPS, "annotations")
    yield from counters(trace, PROGRAM + 1, epoch)


def counters(trace: MemoryTrace, first_process: int, epoch: int) -> Iterator[str]:
    """Yield the records of each device: its name, levels, and requests that failed.

    Args:
        first_process: the id of the first device; the others have the following ids.
        epoch: the epoch nanoseconds of time 0.
    """
    for row, process in _processes(trace, first_process):
        yield _meta("process_name", process, 0, f"memory of {trace.devices[row].name}")
        yield from _levels(trace, row, process, epoch)
        yield from _reserved(trace, row, process, epoch)
        yield from _ooms(trace, row, process, epoch)


def _processes(trace: MemoryTrace, first: int) -> list[tuple[int, int]]:
    return [(row, first + row) for row in range(len(trace.devices)) if trace.is_used(row)]


def _program(trace: MemoryTrace, epoch: int) -> Iterator[str]:
    steps = [(step.start_ns - epoch, step.end_ns - epoch, f"step {step.number}") for step in trace.steps]
    yield from _lanes(steps if len(trace.calls) or len(steps) > 1 else [], PROGRAM, STEPS, "steps")
    phases, calls = trace.phases, trace.calls
    columns = zip(phases.start_ns.tolist(), phases.end_ns.tolist(), phases.name.tolist(), strict=True)
    spans = [(start - epoch, end - epoch, Phase(name).key) for start, end, name in columns]
    yield from _lanes(spans, PROGRAM, PHASES, "phases")
    rows = zip(
        calls.start_ns.tolist(), calls.end_ns.tolist(), calls.name.tolist(), calls.phase.tolist(), strict=True
    )
    names = [module.name for module in trace.modules]
    called = [
        (start - epoch, end - epoch, names[name] + (" (backward)" if phase == Phase.BACKWARD else ""))
        for start, end, name, phase in rows
        if name >= 0
    ]
    yield from _lanes(called, PROGRAM, MODULES, "modules")


def _annotated(trace: MemoryTrace, device: int, epoch: int) -> list[Span]:
    ends = [
        trace.first_time_ns,
        *trace.events.time_ns[-1:].tolist(),
        *trace.annotations.time_ns[-1:].tolist(),
    ]
    return [
        (
            (ends[0] if annotation.start_ns is None else annotation.start_ns) - epoch,
            (max(ends) if annotation.end_ns is None else annotation.end_ns) - epoch,
            annotation.name,
        )
        for annotation in annotation_ranges(trace, device)
    ]


def _lanes(spans: Iterable[Span], process: int, thread: int, name: str) -> Iterator[str]:
    """Yield slices, distributed over as few threads as possible without overlap: viewers drop overlaps."""
    lanes = Lanes()
    for start, end, text in sorted(spans, key=lambda span: (span[0], -span[1])):
        count = len(lanes)
        lane = lanes.take(start, end)
        if lane == count:
            yield _meta("thread_name", process, thread + lane, f"{name} {lane + 1}" if lane else name)
        position = f'"pid":{process},"tid":{thread + lane},"ts":{_micros(start)},"dur":{_micros(end - start)}'
        yield f'{{"ph":"X",{position},"name":{_text(text)}}}'


class Lanes:
    """Lanes in which slices nest but do not overlap. Take spans in order of start, the longer one first."""

    def __init__(self) -> None:
        self._ends: list[list[int]] = []  # ends of the open slices in each lane, innermost last
        self._busy: list[tuple[int, int]] = []  # (end of the innermost slice, lane), ascending
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, start: int, end: int) -> int:
        """Return a span's lane: that of the enclosing slice which ends first, else a free or a new one."""
        self._close(start)
        index = bisect_left(self._busy, (end, -1))
        if index < len(self._busy):
            _, lane = self._busy.pop(index)
        elif self._free:
            lane = heappop(self._free)
        else:
            lane = len(self._ends)
            self._ends.append([])
        self._ends[lane].append(end)
        insort(self._busy, (end, lane))
        return lane

    def _close(self, time: int) -> None:
        while self._busy and self._busy[0][0] <= time:
            _, lane = self._busy.pop(0)
            ends = self._ends[lane]
            while ends and ends[-1] <= time:
                ends.pop()
            if ends:
                insort(self._busy, (ends[-1], lane))
            else:
                heappush(self._free, lane)


def _levels(trace: MemoryTrace, device: int, process: int, epoch: int) -> Iterator[str]:
    blocks, count = trace.allocations, len(trace.events)
    own = blocks.device == device
    curves = {"allocated": own}
    curves |= {f"allocated: {kind.key}": own & (blocks.category == kind) for kind in STACKING_ORDER}
    for name, counted in curves.items():
        level = live_levels(blocks, np.where(counted, blocks.bytes, 0), count, device)
        events = np.unique(np.concatenate((blocks.born[counted], blocks.freed[counted])))
        events = events[(events >= 0) & (events < count)]
        if counted is not own and not len(events) and not level[0]:
            continue
        yield from _counter(name, process, [trace.first_time_ns], [int(level[0])], epoch)
        yield from _counter(name, process, _times(trace, events), level[events + 1].tolist(), epoch)


def _reserved(trace: MemoryTrace, device: int, process: int, epoch: int) -> Iterator[str]:
    if not trace.devices[device].has_reserved:
        return
    start = trace.devices[device].reserved_at_start
    if start is not None:
        yield from _counter("reserved", process, [trace.first_time_ns], [start], epoch)
    rows = np.flatnonzero((trace.events.device == device) & (trace.events.reserved >= 0))
    level = trace.events.reserved[rows]
    changed = np.flatnonzero(np.diff(level, prepend=-1 if start is None else start))
    yield from _counter("reserved", process, _times(trace, rows[changed]), level[changed].tolist(), epoch)


def _ooms(trace: MemoryTrace, device: int, process: int, epoch: int) -> Iterator[str]:
    for oom in trace.ooms:
        if trace.events.device[oom.event] == device:
            at = _micros(int(trace.events.time_ns[oom.event]) - epoch)
            name = f"out of memory: {oom.requested_bytes:,} bytes asked for"
            yield f'{{"ph":"i","s":"p","pid":{process},"tid":0,"ts":{at},"name":{_text(name)}}}'


def _counter(
    name: str, process: int, times_ns: Iterable[int], values: Iterable[int], epoch: int
) -> Iterator[str]:
    before = f'{{"ph":"C","pid":{process},"name":{_text(name)},"ts":'
    for time, value in zip(times_ns, values, strict=True):
        yield f'{before}{_micros(time - epoch)},"args":{{"bytes":{value}}}}}'


def _times(trace: MemoryTrace, events: Int64) -> list[int]:
    times: list[int] = trace.events.time_ns[events].tolist()
    return times


def _micros(nanoseconds: int) -> str:
    """Return microseconds as exact text; a float would lose digits."""
    micros, rest = divmod(abs(nanoseconds), 1_000)
    return f"{'-' if nanoseconds < 0 else ''}{micros}.{rest:03d}"


def _meta(kind: str, process: int, thread: int, name: str) -> str:
    return f'{{"ph":"M","pid":{process},"tid":{thread},"name":"{kind}","args":{{"name":{_text(name)}}}}}'


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
