"""What was alive and reserved before a snapshot's first entry, backward from its final state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.snapshot.blocks import FinalSegments, FinalState
from tb_memplugin.read.snapshot.entries import Entries
from tb_memplugin.trace import Kind
from tb_memplugin.trace.allocator import RESERVE_SIGN, cut_ranges
from tb_memplugin.trace.kinds import EXPANDS, GROWS, SEGMENT_KINDS
from tb_memplugin.trace.replay import address_order
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt64, code_mask, compact


@dataclass(frozen=True, slots=True)
class Beginning:
    """The blocks alive before the first entry, and the entries that allocated the final blocks.

    Columns of equal length: `address`, `bytes` (requested), `final` (the row among the final blocks, -1
    if the block was freed), `freed` (the entry that freed it, -1 if it is among the final blocks).
    `alloc` is, for each final block, the entry that allocated it, -1 if older or unknown. `anomalies` has
    each kind of contradiction between the entries and the final state.
    """

    address: UInt64
    bytes: Int64
    final: Int64
    freed: Int64
    alloc: Int64
    anomalies: Faults


def rewind(entries: Entries, final: FinalState) -> Beginning:
    """Return the blocks alive before the first entry of one device's trace.

    The trace is the end of a longer history (a ring buffer drops the oldest entries), so only the final
    state is reliable. Going backward from it, a completed free makes a block live and an alloc removes
    it. So only the first row at each address matters: if it is not an alloc, a block was alive there at the
    start. A requested free changes nothing: the block is live until its free is completed.
    """
    touched = np.flatnonzero((entries.kind == Kind.ALLOC) | (entries.kind == Kind.FREE_COMPLETED))
    address = np.concatenate((entries.address[touched], final.address))
    size = np.concatenate((entries.bytes[touched], final.bytes))
    is_alloc = np.concatenate((entries.kind[touched] == Kind.ALLOC, np.zeros(len(final.address), bool)))
    is_final = np.arange(len(address)) >= len(touched)

    order = address_order(address)
    address, size, is_alloc, is_final = address[order], size[order], is_alloc[order], is_final[order]
    same = address[1:] == address[:-1]
    first = np.concatenate(([True], ~same))[: len(address)]
    last = np.concatenate((~same, [True]))[: len(address)]
    ended = ~first
    ended[1:] &= is_alloc[:-1]
    resized = np.zeros(len(address), bool)
    resized[1:] = ended[1:] & ~is_alloc[1:] & (size[1:] != size[:-1])
    stray = ~first & ~is_alloc & ~ended
    counts = {
        "allocations at an address where a block was still live": ended & is_alloc,
        "allocations neither freed nor among the final blocks": is_alloc & last & final.recorded,
        "frees of blocks that were not live": stray & ~is_final,
        "final blocks that were freed and not allocated again": stray & is_final,
    }
    anomalies = {fault: Tally.of(rows, size) for fault, rows in counts.items()}
    anomalies["blocks whose size changed between allocation and end"] = Tally.of(
        resized, np.diff(size, prepend=0)
    )
    source = np.concatenate((touched, np.arange(len(final.address))))[order]
    alive = first & ~is_alloc
    return Beginning(
        address=address[alive],
        bytes=size[alive],
        final=np.where(is_final[alive], source[alive], -1),
        freed=np.where(is_final[alive], -1, source[alive]),
        alloc=_allocs_of_final(source, is_final, ended, len(final.address)),
        anomalies=anomalies,
    )


def _allocs_of_final(source: Int64, is_final: Bool, ended: Bool, count: int) -> Int64:
    """Return, for each final block, the last entry at its address if that is an alloc, else -1."""
    allocs = np.full(count, -1, np.int64)
    rows = np.flatnonzero(is_final & ended)
    allocs[source[rows]] = source[rows - 1]
    return allocs


def reserved_levels(entries: Entries, final: FinalState) -> tuple[int, Int64]:
    """Return the reserved bytes before the first entry, and after each entry (int64, shape (entries,)).

    They are computed backward from the final sum of segment sizes, by segment allocs and frees and by maps
    and unmaps of expandable segments (torch: c10/cuda/CUDACachingAllocator.cpp).
    """
    change = np.cumsum(RESERVE_SIGN[entries.kind] * entries.bytes)
    start = final.reserved - (int(change[-1]) if len(change) else 0)
    change += start
    return start, compact(change)


@dataclass(frozen=True, slots=True)
class FirstSegments:
    """The ranges reserved before the first entry, in address order.

    `contradictions` is the bytes of segment events that contradict one another or the final segments.
    """

    segments: FinalSegments
    contradictions: int


def first_segments(entries: Entries, final: FinalSegments) -> FirstSegments:
    """Return the ranges reserved before the first entry of one device.

    The first row of a piece of them shows whether it was reserved at the start: it was if the row is a free
    or a final segment, and was not if the row is an alloc.

    Raises:
        ValueError: the ranges overlap in an invalid way.
    """
    rows = np.flatnonzero(code_mask(SEGMENT_KINDS)[entries.kind])
    ranges = _ranges(entries, rows, final)
    is_alloc = code_mask(GROWS)[entries.kind[rows]]
    is_alloc = np.concatenate((is_alloc, np.zeros(len(final.address), bool)))
    cuts, piece, owner = cut_ranges(ranges.address, ranges.bytes)
    size, allocates = np.diff(cuts)[piece], is_alloc[owner]
    same = piece[1:] == piece[:-1]
    # Each allocated piece must be freed or be there at the end; allocs and frees of a piece must alternate.
    wrong = allocates.copy()
    wrong[:-1][same] = allocates[1:][same] == allocates[:-1][same]
    first = np.append(True, ~same)[: len(piece)]
    there = np.flatnonzero(first & ~allocates)
    return FirstSegments(
        _joined(ranges, cuts, piece[there], owner[there]), contradictions=int(size[wrong].sum())
    )


def _ranges(entries: Entries, rows: Int64, final: FinalSegments) -> FinalSegments:
    """Return the ranges of segment entries, followed by the final ones."""
    expands = code_mask(EXPANDS)[entries.kind[rows]]
    return FinalSegments(
        address=np.concatenate((entries.address[rows], final.address)),
        bytes=np.concatenate((entries.bytes[rows], final.bytes)),
        stream=np.concatenate((entries.stream[rows], final.stream)),
        pool=np.concatenate((entries.pool[rows], final.pool)),
        expandable=np.concatenate((expands, final.expandable)).astype(np.uint8),
    )


def _joined(ranges: FinalSegments, cuts: UInt64, piece: Int64, owner: Int64) -> FinalSegments:
    """Return ranges from pieces in address order, joining neighbours that belong to the same range."""
    begins = np.ones(len(piece), bool)
    begins[1:] = (owner[1:] != owner[:-1]) | (np.diff(piece) != 1)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(piece))[: len(first)] - 1
    begin, source = cuts[piece[first]], owner[first]
    return FinalSegments(
        address=begin,
        bytes=(cuts[piece[last] + 1] - begin).astype(np.int64),
        stream=ranges.stream[source],
        pool=ranges.pool[source],
        expandable=ranges.expandable[source],
    )


def pools_of(entries: Entries, final: FinalSegments) -> Int32:
    """Return the pool of each entry: the entry's own (PyTorch 2.13), else that of the segment at its address.

    A final segment is known to exist since its last `segment_alloc`, or from the start. Entries in segments
    that no longer exist get -1 (unknown).
    """
    pool: Int32 = entries.pool.copy()
    open_ = np.flatnonzero((pool < 0) & (entries.kind != Kind.OOM) & (entries.kind != Kind.MARK))
    if not len(open_) or not len(final.address):
        return pool
    order = np.argsort(final.address)
    start = final.address[order]
    row = np.searchsorted(start, entries.address[open_], side="right") - 1
    inside = row >= 0
    open_, segment = open_[inside], order[row[inside]]
    inside = entries.address[open_] - final.address[segment] < final.bytes[segment].astype(np.uint64)
    open_, segment = open_[inside], segment[inside]
    exists = open_ >= _last_allocs(entries, final, order)[segment]
    pool[open_[exists]] = final.pool[segment[exists]]
    return pool


def _last_allocs(entries: Entries, final: FinalSegments, order: Int64) -> Int64:
    """Return the last `segment_alloc` entry of each final segment, -1 if the trace has none."""
    last = np.full(len(order), -1, np.int64)
    events = np.flatnonzero(entries.kind == Kind.SEGMENT_ALLOC)
    start = final.address[order]
    row = np.searchsorted(start, entries.address[events]).clip(max=len(start) - 1)
    matched = start[row] == entries.address[events]
    np.maximum.at(last, order[row[matched]], events[matched])
    return last
