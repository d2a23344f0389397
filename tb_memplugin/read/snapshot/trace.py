"""Read memory snapshots of `torch.cuda.memory` and `torch.xpu.memory`, of any version of PyTorch, as traces.

A trace contains allocs, frees, segment events, out-of-memory and snapshot marks of every device; the blocks
alive before the first entry; segments and reserved bytes; streams, pools and rounded sizes if recorded;
stacks with forward and FX frames; annotations, compile contexts, user metadata; pinned host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from tb_memplugin.budget import give_back_freed
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.annotations import read_annotations, steps_of, with_later_labels
from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.read.snapshot.blocks import final_states, no_state
from tb_memplugin.read.snapshot.categories import categorised
from tb_memplugin.read.snapshot.columns.rest import MANY
from tb_memplugin.read.snapshot.device import SnapshotDevice
from tb_memplugin.read.snapshot.entries import FIX, EntryColumns, damage_refused, read_entries
from tb_memplugin.read.snapshot.rounding import DIVISIONS, OFF, divisions_text
from tb_memplugin.read.snapshot.tables import LONGEST_NAME, Tables, is_cut
from tb_memplugin.read.tables import ModuleTree
from tb_memplugin.trace import MemoryTrace, Module, Note, OutOfMemory, Segments, Step, events, start_state
from tb_memplugin.trace.kinds import Kind
from tb_memplugin.trace.tables import EVENT_DTYPES, MODULE_MARK, MOST_BYTES, Int32, Int64, compact, in_memory

MOST_DEVICES = 256
"""The largest number of devices: the trace's device column is uint8."""

MOST_SPLIT = "max_split_size"
"""The allocator setting: blocks from this size on are not split; -1 if it is off."""

PINNED = "pinned"
"""The device of page-locked host memory, in snapshots of PyTorch after 2.13."""

POOLS = ("pool_id", "segment_pool_id")
"""Fields that are tuples in a pickled snapshot, but lists in JSON."""

SHORTEST_ENTRY, ROOM_BYTES = 16, 1 << 20
"""The smallest size of an entry in a file (real ones take 60 bytes and more), and bytes allowed beyond the
file's size."""


def is_snapshot(content: object) -> bool:
    """Whether an object looks like a snapshot, judged by its type and keys."""
    if isinstance(content, list):  # of segments, as `torch.cuda.memory_snapshot()` returns them
        return not content or (isinstance(content[0], dict) and "blocks" in content[0])
    return isinstance(content, dict) and ("segments" in content or "device_traces" in content)


def only_snapshot(content: object, where: str) -> object:
    """Return the snapshot in a dict, list or tuple around one; anything else as it is.

    Raises:
        UnreadableFileError: there are several.
    """
    if isinstance(content, dict) and not is_snapshot(content):
        pairs: Iterable[tuple[object, object]] = content.items()
    elif isinstance(content, list | tuple):
        pairs = enumerate(content)
    else:
        return content
    inside = {key: value for key, value in pairs if isinstance(value, dict) and is_snapshot(value)}
    if len(inside) > 1:
        names = ", ".join(str(key)[:40] for key in islice(inside, 8))
        raise UnreadableFileError(
            f"The file has {len(inside):,} snapshots: {names}.",
            where=where,
            fix="Save each in a file of its own.",
        )
    return next(iter(inside.values()), content)


def from_traces(content: object) -> object:
    """Return a snapshot without segments if the content is a list of trace entries or `device_traces`."""
    traces = [content] if _begins_with_entry(content) else content
    if isinstance(traces, list) and any(map(_begins_with_entry, traces)):
        return {"device_traces": traces}
    return content


def _begins_with_entry(content: object) -> bool:
    first = content[0] if isinstance(content, list) and content else None
    return isinstance(first, dict) and "action" in first


def as_pickled(snapshot: object, where: str, content_bytes: int) -> object:
    """Turn the lists of a snapshot from JSON into tuples where pickled ones have them, in place.

    Raises:
        UnreadableFileError: see `check_not_shared`.
    """
    for record in _records(snapshot):
        for field in POOLS:
            pool = record.get(field)
            if type(pool) is list:
                record[field] = tuple(pool)
    return check_not_shared(snapshot, where, content_bytes)


def check_not_shared(snapshot: object, where: str, content_bytes: int) -> object:
    """Return the snapshot; refuse it if the same object appears many times, so that a small file is huge.

    Args:
        content_bytes: the uncompressed size of the file.

    Raises:
        UnreadableFileError: devices or segments share one list, or there are more entries than fit into the
            file.
    """
    for kind, lists in _read_row_by_row(snapshot):
        long = [rows for rows in lists if isinstance(rows, list | EntryColumns) and len(rows)]
        if len(long) != len(set(map(id, long))):
            raise UnreadableFileError(f"{kind} of the snapshot are the same list.", where=where, fix=FIX)
        if sum(map(len, long)) * SHORTEST_ENTRY > content_bytes + ROOM_BYTES:
            raise UnreadableFileError(
                f"The snapshot has more {kind} than {content_bytes:,} bytes can hold: they are shared.",
                where=where,
                fix=FIX,
            )
    return snapshot


def _read_row_by_row(snapshot: object) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists whose rows are read into columns, with what their rows are."""
    content = snapshot if isinstance(snapshot, dict) else {"segments": snapshot}
    for key in ("device_traces", "host_traces"):
        traces = content.get(key)
        yield "traces", [traces]
        yield "trace entries", traces if isinstance(traces, list) else []
    for key in ("segments", "host_segments"):
        segments = content.get(key)
        dicts = (
            [segment for segment in segments if isinstance(segment, dict)]
            if isinstance(segments, list)
            else []
        )
        yield "segments", [segments]
        yield "blocks", [segment.get("blocks") for segment in dicts]
    yield "annotations", [content.get("external_annotations")]


def _records(snapshot: object) -> Iterator[dict[str, Any]]:
    """Yield the segments and trace entries that are dicts."""
    content: dict[str, Any] = snapshot if isinstance(snapshot, dict) else {"segments": snapshot}
    traces = content.get("device_traces")
    for records in (content.get("segments"), *(traces if isinstance(traces, list) else ())):
        if isinstance(records, list):
            yield from (record for record in records if type(record) is dict)


def trace_from_snapshot(snapshot: object, source: str, device_type: str = "cuda") -> MemoryTrace:
    """Return the trace in a snapshot in memory.

    Sizes of allocs and frees are requested bytes. The events of each device keep the order of that device's
    trace; devices are merged by time. Steps are those of torch.profiler if it was on, else there is one
    step, number 0, which is the whole window. Contradictions in the snapshot, and parts that it does not
    have, are in the trace's notes.

    Args:
        snapshot: the dict of `torch.cuda.memory._snapshot()` or the list of `memory_snapshot()`.
        device_type: "cuda" or "xpu".

    Raises:
        UnreadableFileError: the object is not a snapshot, or fields have wrong types.
    """
    content = {"segments": snapshot} if isinstance(snapshot, list) else snapshot
    if not is_snapshot(content) or not isinstance(content, dict):
        raise UnreadableFileError(
            "The file is not a memory snapshot: it contains neither segments nor device_traces.",
            where=source,
            fix=FIX,
        )
    tables = Tables()
    segments = content.get("segments")
    with damage_refused("The segments of the snapshot", source):
        final = final_states([] if segments is None else segments, tables)
    traces = _traces(content, source)
    used = {number for number, trace in traces.items() if _is_used(number, trace, content)}
    numbers = sorted(final.keys() | used or traces)
    if len(numbers) > MOST_DEVICES:
        raise UnreadableFileError(f"The snapshot has {len(numbers)} devices.", where=source, fix=FIX)
    settings = dict(_settings(content.get("allocator_settings")))
    plain, splits_all = settings.get(DIVISIONS) == OFF, settings.get(MOST_SPLIT) == "-1"
    devices = []
    for row, number in enumerate(numbers):
        name = f"{device_type}:{number}"
        with damage_refused(f"The trace entries of {name}", source), collector_at_rest():
            entries = read_entries(written := traces.get(number, []), tables)
            if isinstance(written, EntryColumns):
                written.release()
            state = final[number] if number in final else no_state(recorded=segments is not None)
            devices.append(
                SnapshotDevice(row, name, entries, state, rounds_plainly=plain, splits_all=splits_all)
            )
        if len(entries.kind) >= MANY:
            give_back_freed()
    notes = _pinned_memory(content, devices, tables)
    with damage_refused("The annotations of the snapshot", source):
        return _merged(devices, tables, content, {number: row for row, number in enumerate(numbers)}, notes)


def _pinned_memory(content: dict[str, Any], devices: list[SnapshotDevice], tables: Tables) -> list[Note]:
    """Add a device for pinned host memory if the snapshot contains it. Return notes if that fails."""
    segments, traces = content.get("host_segments"), content.get("host_traces") or []
    if not segments and not (any(traces) if isinstance(traces, list) else traces):
        return []
    try:
        with damage_refused("The parts of the pinned host memory", PINNED):
            nested = bool(traces) and isinstance(traces[0], list)
            joined = [entry for part in traces for entry in part] if nested else traces
            entries = read_entries(joined, tables)
            final = final_states(segments or [], tables, device=0)
            state = final.get(0, no_state(recorded=segments is not None))
            devices.append(SnapshotDevice(len(devices), PINNED, entries, state))
    except UnreadableFileError as error:
        size = _segment_bytes(segments)
        text = (
            f"The snapshot also contains pinned host memory, of which {size:,} bytes can be read; it is not"
        )
        return [Note(f"{text} shown: {error.what}", "pinned_not_shown", size)]
    return []


def _segment_bytes(segments: object) -> int:
    """Return the bytes of those segments that tell their size."""
    read = (
        [segment.get("total_size") for segment in segments if isinstance(segment, dict)]
        if isinstance(segments, list)
        else []
    )
    return sum(size for size in read if type(size) is int and 0 <= size < MOST_BYTES)


def _traces(content: dict[str, Any], source: str) -> dict[int, list[dict[str, Any]] | EntryColumns]:
    """Return the trace of each device that has entries, by device number."""
    traces = content.get("device_traces") or []
    if not isinstance(traces, list) or not all(isinstance(trace, list | EntryColumns) for trace in traces):
        raise UnreadableFileError("The device_traces are not lists.", where=source, fix=FIX)
    return {number: trace for number, trace in enumerate(traces) if trace}


def _is_used(number: int, trace: list[Any] | EntryColumns, content: dict[str, Any]) -> bool:
    """Whether a device has annotations, or entries that say more than that a snapshot was taken.

    torch writes that one for all devices of the machine, also for those that the process never uses.
    """
    if isinstance(trace, EntryColumns):
        only_marks = trace.column("action").values == ["snapshot"]
    else:
        only_marks = all(isinstance(entry, dict) and entry.get("action") == "snapshot" for entry in trace)
    if not only_marks:
        return True
    noted = content.get("external_annotations")
    return isinstance(noted, list) and any(
        isinstance(annotation, dict) and annotation.get("device") == number for annotation in noted
    )


def _merged(
    devices: Sequence[SnapshotDevice],
    tables: Tables,
    content: dict[str, Any],
    device_rows: dict[int, int],
    notes: list[Note],
) -> MemoryTrace:
    if not devices:
        return _empty(content)
    columns = _joined([device.event_columns() for device in devices])
    order = np.argsort(columns["time_ns"], kind="stable") if len(devices) > 1 else None
    if order is not None:
        columns = {name: values[order] for name, values in columns.items()}
    labels = tables.labels.as_tuple()
    modules, module_of = marked_modules(labels)
    merged = events(**columns, module=module_of[columns["label"]])
    merged = replace(merged, **{name: compact(getattr(merged, name)) for name in EVENT_DTYPES})
    start = _joined([device.start_columns() for device in devices])
    ranges = read_annotations(content.get("external_annotations"), device_rows, merged)
    time = merged.time_ns
    span = (int(time[0]), int(time[-1]) + 1) if len(time) else (0, 1)
    steps, renumbered = steps_of(ranges.table, ranges.names, span)
    ooms = _ooms(devices, order)
    if ooms and time[ooms[-1].event] > steps[-1].end_ns:  # the recording goes on after its profiled steps
        steps, renumbered = (Step(0, *span),), ()
    read = MemoryTrace(
        source="snapshot",
        events=merged,
        start=start_state(start.pop("bytes"), **start, module=np.zeros(len(start["device"]))),
        devices=tuple(device.device for device in devices),
        steps=steps,
        modules=modules,
        labels=labels,
        stacks=tables.stacks.as_tuple(),
        segments=Segments(**_joined([device.segment_columns() for device in devices])),
        annotations=ranges.table,
        annotation_names=ranges.names,
        streams=tuple(tables.streams),
        pools=tuple(tables.pools),
        contexts=tables.contexts.as_tuple(),
        ooms=ooms,
        counters=tuple(reading for device in devices for reading in device.counters()),
        notes=(
            *_notes(devices, ranges.left_out),
            *renumbered,
            *_long_names(labels, tables.contexts.as_tuple(), ranges.names),
            *(note for device in devices for note in device.notes()),
            *notes,
        ),
        properties=dict(_settings(content.get("allocator_settings"))),
    )
    annotates = np.concatenate([device.entries.annotates for device in devices])
    return categorised(with_later_labels(read, annotates if order is None else annotates[order]))


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the concatenated columns of all devices."""
    return {name: in_memory([part[name] for part in parts]) for name in parts[0]}


def _empty(content: dict[str, Any]) -> MemoryTrace:
    return MemoryTrace(
        source="snapshot",
        events=events([]),
        start=start_state([]),
        devices=(),
        steps=(Step(0, 0, 1),),
        notes=(Note("The snapshot is empty: no device has a segment or a trace entry.", "empty"),),
        properties=dict(_settings(content.get("allocator_settings"))),
    )


def _ooms(devices: Sequence[SnapshotDevice], order: Int64 | None) -> tuple[OutOfMemory, ...]:
    """Return the failed allocations of all devices, with their indices among the merged events."""
    merged_index = None if order is None else np.argsort(order, kind="stable")
    ooms, before = [], 0
    for device in devices:
        for entry in np.flatnonzero(device.entries.kind == Kind.OOM).tolist():
            event = before + entry if merged_index is None else int(merged_index[before + entry])
            free = device.entries.free_bytes.get(entry)
            ooms.append(OutOfMemory(event, int(device.entries.bytes[entry]), free))
        before += len(device)
    return tuple(sorted(ooms, key=lambda oom: oom.event))


def _notes(devices: Sequence[SnapshotDevice], annotations_left_out: int) -> Iterator[Note]:
    if not any(len(device) for device in devices):
        live = sum(int(device.final.bytes.sum()) for device in devices)
        yield Note(
            f"The snapshot has no trace, only the final state of {live:,} bytes, so nothing changes over "
            "time.",
            "no_trace",
            live,
        )
    without = [device for device in devices if not device.final.recorded]
    if without:
        names, freed = zip(*((device.name, int(device.start.bytes.sum())) for device in without), strict=True)
        yield Note(
            f"{', '.join(names)}: the snapshot has no segments, which contain the final state. Of what was "
            f"alive before the first entry, only the {sum(freed):,} bytes that an entry frees are counted: "
            "the rest is missing from every level. Reserved memory is not known.",
            "no_segments",
            sum(freed),
        )
    if annotations_left_out:
        yield Note(
            f"{annotations_left_out:,} annotations have no known device, stage or time; left out.",
            "annotations_left_out",
        )


def _long_names(*tables: Sequence[str]) -> Iterator[Note]:
    count = sum(is_cut(name) for table in tables for name in table)
    if count:
        yield Note(
            f"{count:,} labels, compile contexts or names of annotations have more than {LONGEST_NAME:,} "
            "characters; their ends are cut off.",
            "names_cut",
        )


def _settings(settings: object) -> Iterator[tuple[str, str]]:
    """Yield the allocator's settings that are plain values, and the one that says how sizes are rounded."""
    divisions = divisions_text(settings.get(DIVISIONS)) if isinstance(settings, dict) else None
    if divisions is not None:
        yield DIVISIONS, divisions
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if isinstance(key, str) and (
            isinstance(value, str | bool | float) or (isinstance(value, int) and abs(value) < MOST_BYTES)
        ):
            yield key, str(value)


def marked_modules(labels: Sequence[str]) -> tuple[tuple[Module, ...], Int32]:
    """Return the modules that labels name, and the module of each label.

    Returns:
        The table of modules: `(not named)` first, then every named module after the modules that enclose
        it. And the row in that table of each label, 0 if the label is not a mark; it has one entry more
        than there are labels: the last is 0, for the label row -1.
    """
    tree = ModuleTree()
    of_label = np.zeros(len(labels) + 1, np.int32)
    for label, text in enumerate(labels):
        if text.startswith(MODULE_MARK):
            of_label[label] = tree.add(text.removeprefix(MODULE_MARK))
    return tree.as_tuple(), of_label
