"""Which free ended which allocation, beside the columns of a large side file: pairing takes long.

Readers that do not find it, or find it damaged or made from other columns, pair the events themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import numpy as np

from tb_memplugin.proto.recording_pb2 import Column
from tb_memplugin.trace import Allocations, Kind, MemoryTrace
from tb_memplugin.trace.tables import Events, Int64, StartState, code_mask, pieces_of

PAIRED_FROM = 1 << 17
"""From how many events on a pairing is stored: the events of fewer are paired in milliseconds."""

PAIRING = {
    "blocks.life": np.dtype(np.int64),
    "blocks.unmatched": np.dtype(np.int64),
    "blocks.origin": np.dtype(np.uint32),
}
"""For each allocation `freed - born`; `unmatched_frees`; and a checksum of the columns that were paired."""

_FREES = code_mask((Kind.FREE_COMPLETED, Kind.STORAGE_FREE))

_ORIGINS = tuple(
    f"{table}.{field}" for table in ("events", "start") for field in ("kind", "device", "address")
)


def pairing_columns(trace: MemoryTrace, columns: Mapping[str, Column]) -> Iterator[tuple[str, Int64]]:
    """Yield the columns of a trace's pairing; none if it has few events."""
    blocks = trace.allocations
    if len(trace.events) >= PAIRED_FROM:
        yield "blocks.life", blocks.freed - blocks.born
        yield "blocks.unmatched", blocks.unmatched_frees
        yield "blocks.origin", np.array([_origin(columns)])


def stored_pairing(
    events: Events,
    start: StartState,
    columns: Mapping[str, Column],
    unpack: Callable[[str], Iterator[np.ndarray]],
) -> Allocations | None:
    """Return the pairing that a file contains; None if it has none, or one that cannot be of these events.

    Args:
        unpack: yields the pieces of one of them.

    Raises:
        UnreadableFileError: a column of the pairing is damaged.
    """
    if not all(name in columns for name in PAIRING):
        return None
    unmatched = np.concatenate([np.empty(0, np.int64), *unpack("blocks.unmatched")])
    (origin,) = unpack("blocks.origin")
    kind, count = events.kind, len(events)
    before = np.full(len(start), -1, np.int64)
    born = events.kept(
        lambda: chain(
            (before,), (np.flatnonzero(kind[rows] == Kind.ALLOC) + rows.start for rows in pieces_of(count))
        )
    )
    if columns["blocks.life"].rows != len(born) or origin.tolist() != [_origin(columns)]:
        return None
    if len(unmatched) and not 0 <= unmatched.min() <= unmatched.max() < count:
        return None

    def frees() -> Iterator[Int64]:
        at = 0
        for life in unpack("blocks.life"):
            yield born[at : at + len(life)] + life
            at += len(life)

    freed = events.kept(frees)
    ends = np.zeros(count + 2, bool)  # the last two: of blocks that outlive the window or have no life
    lifeless = within = 0
    for rows in pieces_of(len(freed)):
        # A block of the start state may have no life: of several at one address only the last counts.
        least = born[rows] + (born[rows] >= 0)
        if ((freed[rows] < least) | (freed[rows] > count)).any():
            return None
        ends[freed[rows]] = True
        lifeless += np.count_nonzero(freed[rows] < 0)
        within += np.count_nonzero(freed[rows] < count)
    reported = by_free = by_alloc = 0
    for rows in pieces_of(count):
        is_free = _FREES[kind[rows]]
        reported += np.count_nonzero(is_free)
        by_free += np.count_nonzero(is_free & ends[rows])
        by_alloc += np.count_nonzero((kind[rows] == Kind.ALLOC) & ends[rows])
    frees_nothing = by_free + by_alloc != np.count_nonzero(ends[:count])
    ends_two = by_free + by_alloc != within - lifeless
    if frees_nothing or ends_two or by_free + len(unmatched) != reported:
        return None
    return Allocations(born, freed, lifeless + by_alloc, unmatched, _events=events, _start=start)


def _origin(columns: Mapping[str, Column]) -> int:
    """Return a checksum of the columns that were paired."""
    stored = (columns[name].chunks for name in _ORIGINS if name in columns)
    numbers = [(chunk.checksum, chunk.base, chunk.rows) for chunks in stored for chunk in chunks]
    return zlib.crc32(repr(numbers).encode())
