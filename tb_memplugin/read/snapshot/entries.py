"""Read one device's trace in a memory snapshot as columns, one field at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.snapshot.entry_columns import Column, EntryColumns, EntryDicts
from tb_memplugin.read.snapshot.numbers import addresses, count_none, whole_numbers
from tb_memplugin.read.snapshot.tables import Tables, check_texts
from tb_memplugin.trace import Kind
from tb_memplugin.trace.tables import MOST_BYTES, Bool, Int32, Int64, UInt8, UInt64

KINDS = {
    "alloc": Kind.ALLOC,
    "free_requested": Kind.FREE_REQUESTED,
    "free_completed": Kind.FREE_COMPLETED,
    "segment_alloc": Kind.SEGMENT_ALLOC,
    "segment_free": Kind.SEGMENT_FREE,
    "segment_map": Kind.SEGMENT_MAP,
    "segment_unmap": Kind.SEGMENT_UNMAP,
    "oom": Kind.OOM,
    "snapshot": Kind.MARK,
    "annotate": Kind.MARK,
}
"""Actions as torch/csrc/cuda/memory_snapshot.cpp writes them."""

NAMED_ACTIONS = 5
"""The largest number of unknown actions per device that notes list by name."""

LATEST_US = 1 << 53
"""Times in microseconds must be below this (the year 287,000)."""

FIX = "Take the snapshot again, or load a complete copy of the file."


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of one device as columns of equal length, in the order of the trace.

    `bytes` are the requested bytes of allocs and frees, the reserved bytes of segment events, and the
    failed request of an `oom`; never negative. `time_ns` does not decrease; it is epoch nanoseconds, or the
    entry's index as microseconds if `timed` is False. `label`, `stack`, `stream`, `pool`, `context` and
    `forward` are rows, -1 for none. `annotates` marks entries whose label is that of a block that is alive.
    `free_bytes` is the device's free memory, by the index of an `oom` entry. `faults` has each kind of
    contradiction.
    """

    kind: UInt8
    address: UInt64
    bytes: Int64
    time_ns: Int64
    label: Int32
    stack: Int32
    stream: Int32
    pool: Int32
    context: Int32
    forward: Int32
    annotates: Bool
    free_bytes: dict[int, int]
    timed: bool
    faults: Faults


_DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


@contextmanager
def damage_refused(part: str, where: str) -> Iterator[None]:
    """Turn the exceptions that wrong types and missing fields cause into an `UnreadableFileError`."""
    try:
        yield
    except (*_DAMAGE, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnreadableFileError(
            f"{part} do not have the form that PyTorch writes ({reason}).", where=where, fix=FIX
        ) from error


def read_entries(trace: Sequence[dict[str, Any]] | EntryColumns, tables: Tables) -> Entries:
    """Return the columns of one device's trace.

    Args:
        trace: entries as PyTorch writes them (schema: docstring of `torch.cuda.memory._snapshot`).
        tables: the tables to which stacks, streams and other names in the entries are added.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: a field is missing or invalid.
    """
    entries = trace if isinstance(trace, EntryColumns) else EntryDicts(trace)
    column = entries.column
    faults: Faults = {}
    size = whole_numbers(entries.required("size").each(), "size")
    negative = size < 0
    faults["sizes are negative; counted as 0"] = Tally.of(negative, size)
    size[negative] = 0
    if float(np.sum(size, dtype=np.float64)) >= MOST_BYTES:
        raise OverflowError("the sum of the sizes is larger than any device")
    kind = _kinds(entries.required("action"), size, faults)
    time_ns, timed = _times(column("time_us").each(), size, faults)
    return Entries(
        kind=kind,
        address=_addresses(column("addr").each(), kind),
        bytes=size,
        time_ns=time_ns,
        label=_labels(entries).rows(tables.label_rows),
        stack=column("frames").rows(tables.stacks.rows),
        stream=column("stream").rows(tables.stream_rows),
        pool=column("pool_id").rows(tables.pool_rows),
        context=column("compile_context").rows(tables.context_rows),
        forward=column("forward_frames").rows(tables.stacks.text_rows),
        annotates=column("action").rows(lambda actions: np.array([a == "annotate" for a in actions], bool)),
        free_bytes=_free_bytes(entries, kind),
        timed=timed,
        faults=faults,
    )


def _labels(entries: EntryColumns | EntryDicts) -> Column:
    """Return the labels of entries: `user_metadata`.

    Snapshots made from a profile have a `category` instead (torch: cuda/_memory_viz.py).
    """
    metadata = entries.column("user_metadata")
    has_any = count_none(metadata.values) < len(metadata.values)
    return metadata if has_any else entries.column("category")


def _kinds(column: Column, size: Int64, faults: Faults) -> UInt8:
    actions: Any = column.values
    check_texts(actions, "action")
    foreign = set(actions) - KINDS.keys()
    named = sorted(foreign)[:NAMED_ACTIONS]
    tally = {action: Tally() for action in named}
    rest = Tally()
    for action, bytes_ in zip(column.each(), size.tolist(), strict=True) if foreign else ():
        if action in foreign:
            tally.get(action, rest).add(bytes_)
    for action in named:
        faults[f"entries have the unknown action {action[:80]!r}; kept as marks"] = tally[action]
    faults["entries have other unknown actions; kept as marks"] = rest
    kinds = {**KINDS, **dict.fromkeys(foreign, Kind.MARK)}
    return column.rows(lambda some: np.fromiter(map(kinds.__getitem__, some), np.uint8, len(some)))


def _addresses(written: Sequence[Any] | Int64, kind: UInt8) -> UInt64:
    """Return the addresses of entries; 0 for an `oom` entry, which has `device_free` instead."""
    if count_none(written):
        loose = ((kind == Kind.OOM) | (kind == Kind.MARK)).tolist()
        pairs = zip(written, loose, strict=True)
        written = [0 if free and address is None else address for address, free in pairs]
        if None in written:
            raise KeyError("addr")
    return addresses(written, "addr")


def _times(times: Sequence[Any] | Int64, size: Int64, faults: Faults) -> tuple[Int64, bool]:
    absent = count_none(times)
    if absent == len(times):
        return np.arange(len(times), dtype=np.int64) * 1_000, False
    timed = np.array([time is not None for time in times], bool) if absent else np.ones(len(times), bool)
    faults["entries have no time; given the time of the one before"] = Tally.of(~timed, size)
    written = whole_numbers([time for time in times if time is not None] if absent else times, "time_us")
    if written.max() >= LATEST_US:
        raise OverflowError(f"the time {int(written.max())} µs is out of range")
    risen = np.maximum.accumulate(np.maximum(written, 0))
    faults["entries are earlier than the one before; moved to its time"] = Tally.of(
        risen != written, size[timed]
    )
    if absent:  # entries at the beginning without a time get the first known time
        risen = risen[np.cumsum(timed).clip(min=1) - 1]
    return risen * 1_000, True


def _free_bytes(entries: EntryColumns | EntryDicts, kind: UInt8) -> dict[int, int]:
    ooms = np.flatnonzero(kind == Kind.OOM).tolist()
    device_free = {entry: entries.at(entry, "device_free") for entry in ooms}
    return {
        entry: free for entry, free in device_free.items() if type(free) is int and 0 <= free < MOST_BYTES
    }
