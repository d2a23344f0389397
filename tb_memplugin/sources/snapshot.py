"""Memory snapshots of `torch.cuda.memory` and `torch.xpu.memory` as traces, whatever PyTorch wrote them.

Read: allocs, frees, segment events, out-of-memory and snapshot marks of every device; the blocks alive
before the first entry; reserved bytes; call stacks; user metadata as labels. Not read: streams, private
pools, rounded sizes, annotations, compile contexts, forward and FX frames, pinned host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.sources.safe_pickle import collector_at_rest, load_plain
from tb_memplugin.sources.snapshot_blocks import FinalState, final_states
from tb_memplugin.sources.snapshot_entries import FIX, MOST_BYTES, Entries, damage_told, read_entries
from tb_memplugin.sources.snapshot_rewind import Beginning, reserved_levels, rewind
from tb_memplugin.sources.snapshot_stacks import Stacks
from tb_memplugin.sources.tables import Names
from tb_memplugin.trace import Category, Device, Kind, MemoryTrace, Module, StartState, Step, events
from tb_memplugin.trace.tables import NOT_NAMED

MOST_DEVICES = 256
"""Rows that the trace's device column can tell apart."""

TOLD_OOMS = 3
"""Out-of-memory entries of one device that get a note of their own."""


def load_snapshot(path: str | Path, device_type: str = "cuda") -> MemoryTrace:
    """The trace in a snapshot's pickle. Nothing in the file is executed.

    Args:
        path: what `_dump_snapshot` wrote, or a pickle of `_snapshot()` or `memory_snapshot()`.
        device_type: "cuda" or "xpu". The file does not tell.

    Raises:
        UnreadableFileError: no snapshot, damaged, or a pickle that wants to run code.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as stream:
        snapshot = load_plain(stream, str(path))
    return trace_from_snapshot(snapshot, str(path), device_type)


def trace_from_snapshot(snapshot: object, source: str, device_type: str = "cuda") -> MemoryTrace:
    """The trace in a snapshot that is in memory.

    Sizes of allocs and frees are requested bytes. An event's place among those of its own device is its
    place in that device's trace; devices are merged by time. There is one step, 0, and it is the window.
    What is contradictory in the snapshot is counted in the trace's notes.

    Args:
        snapshot: the dict of `torch.cuda.memory._snapshot()` or the list of `memory_snapshot()`.
        source: where it is from, for messages.
        device_type: "cuda" or "xpu".

    Raises:
        UnreadableFileError: it is no snapshot, or fields have wrong types.
    """
    content = {"segments": snapshot} if isinstance(snapshot, list) else snapshot
    if not isinstance(content, dict) or "segments" not in content:
        raise UnreadableFileError(
            "The file holds no memory snapshot: there are no segments in it.", where=source, fix=FIX
        )
    with damage_told("The segments of the snapshot", source):
        final = final_states(content["segments"])
    labels, stacks = Names(), Stacks()
    traces = _traces(content, source)
    numbers = sorted(final.keys() | traces.keys())
    if len(numbers) > MOST_DEVICES:
        raise UnreadableFileError(f"The snapshot has {len(numbers)} devices.", where=source, fix=FIX)
    parts = []
    for row, number in enumerate(numbers):
        name = f"{device_type}:{number}"
        with damage_told(f"The trace entries of {name}", source), collector_at_rest():
            entries = read_entries(traces.get(number, []), labels, stacks)
        state = final.get(number) or FinalState(0, np.empty(0, np.uint64), np.empty(0, np.int64), {})
        parts.append(_Part(row, name, entries, state, traces.get(number, [])))
    return _merged(parts, labels, stacks, content)


class _Part:
    """One device of the snapshot."""

    def __init__(
        self, row: int, name: str, entries: Entries, final: FinalState, written: list[dict[str, Any]]
    ) -> None:
        self.row = row
        self.name = name
        self.entries = entries
        self.final = final
        self.start: Beginning = rewind(entries, final)
        self.reserved_at_start, self.reserved = reserved_levels(entries, final)
        self._written = written

    def notes(self) -> Iterator[str]:
        for faults in (self.final.faults, self.entries.faults, self.start.anomalies):
            yield from (f"{self.name}: {count:,} {what}." for what, count in faults.items() if count)
        below = int(np.count_nonzero(self.reserved < 0))
        if below:
            yield f"{self.name}: the reserve falls below zero after {below:,} entries; shown as 0."
        if len(self.reserved) and not self.entries.timed:
            yield (
                f"{self.name}: the snapshot tells no times (PyTorch before 2.2): an entry's index stands for "
                "its time, in microseconds, and how entries of different devices interleave is not known."
            )
        ooms = np.flatnonzero(self.entries.kind == Kind.OOM).tolist()
        for index in ooms[:TOLD_OOMS]:
            free = self._written[index].get("device_free")
            rest = f" with {free:,} bytes free on the device" if type(free) is int else ""
            asked = f"{self.entries.bytes[index]:,} bytes asked for"
            yield f"{self.name}: out of memory at entry {index}: {asked}{rest}."
        if len(ooms) > TOLD_OOMS:
            yield f"{self.name}: out of memory {len(ooms)} times in all."


def _traces(content: dict[str, Any], source: str) -> dict[int, list[dict[str, Any]]]:
    """The trace of each device that has entries."""
    traces = content.get("device_traces") or []
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise UnreadableFileError("The device_traces are not lists.", where=source, fix=FIX)
    return {number: trace for number, trace in enumerate(traces) if trace}


def _merged(parts: list[_Part], labels: Names, stacks: Stacks, content: dict[str, Any]) -> MemoryTrace:
    columns: dict[str, list[np.ndarray]] = {
        "time_ns": [part.entries.time_ns for part in parts],
        "kind": [part.entries.kind for part in parts],
        "device": [np.full(len(part.reserved), part.row, np.uint8) for part in parts],
        "address": [part.entries.address for part in parts],
        "bytes": [part.entries.bytes for part in parts],
        "label": [part.entries.label for part in parts],
        "stack": [part.entries.stack for part in parts],
        "reserved": [np.maximum(part.reserved, 0) for part in parts],
    }
    joined = {name: _joined(values) for name, values in columns.items()}
    if len(parts) > 1:
        order = np.argsort(joined["time_ns"], kind="stable")
        joined = {name: values[order] for name, values in joined.items()}
    time = joined["time_ns"]
    span = (int(time[0]), int(time[-1]) + 1) if len(time) else (0, 1)
    return MemoryTrace(
        source="snapshot",
        events=events(**joined),
        start=_start(parts),
        devices=tuple(Device(part.name) for part in parts),
        steps=(Step(0, *span),),
        modules=(Module(NOT_NAMED),),
        labels=labels.as_tuple(),
        stacks=stacks.as_tuple(),
        notes=(*_notes(content, parts), *(note for part in parts for note in part.notes())),
        properties=_properties(content, parts),
    )


def _joined(values: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(values) if values else np.empty(0, np.int64)


def _start(parts: list[_Part]) -> StartState:
    counts = [len(part.start.address) for part in parts]
    rows = sum(counts)
    return StartState(
        device=np.repeat(np.arange(len(parts), dtype=np.uint8), counts),
        address=_joined([part.start.address for part in parts]).astype(np.uint64),
        bytes=_joined([part.start.bytes for part in parts]).astype(np.int64),
        category=np.full(rows, Category.UNKNOWN, np.uint8),
        module=np.zeros(rows, np.int32),
        label=np.full(rows, -1, np.int32),
    )


def _notes(content: dict[str, Any], parts: list[_Part]) -> Iterator[str]:
    if not parts:
        yield "The snapshot is empty: no device has a segment or a trace entry."
    elif not any(len(part.reserved) for part in parts):
        yield "The snapshot has no trace, only the final state: no time passes in it."
    if content.get("host_segments") or content.get("host_traces"):
        yield "The snapshot also holds pinned host memory, which is not read."


def _properties(content: dict[str, Any], parts: list[_Part]) -> dict[str, str]:
    """Settings of the allocator, and each device's reserved bytes before the first entry and at the end.

    A reserve before the first entry, or on a device without entries, has no event to stand at.
    """
    settings = content.get("allocator_settings")
    told = dict(_settings(settings)) if isinstance(settings, dict) else {}
    for part in parts:
        told[f"{part.name}.reserved_bytes_at_start"] = str(part.reserved_at_start)
        told[f"{part.name}.reserved_bytes_at_end"] = str(part.final.reserved)
    return told


def _settings(settings: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(key, str) and (
            isinstance(value, str | bool | float) or (isinstance(value, int) and abs(value) < MOST_BYTES)
        ):
            yield key, str(value)
