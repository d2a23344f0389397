"""A snapshot's segments, run backward to its first entry; and which pool an entry's block was in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.sources.snapshot.blocks import FinalSegments
from tb_memplugin.sources.snapshot.entries import Entries
from tb_memplugin.trace import Kind
from tb_memplugin.trace.ranges import Ranges
from tb_memplugin.trace.tables import Int32

GROWS = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)
SHRINKS = (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP)
EXPANDABLE = (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)

UNKNOWN_POOL = -1


@dataclass(frozen=True, slots=True)
class SegmentOwner:
    """What a reserved range belongs to: rows of streams and pools, and whether it can grow."""

    stream: int
    pool: int
    expandable: bool


@dataclass(frozen=True, slots=True)
class FirstSegments:
    """What was reserved before the first entry.

    `contradictions`: segment events that do not fit the final segments, in bytes.
    """

    ranges: Ranges[SegmentOwner]
    contradictions: int


def first_segments(entries: Entries, final: FinalSegments) -> FirstSegments:
    """The reserved ranges before the first entry of one device.

    Anchored at the final segments, as all else: a segment that a trace allocates is taken out, one
    that it frees is put back. There are few segment events, so a loop over them will do.
    """
    ranges: Ranges[SegmentOwner] = Ranges()
    wrong = 0
    columns = (final.address, final.bytes, final.stream, final.pool, final.expandable)
    for address, size, stream, pool, expandable in zip(*(each.tolist() for each in columns), strict=True):
        wrong += ranges.add(address, address + size, SegmentOwner(stream, pool, bool(expandable)))
    events = np.flatnonzero(np.isin(entries.kind, GROWS + SHRINKS))[::-1]
    told = (entries.kind, entries.address, entries.bytes, entries.stream, entries.pool)
    for kind, address, size, stream, pool in zip(*(each[events].tolist() for each in told), strict=True):
        if kind in GROWS:
            wrong += ranges.remove(address, address + size)
        else:
            wrong += ranges.add(address, address + size, SegmentOwner(stream, pool, kind in EXPANDABLE))
    return FirstSegments(ranges, wrong)


def pools_of(entries: Entries, final: FinalSegments) -> Int32:
    """The pool of each entry's address: what the entry tells (PyTorch 2.13), else its segment's.

    A final segment is known to have been there since its last `segment_alloc`, or from the start.
    What lay in segments that are gone stays -1: unknown.
    """
    pool: Int32 = entries.pool.copy()
    open_ = np.flatnonzero((pool < 0) & (entries.kind != Kind.OOM) & (entries.kind != Kind.MARK))
    if not len(open_) or not len(final.address):
        return pool
    order = np.argsort(final.address)
    start = final.address[order]
    place = np.searchsorted(start, entries.address[open_], side="right") - 1
    inside = place >= 0
    open_, segment = open_[inside], order[place[inside]]
    inside = entries.address[open_] - final.address[segment] < final.bytes[segment].astype(np.uint64)
    open_, segment = open_[inside], segment[inside]
    made = np.full(len(final.address), -1, np.int64)
    for entry in np.flatnonzero(entries.kind == Kind.SEGMENT_ALLOC).tolist():
        at = int(np.searchsorted(start, entries.address[entry]))
        if at < len(start) and start[at] == entries.address[entry]:
            made[order[at]] = entry
    known = open_ >= made[segment]
    pool[open_[known]] = final.pool[segment[known]]
    return pool
