"""Say what the allocator set aside for requests whose blocks are gone, where its rules leave no choice."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tb_memplugin.read.snapshot.blocks import FinalSegments, FinalState
from tb_memplugin.read.snapshot.entries import Entries
from tb_memplugin.read.snapshot.rewind import Beginning
from tb_memplugin.trace import Kind
from tb_memplugin.trace.allocator import SMALL_REQUEST, rounded_by_rule
from tb_memplugin.trace.kinds import EXPANDS, SEGMENT_KINDS
from tb_memplugin.trace.tables import MOST_BYTES, Int64, code_mask

DIVISIONS = "roundup_power2_divisions"
OFF = "off"
MOST_DIVISIONS = 64


def divisions_text(divisions: object) -> str | None:
    """Return the setting `roundup_power2_divisions` as PyTorch spells it; `OFF`, or None if it is not known.

    Args:
        divisions: as a snapshot contains it since PyTorch 2.5: into how many steps (0 or 1: none) the sizes
            from each power of two MiB on are divided; or the text that this function returned for it.
    """
    if divisions == OFF:
        return OFF
    if not isinstance(divisions, dict) or not 0 < len(divisions) <= MOST_DIVISIONS:
        return None
    if not all(
        type(key) is str and type(count) is int and 0 <= count < 1 << 32 for key, count in divisions.items()
    ):
        return None
    used = [f"{key[:20]}:{count}" for key, count in divisions.items() if count > 1]
    return f"[{','.join(used)}]" if used else OFF


def rounded_surely(requested: Int64, entries: Entries, final: FinalState) -> Int64:
    """Return what the allocator used for requests, in bytes; -1 where a remainder may have stayed unsplit.

    Everything beyond the next multiple of 512 is split off if the request is at most `SMALL_REQUEST` or the
    segment is expandable (round_size and should_split). The result is -1 throughout if a final block
    contradicts this.

    Args:
        requested: requested bytes on one device, whose `roundup_power2_divisions` are off.
    """
    has_fixed = code_mask((Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE))[entries.kind].any()
    expandable = bool(len(final.segments.expandable) and final.segments.expandable.all() and not has_fixed)
    sure = (final.bytes <= SMALL_REQUEST) | expandable
    if (final.rounded[sure] != rounded_by_rule(final.bytes[sure])).any():
        return np.full(len(requested), -1, np.int64)
    return np.where((requested <= SMALL_REQUEST) | expandable, rounded_by_rule(requested), -1)


MOST_EDGES = 1 << 13
"""Blocks above 1 MiB and segments that are followed at once; more take too long in a sorted list."""


def extents_at_birth(entries: Entries, start: Beginning, first: FinalSegments, final: FinalState) -> Int64:
    """Return the bytes of the block that each alloc above `SMALL_REQUEST` got; -1 where not certain.

    The room that a request finds reaches to the next live block or the end of the segment, because adjacent
    free blocks are always merged. If more than `SMALL_REQUEST` would remain, it is split off, else the block
    takes all of it (should_split in c10/cuda/CUDACachingAllocator.cpp).

    Args:
        entries, start, final: a device's, without contradictions, with `roundup_power2_divisions` and
            `max_split_size` off.
        first: the device's segments before the first entry.

    Returns:
        int64, shape (entries,). All are -1 if a segment is expandable, or if the result contradicts a final
        block.
    """
    unknown = np.full(len(entries.kind), -1, np.int64)
    if first.expandable.any() or code_mask(EXPANDS)[entries.kind].any():
        return unknown
    room = _rooms(entries, start, first)
    large = np.flatnonzero((entries.kind == Kind.ALLOC) & (entries.bytes > SMALL_REQUEST))
    least = rounded_by_rule(entries.bytes[large])
    if room is None or (room[large] < least).any():
        return unknown
    extents = unknown.copy()
    extents[large] = np.where(room[large] - least > SMALL_REQUEST, least, room[large])
    allocs = start.alloc[start.alloc >= 0]
    agree = (extents[allocs] < 0) | (extents[allocs] == final.rounded[start.alloc >= 0])
    return extents if agree.all() else unknown


def _rooms(entries: Entries, start: Beginning, first: FinalSegments) -> Int64 | None:
    """Return the distance from each new block's address to the next edge; None if there are too many edges.

    Edges are the live blocks above `SMALL_REQUEST` and the ends of segments.
    """
    reserves = code_mask(SEGMENT_KINDS)[entries.kind]
    blocks = code_mask((Kind.ALLOC, Kind.FREE_COMPLETED))[entries.kind] & (entries.bytes > SMALL_REQUEST)
    rows = np.flatnonzero(reserves | blocks)
    size = np.where(reserves[rows], entries.bytes[rows], 0).astype(np.uint64)
    begins = code_mask((Kind.ALLOC, Kind.SEGMENT_ALLOC))[entries.kind[rows]]
    edges: list[int] = start.address[start.bytes > SMALL_REQUEST].tolist()
    edges = sorted([*edges, *(first.address + first.bytes.astype(np.uint64)).tolist()])
    rooms = []
    for address, begun in zip((entries.address[rows] + size).tolist(), begins.tolist(), strict=True):
        at = bisect_right(edges, address)
        if begun:
            rooms.append(min(edges[at] - address, MOST_BYTES) if at < len(edges) else -1)
            edges.insert(at, address)
            if len(edges) > MOST_EDGES:
                return None
        elif at and edges[at - 1] == address:
            del edges[at - 1]
    room = np.full(len(entries.kind), -1, np.int64)
    room[rows[begins]] = rooms
    return room
