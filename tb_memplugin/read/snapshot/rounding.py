"""Say what the allocator set aside for requests whose blocks are gone, where its rules leave no choice."""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.snapshot.blocks import FinalSegments, FinalState
from tb_memplugin.read.snapshot.entries import Entries
from tb_memplugin.read.snapshot.rewind import Beginning
from tb_memplugin.trace import Kind
from tb_memplugin.trace.allocator import SMALL_REQUEST, rounded_by_rule
from tb_memplugin.trace.kinds import EXPANDS, SEGMENT_KINDS
from tb_memplugin.trace.replay import address_order
from tb_memplugin.trace.tables import Int64, UInt64, code_mask

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


MOST_GONE = 64
"""Edges that came and went within 1 MiB behind a block; real files have a few, and each takes a round."""


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
        int64, shape (entries,). All are -1 if a segment is expandable, if a request is in no segment, or if
        the result contradicts a final block.
    """
    extents = np.full(len(entries.kind), -1, np.int64)
    large = np.flatnonzero((entries.kind == Kind.ALLOC) & (entries.bytes > SMALL_REQUEST))
    if not len(large) or first.expandable.any() or code_mask(EXPANDS)[entries.kind].any():
        return extents
    least = rounded_by_rule(entries.bytes[large])
    end = entries.address[large] + least.astype(np.uint64)
    if not _are_in_segments(entries, first, entries.address[large], end):
        return extents
    rest = _remainders(entries, start, first, large, end)
    if rest is None:
        return extents
    extents[large] = least + rest
    allocs = start.alloc[start.alloc >= 0]
    agree = (extents[allocs] < 0) | (extents[allocs] == final.rounded[start.alloc >= 0])
    return extents if agree.all() else np.full_like(extents, -1)


def _are_in_segments(entries: Entries, first: FinalSegments, begin: UInt64, end: UInt64) -> bool:
    """Whether all requests are in ranges that were reserved at some time."""
    rows = np.flatnonzero(entries.kind == Kind.SEGMENT_ALLOC)
    address = np.concatenate((first.address, entries.address[rows]))
    size = np.concatenate((first.bytes, entries.bytes[rows])).astype(np.uint64)
    order = np.argsort(address)
    reach = np.append(np.uint64(0), np.maximum.accumulate((address + size)[order]))
    return bool((end <= reach[np.searchsorted(address[order], begin, side="right")]).all())


def _remainders(
    entries: Entries, start: Beginning, first: FinalSegments, allocs: Int64, end: UInt64
) -> Int64 | None:
    """Return how far behind each request the next edge is: bytes, 0 where more than `SMALL_REQUEST`.

    Edges are the live blocks above `SMALL_REQUEST` and the ends of segments.

    Args:
        allocs, end: the entries that allocate, and the addresses behind what they request.

    Returns:
        None if too many edges came and went.
    """
    reserves = code_mask(SEGMENT_KINDS)[entries.kind]
    blocks = code_mask((Kind.ALLOC, Kind.FREE_COMPLETED))[entries.kind] & (entries.bytes > SMALL_REQUEST)
    rows = np.flatnonzero(reserves | blocks)
    ends = entries.address[rows] + np.where(reserves[rows], entries.bytes[rows], 0).astype(np.uint64)
    begins = code_mask((Kind.ALLOC, Kind.SEGMENT_ALLOC))[entries.kind[rows]]
    before = (start.address[start.bytes > SMALL_REQUEST], first.address + first.bytes.astype(np.uint64))
    address = np.concatenate((*before, ends))
    at_start = np.zeros(len(address) - len(rows), np.int64)
    order = address_order(address)
    address = address[order]
    level = np.cumsum(np.concatenate((at_start + 1, np.where(begins, 1, -1)))[order])
    level = np.append(0, level)
    # An edge is there at an entry if, of all that was recorded at its address before, more came than went.
    row = np.flatnonzero(np.append(True, address[1:] != address[:-1]))
    edges, width = address[row], len(entries.kind) + 1
    edge_of = np.repeat(np.arange(len(row)), np.diff(row, append=len(address)))
    key = edge_of * width + np.concatenate((at_start, rows + 1))[order]
    rest, left = np.zeros(len(allocs), np.int64), np.arange(len(allocs))
    edge = np.searchsorted(edges, end)
    for _ in range(MOST_GONE):
        left = left[edge[left] < len(edges)]
        left = left[edges[edge[left]] - end[left] <= SMALL_REQUEST]
        if not len(left):
            return rest
        some = edge[left]
        is_there = level[np.searchsorted(key, some * width + allocs[left] + 1)] > level[row[some]]
        rest[left[is_there]] = (edges[some] - end[left])[is_there]
        left = left[~is_there]
        edge[left] += 1
    return None
