"""The entries of one trace, field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from tb_memplugin.read.snapshot.numbers import count_none
from tb_memplugin.trace.tables import Bool, Int32, Int64

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
