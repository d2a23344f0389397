"""A memory snapshot as PyTorch writes it, for memory_viz, Mosaic and `load`.

Schema: docstring of `torch.cuda.memory._snapshot`. The file keeps exactly what was alive at the start and
after each event, requested sizes, reserved bytes, stacks, streams, pools and annotations. The format has no
fields for categories, operators, phases and module calls; the module of an allocation is written to its
`user_metadata`.
"""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import numpy as np

from tb_memplugin.exports.output import WRITTEN_BY, replacing
from tb_memplugin.exports.recorded import is_used, times_are_known
from tb_memplugin.exports.snapshot_entries import Entries, Frames
from tb_memplugin.exports.snapshot_segments import addresses_of, final_segments
from tb_memplugin.trace import MemoryTrace, Phase

PROTOCOL = 4
"""The pickle protocol. PyTorch's own viewer shows nothing for protocol 5 (pytorch#183842)."""

ENTRIES_AT_ONCE = 1 << 12
"""How many entries are converted to JSON at a time."""

Json = dict[str, Any]


def write(trace: MemoryTrace, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write the snapshot as a pickle.

    Returns:
        Sentences about what had to be made up or left out. The file contains them too, in its
        `allocator_settings`.

    Raises:
        MemPluginError: the file cannot be written.
    """
    content, notes = snapshot_of(trace)
    with replacing(path) as stream:
        pickle.dump(content, stream, PROTOCOL)
    return notes


def write_json(trace: MemoryTrace, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write the snapshot as JSON. Every entry repeats its frames, because JSON has no references.

    Returns:
        Sentences about what had to be made up or left out.

    Raises:
        MemPluginError: the file cannot be written.
    """
    content, notes = snapshot_of(trace)
    traces = content.pop("device_traces")
    with replacing(path) as stream:
        stream.write(json.dumps(content)[:-1].encode("ascii") + b', "device_traces": [')
        for number, entries in enumerate(traces):
            stream.write(b"[" if number == 0 else b",\n[")
            for first in range(0, len(entries), ENTRIES_AT_ONCE):
                chunk = json.dumps(entries[first : first + ENTRIES_AT_ONCE])[1:-1]
                stream.write(f"{',' if first else ''}\n{chunk}".encode("ascii"))
            stream.write(b"]")
        stream.write(b"]}\n")
    return notes


def snapshot_of(trace: MemoryTrace) -> tuple[Json, tuple[str, ...]]:
    """Return the snapshot's dict, and sentences about what had to be made up or left out."""
    frames = Frames(trace.stacks)
    numbers = device_numbers(trace)
    count = max(numbers.values(), default=-1) + 1
    traces: list[list[Json]] = [[] for _ in range(count)]
    segments: list[Json] = []
    notes = [
        f"{trace.devices[row].name} is written as cuda:{number}."
        for row, number in numbers.items()
        if trace.devices[row].name.partition(":")[2] != str(number)
    ]
    for row, number in numbers.items():
        address = addresses_of(trace, row)
        final = final_segments(trace, row, number, address, frames.of)
        entries = Entries(trace, row, address.of, final.slack, frames)
        traces[number] = entries.written()
        segments += final.segments
        notes += [f"{trace.devices[row].name}: {text}" for text in entries.notes]
        if address.made_up:
            notes.append(f"{trace.devices[row].name}: {address.made_up:,} blocks have made-up addresses.")
        if not final.recorded:
            notes.append(
                f"{trace.devices[row].name}: no segments were recorded. Those in this file are made up "
                "around the live blocks: only their sum is meaningful."
            )
    settings = {key: value for key, value in trace.properties.items() if ".reserved_bytes_at_" not in key}
    about = f"Written by {WRITTEN_BY} from: {trace.source}. {' '.join(notes)}".rstrip()
    content = {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {**settings, "tb_memplugin": about},
        "external_annotations": _annotations(trace, numbers),
    }
    return content, tuple(notes)


def device_numbers(trace: MemoryTrace) -> dict[int, int]:
    """Return the index of each used device in the snapshot: 1 for `cuda:1`; a CPU gets the first free one."""
    used = [row for row in range(len(trace.devices)) if is_used(trace, row)]
    numbers: dict[int, int] = {}
    for row in used:
        kind, _, index = trace.devices[row].name.partition(":")
        if index.isdecimal() and int(index) < 256 and kind != "cpu" and int(index) not in numbers.values():
            numbers[row] = int(index)
    for row in used:
        if row not in numbers:
            numbers[row] = next(n for n in range(len(used) + 256) if n not in numbers.values())
    return numbers


def _annotations(trace: MemoryTrace, numbers: dict[int, int]) -> list[Json]:
    """Return the recorded annotations; for a profile also its steps and phases, on every device."""
    recorded = trace.annotations
    rows = zip(
        recorded.time_ns.tolist(),
        recorded.ends.tolist(),
        recorded.name.tolist(),
        recorded.device.tolist(),
        strict=True,
    )
    written = [
        _annotation(time, bool(ends), trace.annotation_names[name], numbers[device])
        for time, ends, name, device in rows
        if device in numbers
    ]
    if trace.source == "snapshot" or not times_are_known(trace):
        return written
    spans = [(step.start_ns, step.end_ns, f"ProfilerStep#{step.number}") for step in trace.steps]
    phases = trace.phases
    spans += [
        (start, end, Phase(name).key)
        for start, end, name in np.stack((phases.start_ns, phases.end_ns, phases.name), axis=1).tolist()
    ]
    for start, end, name in spans:
        for number in numbers.values():
            written += [_annotation(start, False, name, number), _annotation(end, True, name, number)]
    return sorted(written, key=lambda annotation: int(annotation["time_us"]))


def _annotation(time_ns: int, ends: bool, name: str, device: int) -> Json:
    return {"name": name, "stage": "END" if ends else "START", "device": device, "time_us": time_ns // 1_000}
