"""The address ranges that the allocator reserved, with the events at which each was reserved and released."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.replay import match_frees
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt64

GIVES = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)
EXPANDS = (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)

MOST_PIECES = 1 << 25
"""More pieces than this arise only from segment events that overlap in a way no allocator produces."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Pieces of one device's reserved memory in address order, in columns of equal length.

    A piece is reserved after event e if born <= e < freed; born is -1 if it was reserved before the window,
    freed is the number of events if it is never released. `stream` and `pool` are rows of the trace's
    tables, -1 if not known. Pieces with the same `origin` were reserved together, by one event or as one
    segment of the start state. `doubled` counts pieces that were reserved while already reserved, `strays`
    pieces that were released while not reserved; both are 0 in a sound file.
    """

    address: UInt64
    bytes: Int64
    born: Int64
    freed: Int64
    stream: Int32
    pool: Int32
    expandable: Bool
    origin: Int64
    doubled: int
    strays: int

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class _Changes:
    """The segments at the start, then the segment events, in time order. Ends are exclusive."""

    event: Int64
    address: UInt64
    end: UInt64
    gives: Bool
    expandable: Bool
    stream: Int32
    pool: Int32


def reserve(trace: MemoryTrace, device: int) -> Reserve:
    """Return every piece of address space that a device's allocator reserved at some time in the window.

    Expandable segments are mapped and unmapped in parts. So all ranges are cut at every address where one
    begins or ends: a piece between two cuts is reserved and released as a whole, like a block.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    changes = _changes(trace, device)
    cuts = np.unique(np.concatenate((changes.address, changes.end)))
    first = np.searchsorted(cuts, changes.address)
    count = np.searchsorted(cuts, changes.end) - first
    pieces = int(count.sum())
    if pieces > MOST_PIECES:
        raise UnreadableFileError(
            f"The segment events of {trace.devices[device].name} cut its reserved memory into {pieces:,} "
            "pieces.",
            where=trace.source,
            fix="Take the snapshot again: segments in this one overlap in a way that no allocator produces.",
        )
    origin = np.repeat(np.arange(len(count)), count)
    piece = np.arange(pieces) + np.repeat(first - (np.cumsum(count) - count), count)
    gives = changes.gives[origin]
    began, ended, strays = match_frees(cuts[piece], np.zeros(pieces, np.uint8), gives)
    freed = np.full(pieces, len(trace.events), np.int64)
    freed[began] = changes.event[origin[ended]]
    reserving = np.flatnonzero(gives)
    reserving = reserving[np.argsort(piece[reserving], kind="stable")]
    cut, origin = piece[reserving], origin[reserving]
    return Reserve(
        address=cuts[cut],
        bytes=(cuts[cut + 1] - cuts[cut]).astype(np.int64),
        born=changes.event[origin],
        freed=freed[reserving],
        stream=changes.stream[origin],
        pool=changes.pool[origin],
        expandable=changes.expandable[origin],
        origin=origin.astype(np.int64),
        doubled=int(np.count_nonzero(gives[ended])),
        strays=int(np.count_nonzero(strays)),
    )


def _changes(trace: MemoryTrace, device: int) -> _Changes:
    segments, events = trace.segments, trace.events
    start = np.flatnonzero((segments.device == device) & (segments.bytes > 0))
    kind = events.kind
    is_segment_event = (kind >= Kind.SEGMENT_ALLOC) & (kind <= Kind.SEGMENT_UNMAP)
    rows = np.flatnonzero(is_segment_event & (events.device == device) & (events.bytes > 0))
    address = np.concatenate((segments.address[start], events.address[rows]))
    size = np.concatenate((segments.bytes[start], events.bytes[rows])).astype(np.uint64)
    return _Changes(
        event=np.concatenate((np.full(len(start), -1, np.int64), rows)),
        address=address,
        end=address + np.minimum(size, ~address),  # a range beyond 2**64 ends there
        gives=np.concatenate((np.ones(len(start), bool), np.isin(kind[rows], GIVES))),
        expandable=np.concatenate((segments.expandable[start] != 0, np.isin(kind[rows], EXPANDS))),
        stream=np.concatenate((segments.stream[start], events.stream[rows])),
        pool=np.concatenate((segments.pool[start], events.pool[rows])),
    )
