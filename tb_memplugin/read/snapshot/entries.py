"""Read one device's trace in a memory snapshot as columns, one field at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.snapshot.numbers import addresses, count_none, whole_numbers
from tb_memplugin.read.snapshot.tables import Tables, check_texts
from tb_memplugin.trace import Kind
from tb_memplugin.trace.tables import MOST_BYTES, Bool, Int32, Int64, UInt8, UInt64

FIELDS = (
    "action",
    "addr",
    "size",
    "stream",
    "time_us",
    "frames",
    "forward_frames",
    "compile_context",
    "user_metadata",
    "category",
    "pool_id",
    "device_free",
)
"""The fields of entries that are read."""

INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class Column:
    """A field of all entries, None where an entry lacks it.

    `values` has one value for each entry: a list, or int64. With `index`, entry `i` has the value
    `values[index[i]]`; then `values` has what some entry has, in order of first appearance.
    """

    values: Sequence[Any] | Int64
    index: Int32 | None = None

    def each(self) -> Sequence[Any] | Int64:
        """Return the value of each entry."""
        if self.index is None:
            return self.values
        return [self.values[row] for row in self.index.tolist()]

    def rows(self, rows_of: Callable[[Any], np.ndarray]) -> np.ndarray:
        """Return `rows_of` of each entry's value."""
        rows = rows_of(self.values)
        if self.index is None:
            return rows
        return rows[self.index] if len(rows) > 1 else np.broadcast_to(rows, len(self.index))


class EntryColumns:
    """Entries that were read as columns. `None` in `values` means that an entry lacks the field."""

    def __init__(self, count: int, columns: Mapping[str, Column]) -> None:
        self._count = count
        self._columns = columns

    def __len__(self) -> int:
        return self._count

    def column(self, field: str) -> Column:
        """Return a field."""
        return self._columns.get(field) or Column([None], np.broadcast_to(np.int32(0), self._count))

    def required(self, field: str) -> Column:
        """Return a field that all entries have.

        Raises:
            KeyError: an entry lacks it.
        """
        column = self.column(field)
        if count_none(column.values):
            raise KeyError(field)
        return column

    def at(self, entry: int, field: str) -> Any:
        """Return a field of one entry."""
        column = self.column(field)
        return column.values[entry if column.index is None else int(column.index[entry])]

    def release(self) -> None:
        """Free what has a value for each entry. Objects stay: `Stacks` knows them by their addresses."""
        self._columns = {
            name: Column(column.values) for name, column in self._columns.items() if column.index is not None
        }


class EntryDicts:
    """Entries as dicts, with the same interface as `EntryColumns`."""

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def column(self, field: str) -> Column:
        """Return a field."""
        try:
            return self.required(field)
        except KeyError:
            return Column([entry.get(field) for entry in self._entries])

    def required(self, field: str) -> Column:
        """Return a field that all entries have.

        Raises:
            KeyError: an entry lacks it.
        """
        return Column(list(map(itemgetter(field), self._entries)))

    def at(self, entry: int, field: str) -> Any:
        """Return a field of one entry."""
        return self._entries[entry].get(field)


def joined_numbers(is_most: Bool, numbers: Int64, others: Sequence[int], values: Any) -> Column:
    """Return a column of numbers from that of most entries and the values of the others.

    Args:
        is_most: which of all entries are most entries.
        numbers: their values.
        others, values: the indices of the other entries, ascending, and their values, which may be anything.
    """
    full = np.empty(len(is_most), np.int64)
    full[is_most] = numbers
    if all(type(value) is int and INT64.min <= value <= INT64.max for value in values):
        full[others] = values
        return Column(full)
    each: list[Any] = full.tolist()
    for row, value in zip(others, values, strict=True):
        each[row] = value
    return Column(each)


def joined_objects(
    is_most: Bool,
    codes: Int32,
    object_of: Mapping[int, Any],
    others: Sequence[int],
    values: Sequence[Any],
) -> Column:
    """Return a column of objects from that of most entries, whose objects have codes, and the others' values.

    Args: as `joined_numbers`.
    """
    count = len(is_most)
    known: Sequence[int] = sorted(object_of)
    least, end = known[0], known[-1] + 1
    if end - least > count:  # a table of all between would be large
        codes, least, end = np.searchsorted(np.array(known), codes).astype(np.int32), 0, len(known)
    else:
        known = range(least, end)
    first = np.full(end - least, count)
    first[codes[::-1] - least] = np.flatnonzero(is_most)[::-1]
    used = np.flatnonzero(first < count)
    order = np.argsort(np.concatenate([first[used], np.asarray(others, np.int64)]))
    row_of = np.empty(len(order), np.int32)
    row_of[order] = np.arange(len(order))
    table = np.zeros(len(first), np.int32)
    table[used] = row_of[: len(used)]
    index = np.empty(count, np.int32)
    index[is_most] = table[codes - least]
    index[others] = row_of[len(used) :]
    objects = [*(object_of[known[row]] for row in used.tolist()), *values]
    return Column([objects[row] for row in order.tolist()], index)


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

    def tally(some: set[str]) -> Tally:
        return Tally.of(column.rows(lambda each: np.array([action in some for action in each], bool)), size)

    for action in named:
        faults[f"entries have the unknown action {action[:80]!r}; kept as marks"] = tally({action})
    if others := foreign.difference(named):
        faults["entries have other unknown actions; kept as marks"] = tally(others)
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
