"""Read one device's trace in a memory snapshot as columns, one field at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.snapshot.numbers import addresses, whole_numbers
from tb_memplugin.read.snapshot.tables import Tables, check_texts
from tb_memplugin.trace import Kind
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8, UInt64

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

MOST_BYTES = 1 << 62
"""The sum of all sizes in a trace must be below this, so that 64-bit running sums do not overflow."""

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


def read_entries(trace: Sequence[dict[str, Any]], tables: Tables) -> Entries:
    """Return the columns of one device's trace.

    Args:
        trace: entries as PyTorch writes them (schema: docstring of `torch.cuda.memory._snapshot`).
        tables: the tables to which stacks, streams and other names in the entries are added.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: a field is missing or invalid.
    """
    faults: Faults = {}
    size = whole_numbers(list(map(itemgetter("size"), trace)), "size")
    negative = size < 0
    faults["sizes are negative; counted as 0"] = Tally.of(negative, size)
    size[negative] = 0
    if float(np.sum(size, dtype=np.float64)) >= MOST_BYTES:
        raise OverflowError("the sum of the sizes is larger than any device")
    kind = _kinds(list(map(itemgetter("action"), trace)), size, faults)
    time_ns, timed = _times(trace, size, faults)
    return Entries(
        kind=kind,
        address=_addresses(trace, kind),
        bytes=size,
        time_ns=time_ns,
        label=tables.label_rows(_labels(trace)),
        stack=tables.stacks.rows([entry.get("frames") for entry in trace]),
        stream=tables.stream_rows([entry.get("stream") for entry in trace]),
        pool=tables.pool_rows([entry.get("pool_id") for entry in trace]),
        context=tables.context_rows([entry.get("compile_context") for entry in trace]),
        forward=tables.stacks.text_rows([entry.get("forward_frames") for entry in trace]),
        annotates=np.array([entry["action"] == "annotate" for entry in trace], bool),
        free_bytes=_free_bytes(trace, kind),
        timed=timed,
        faults=faults,
    )


def _labels(trace: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the labels of entries: `user_metadata`.

    Snapshots made from a profile have a `category` instead (torch: cuda/_memory_viz.py).
    """
    metadata = [entry.get("user_metadata") for entry in trace]
    return metadata if metadata.count(None) < len(metadata) else [entry.get("category") for entry in trace]


def _kinds(actions: list[str], size: Int64, faults: Faults) -> UInt8:
    check_texts(actions, "action")
    foreign = set(actions) - KINDS.keys()
    named = sorted(foreign)[:NAMED_ACTIONS]
    tally = {action: Tally() for action in named}
    rest = Tally()
    for action, bytes_ in zip(actions, size.tolist(), strict=True) if foreign else ():
        if action in foreign:
            tally.get(action, rest).add(bytes_)
    for action in named:
        faults[f"entries have the unknown action {action[:80]!r}; kept as marks"] = tally[action]
    faults["entries have other unknown actions; kept as marks"] = rest
    kinds = {**KINDS, **dict.fromkeys(foreign, Kind.MARK)}
    return np.fromiter(map(kinds.__getitem__, actions), np.uint8, len(actions))


def _addresses(trace: Sequence[dict[str, Any]], kind: UInt8) -> UInt64:
    """Return the addresses of entries; 0 for an `oom` entry, which has `device_free` instead."""
    try:
        return addresses(list(map(itemgetter("addr"), trace)), "addr")
    except KeyError:
        loose = ((kind == Kind.OOM) | (kind == Kind.MARK)).tolist()
        pairs = zip(trace, loose, strict=True)
        return addresses([entry.get("addr", 0) if free else entry["addr"] for entry, free in pairs], "addr")


def _times(trace: Sequence[dict[str, Any]], size: Int64, faults: Faults) -> tuple[Int64, bool]:
    times = [entry.get("time_us") for entry in trace]
    absent = times.count(None)
    if absent == len(times):
        return np.arange(len(times), dtype=np.int64) * 1_000, False
    timed = [row for row, time in enumerate(times) if time is not None] if absent else list(range(len(times)))
    untimed = np.ones(len(times), bool)
    untimed[timed] = False
    faults["entries have no time; given the time of the one before"] = Tally.of(untimed, size)
    written = whole_numbers([times[row] for row in timed] if absent else times, "time_us")
    if written.max() >= LATEST_US:
        raise OverflowError(f"the time {int(written.max())} µs is out of range")
    risen = np.maximum.accumulate(np.maximum(written, 0))
    faults["entries are earlier than the one before; moved to its time"] = Tally.of(
        risen != written, size[timed]
    )
    if absent:  # entries at the beginning without a time get the first known time
        risen = risen[np.searchsorted(timed, np.arange(len(times)), side="right").clip(min=1) - 1]
    return risen * 1_000, True


def _free_bytes(trace: Sequence[dict[str, Any]], kind: UInt8) -> dict[int, int]:
    device_free = {
        entry: trace[entry].get("device_free") for entry in np.flatnonzero(kind == Kind.OOM).tolist()
    }
    return {
        entry: free for entry, free in device_free.items() if type(free) is int and 0 <= free < MOST_BYTES
    }
