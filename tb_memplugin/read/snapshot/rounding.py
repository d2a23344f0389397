"""Say what the allocator used for requests whose blocks are gone, where its rules leave no choice."""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.snapshot.blocks import FinalState
from tb_memplugin.read.snapshot.entries import Entries
from tb_memplugin.trace import Kind
from tb_memplugin.trace.tables import Int64

UNIT = 512
"""Sizes of blocks are multiples of this (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""

SMALL_REQUEST = 1 << 20
"""From a block for a larger request, a remainder of this size or less is not split off (kSmallSize)."""

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
        entries, final: that device's.
    """
    has_fixed = np.isin(entries.kind, (Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE)).any()
    expandable = bool(len(final.segments.expandable) and final.segments.expandable.all() and not has_fixed)
    sure = (final.bytes <= SMALL_REQUEST) | expandable
    if (final.rounded[sure] != round_up(final.bytes[sure])).any():
        return np.full(len(requested), -1, np.int64)
    return np.where((requested <= SMALL_REQUEST) | expandable, round_up(requested), -1)


def round_up(requested: Int64) -> Int64:
    """Return the least multiples of `UNIT` for requests, in bytes."""
    units: Int64 = np.maximum(-(-requested // UNIT), 1)
    return units * UNIT
