"""A snapshot's segments, run backward to its first entry; and which pool an entry's block was in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.sources.snapshot.blocks import FinalSegments
from tb_memplugin.sources.snapshot.entries import Entries
from tb_memplugin.trace import Kind
from tb_memplugin.trace.tables import Int32, Int64, UInt64

GROWS = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)
SHRINKS = (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP)
RESERVES = GROWS + SHRINKS
EXPANDABLE = (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)

MOST_PIECES = 1 << 24
"""More pieces than this come only from segments that overlap without sense."""


@dataclass(frozen=True, slots=True)
class FirstSegments:
    """What was reserved before the first entry, in address order.

    `contradictions`: segment events that do not fit one another, or the final segments, in bytes.
    """

    segments: FinalSegments
    contradictions: int


def first_segments(entries: Entries, final: FinalSegments) -> FirstSegments:
    """The reserved ranges before the first entry of one device.

    Ranges are cut wherever one begins or ends; between two cuts, a piece comes and goes whole. Whether it
    was there at first is told by the first that is heard of it: what the trace gives back was there, and
    what is among the final segments; what the trace takes was not.

    Raises:
        ValueError: the ranges overlap without sense.
    """
    rows = np.flatnonzero(np.isin(entries.kind, RESERVES))
    told = _ranges(entries, rows, final)
    takes = np.isin(entries.kind[rows], GROWS)
    takes = np.concatenate((takes, np.zeros(len(final.address), bool)))
    cuts, piece, owner = _pieces(told)
    size, taken = np.diff(cuts)[piece], takes[owner]
    same = piece[1:] == piece[:-1]
    # What is taken must be given back, or be there at the end; what is given back must be taken first.
    wrong = taken.copy()
    wrong[:-1][same] = taken[1:][same] == taken[:-1][same]
    first = np.append(True, ~same)[: len(piece)]
    there = np.flatnonzero(first & ~taken)
    return FirstSegments(
        _whole(told, cuts, piece[there], owner[there]), contradictions=int(size[wrong].sum())
    )


def _ranges(entries: Entries, rows: Int64, final: FinalSegments) -> FinalSegments:
    """The ranges of segment entries, and behind them the final ones."""
    return FinalSegments(
        address=np.concatenate((entries.address[rows], final.address)),
        bytes=np.concatenate((entries.bytes[rows], final.bytes)),
        stream=np.concatenate((entries.stream[rows], final.stream)),
        pool=np.concatenate((entries.pool[rows], final.pool)),
        expandable=np.concatenate((np.isin(entries.kind[rows], EXPANDABLE), final.expandable)).astype(
            np.uint8
        ),
    )


def _pieces(told: FinalSegments) -> tuple[UInt64, Int64, Int64]:
    """All edges of ranges; and for each range (`owner`) the pieces between two edges that it consists of.

    By piece (the number of its lower edge), and within each in the order of the ranges.
    """
    size = told.bytes.astype(np.uint64)
    end = told.address + np.minimum(size, ~told.address)  # a range beyond 2**64 ends there
    cuts = np.unique(np.concatenate((told.address, end)))
    first = np.searchsorted(cuts, told.address)
    count = np.searchsorted(cuts, end) - first
    if int(count.sum()) > MOST_PIECES:
        raise ValueError(f"segments cut one another into {int(count.sum()):,} pieces")
    owner = np.repeat(np.arange(len(count)), count)
    piece = np.arange(len(owner)) + np.repeat(first - (np.cumsum(count) - count), count)
    order = np.argsort(piece, kind="stable")
    return cuts, piece[order], owner[order]


def _whole(told: FinalSegments, cuts: UInt64, piece: Int64, owner: Int64) -> FinalSegments:
    """Ranges of pieces in address order: neighbours that belong to one range are joined again."""
    begins = np.ones(len(piece), bool)
    begins[1:] = (owner[1:] != owner[:-1]) | (np.diff(piece) != 1)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(piece))[: len(first)] - 1
    begin, source = cuts[piece[first]], owner[first]
    return FinalSegments(
        address=begin,
        bytes=(cuts[piece[last] + 1] - begin).astype(np.int64),
        stream=told.stream[source],
        pool=told.pool[source],
        expandable=told.expandable[source],
    )


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
    known = open_ >= _made(entries, final, order)[segment]
    pool[open_[known]] = final.pool[segment[known]]
    return pool


def _made(entries: Entries, final: FinalSegments, order: Int64) -> Int64:
    """The last `segment_alloc` of each final segment, -1 where the trace has none."""
    made = np.full(len(order), -1, np.int64)
    events = np.flatnonzero(entries.kind == Kind.SEGMENT_ALLOC)
    start = final.address[order]
    place = np.searchsorted(start, entries.address[events]).clip(max=len(start) - 1)
    found = start[place] == entries.address[events]
    np.maximum.at(made, order[place[found]], events[found])
    return made
