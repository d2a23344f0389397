"""The tables that a snapshot's entries and blocks refer to, filled while it is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from tb_memplugin.read.snapshot.numbers import addresses, count_none, rows_of_numbers
from tb_memplugin.read.snapshot.stacks import Stacks
from tb_memplugin.read.tables import Names
from tb_memplugin.trace.tables import Int32, Int64

T = TypeVar("T", bound=Hashable)

LONGEST_NAME = 4096
"""The largest number of characters of a label, context or annotation name: one may be repeated many times."""

CUT = "…"


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows of all devices of one snapshot: labels, compile contexts, stacks, stream pointers, pool ids."""

    labels: Names = field(default_factory=Names)
    contexts: Names = field(default_factory=Names)
    stacks: Stacks = field(default_factory=Stacks)
    streams: dict[int, int] = field(default_factory=dict)
    pools: dict[tuple[int, int], int] = field(default_factory=dict)

    def label_rows(self, written: Sequence[Any]) -> Int32:
        """Return the rows of `user_metadata`, -1 for none."""
        return _text_rows(
            written, "user_metadata or category", lambda label: self.labels.add(cut(label)) if label else -1
        )

    def context_rows(self, written: Sequence[Any]) -> Int32:
        """Return the rows of `compile_context`, -1 for none; PyTorch writes N/A if nothing is compiled."""
        return _text_rows(
            written,
            "compile_context",
            lambda context: self.contexts.add(cut(context)) if context and context != "N/A" else -1,
        )

    def stream_rows(self, written: Sequence[Any] | Int64) -> Int32:
        """Return the rows of stream pointers, -1 for none."""
        return _rows_of_present(
            written,
            lambda values: rows_of_numbers(
                [addresses(values, "stream")], lambda stream: _row(self.streams, stream)
            ),
        )

    def pool_rows(self, written: Sequence[Any]) -> Int32:
        """Return the rows of pool ids, which are pairs of numbers (lists of two in JSON); -1 for none."""
        return _rows_of_present(written, self._pool_rows)

    def _pool_rows(self, written: Sequence[Any] | Int64) -> Int32:
        if set(map(type, written)) - {tuple, list} or set(map(len, written)) != {2}:
            raise TypeError("a pool id is not a pair of numbers")
        first, second = addresses(list(chain.from_iterable(written)), "a pool id").reshape(-1, 2).T
        return rows_of_numbers([first, second], lambda a, b: _row(self.pools, (a, b)))


def cut(name: str) -> str:
    """Return a name cut to `LONGEST_NAME` characters."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - len(CUT)] + CUT


def is_cut(name: str) -> bool:
    """Whether a name looks like one that was cut."""
    return len(name) == LONGEST_NAME and name.endswith(CUT)


def check_texts(written: Sequence[Any], field_name: str) -> None:
    """Check that values are strings or None, before anything hashes them.

    Raises:
        TypeError: a value has another type.
    """
    for kind in set(map(type, written)) - {str, type(None)}:
        raise TypeError(f"{field_name} is {kind.__name__}")


def _text_rows(written: Sequence[Any], field_name: str, row_of: Callable[[Any], int]) -> Int32:
    """Return a row for each text, calling `row_of` once per distinct text: int32, shape (values,)."""
    check_texts(written, field_name)
    rows = {text: row_of(text) for text in dict.fromkeys(written)}
    if len(rows) == 1:
        return np.full(len(written), next(iter(rows.values())), np.int32)
    return np.fromiter(map(rows.__getitem__, written), np.int32, len(written))


def _rows_of_present(
    written: Sequence[Any] | Int64, rows_of: Callable[[Sequence[Any] | Int64], Int32]
) -> Int32:
    absent = count_none(written)
    if not absent and len(written):
        return rows_of(written)
    rows = np.full(len(written), -1, np.int32)
    if absent < len(written):
        present = [row for row, value in enumerate(written) if value is not None]
        rows[present] = rows_of([written[row] for row in present])
    return rows


def _row(rows: dict[T, int], key: T) -> int:
    return rows.setdefault(key, len(rows))
