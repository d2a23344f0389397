"""Compute a snapshot's segments before its first entry, and the pool of each entry's block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.read.snapshot.blocks import FinalSegments
from tb_memplugin.read.snapshot.entries import Entries
from tb_memplugin.trace import Kind
from tb_memplugin.trace.allocator import cut_ranges
from tb_memplugin.trace.kinds import EXPANDS, GROWS, SEGMENT_KINDS
from tb_memplugin.trace.tables import Int32, Int64, UInt64


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
    rows = np.flatnonzero(np.isin(entries.kind, SEGMENT_KINDS))
    ranges = _ranges(entries, rows, final)
    is_alloc = np.isin(entries.kind[rows], GROWS)
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
    return FinalSegments(
        address=np.concatenate((entries.address[rows], final.address)),
        bytes=np.concatenate((entries.bytes[rows], final.bytes)),
        stream=np.concatenate((entries.stream[rows], final.stream)),
        pool=np.concatenate((entries.pool[rows], final.pool)),
        expandable=np.concatenate((np.isin(entries.kind[rows], EXPANDS), final.expandable)).astype(np.uint8),
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
