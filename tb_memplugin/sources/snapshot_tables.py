"""The tables that a snapshot's entries and blocks point into, filled while it is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tb_memplugin.sources.snapshot_stacks import Stacks
from tb_memplugin.sources.tables import Names
from tb_memplugin.trace.tables import Int32

T = TypeVar("T", bound=Hashable)

WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows of all devices of one snapshot: labels, compile contexts, stacks, stream pointers, pool ids."""

    labels: Names = field(default_factory=Names)
    contexts: Names = field(default_factory=Names)
    stacks: Stacks = field(default_factory=Stacks)
    streams: dict[int, int] = field(default_factory=dict)
    pools: dict[tuple[int, int], int] = field(default_factory=dict)

    def label_rows(self, written: Sequence[Any]) -> Int32:
        """Rows of `user_metadata`, -1 where there is none."""
        return distinct_rows(written, lambda label: _text_row(self.labels, label, "user_metadata"))

    def context_rows(self, written: Sequence[Any]) -> Int32:
        """Rows of `compile_context`; PyTorch writes N/A where nothing was being compiled."""
        return distinct_rows(written, self._context_row)

    def stream_rows(self, written: Sequence[Any]) -> Int32:
        """Rows of stream pointers."""
        return distinct_rows(written, self.stream_row)

    def pool_rows(self, written: Sequence[Any]) -> Int32:
        """Rows of pool ids, pairs of numbers."""
        try:
            return distinct_rows(written, self.pool_row)
        except TypeError:  # JSON has lists for tuples
            return distinct_rows(
                [tuple(pool) if isinstance(pool, list) else pool for pool in written], self.pool_row
            )

    def stream_row(self, stream: Any) -> int:
        """The row of one stream pointer, -1 for none."""
        if stream is None:
            return -1
        if type(stream) is not int:
            raise TypeError(f"a stream is {type(stream).__name__}")
        return self.streams.setdefault(stream & WORD, len(self.streams))

    def pool_row(self, pool: Any) -> int:
        """The row of one pool id, -1 for none."""
        if pool is None:
            return -1
        first, second = pool
        if type(first) is not int or type(second) is not int:
            raise TypeError(f"a pool id is {str(pool)[:80]}")
        return self.pools.setdefault((first & WORD, second & WORD), len(self.pools))

    def _context_row(self, context: Any) -> int:
        return -1 if context == "N/A" else _text_row(self.contexts, context, "compile_context")


def distinct_rows(written: Sequence[T], row_of: Callable[[T], int]) -> Int32:
    """A row for each value, asked for once per distinct value: int32, shape (values,).

    Raises:
        TypeError: a value that cannot be looked up, a list say.
    """
    rows = {value: row_of(value) for value in dict.fromkeys(written)}
    if len(rows) == 1:
        return np.full(len(written), next(iter(rows.values())), np.int32)
    return np.fromiter(map(rows.__getitem__, written), np.int32, len(written))


def _text_row(names: Names, text: Any, what: str) -> int:
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{what} is {type(text).__name__}")
    return names.add(text) if text else -1
