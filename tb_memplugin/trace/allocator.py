"""Tables that only an allocator's history can fill, and the sizes of PyTorch's caching allocator.

The sizes are those of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace.kinds import GROWS, SHRINKS, Kind
from tb_memplugin.trace.tables import Int32, Int64, UInt8, UInt64, column, ranges

PoolId = tuple[int, int]
"""The id of a pool of the caching allocator, as torch counts them."""

DEFAULT_POOL: PoolId = (0, 0)
"""The id of the pool that serves every allocation outside CUDA graphs and `torch.cuda.MemPool`."""

SMALLEST_BLOCK = 512
"""Blocks are multiples of this (kMinBlockSize)."""

SMALL_REQUEST = 1 << 20
"""Requests up to this size are served from small segments (kSmallSize). From a block of a large segment that
is not expandable, a remainder of this size or less is not split off (should_split)."""

SMALL_SEGMENT = 2 << 20
"""The size of a small segment and of a page of an expandable one (kSmallBuffer), and of what larger segments
are multiples of (kRoundLarge)."""

LARGE_SEGMENT = 20 << 20
"""The size of a segment for a request above `SMALL_REQUEST` and below `SERVED_ALONE` (kLargeBuffer)."""

SERVED_ALONE = 10 << 20
"""From this size on, a request gets a segment of its own size, rounded up to a multiple of `SMALL_SEGMENT`
(kMinLargeAlloc)."""

RESERVE_SIGN = np.zeros(len(Kind), np.int64)
"""By kind of event: 1 where its bytes are added to the reserved memory, -1 where they are removed."""
RESERVE_SIGN[[*GROWS]], RESERVE_SIGN[[*SHRINKS]] = 1, -1


def rounded_by_rule(requested: Int64) -> Int64:
    """Round requests up to multiples of 512 bytes: the least that the allocator sets aside for them.

    A block may be larger: a remainder that is too small to be split off stays with it, and the setting
    `roundup_power2_divisions` rounds up further (round_size and should_split).
    """
    units: Int64 = np.maximum(-(-requested // SMALLEST_BLOCK), 1)
    return units * SMALLEST_BLOCK


def new_segment_bytes(request: int, large: int = LARGE_SEGMENT) -> int:
    """Return the size of the segment that a request needs if no free block can serve it.

    The rule is `get_allocation_size`; `large` is a setting. An expandable segment may need less.
    """
    if request <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if request < SERVED_ALONE:
        return large
    return -(-request // SMALL_SEGMENT) * SMALL_SEGMENT


MOST_PIECES = 1 << 25
"""More pieces than this arise only from ranges that overlap in a way no allocator produces."""


def cut_ranges(address: UInt64, size: Int64) -> tuple[UInt64, Int64, Int64]:
    """Cut ranges of addresses wherever one begins or ends, so that each piece is reserved and released whole.

    Args:
        address, size: where the ranges begin, and their bytes. A range beyond 2**64 ends there.

    Returns:
        All edges, ascending. For each piece of each range, the index of its lower edge, and its range; sorted
        by piece, and then in the order of the ranges.

    Raises:
        ValueError: there would be more than `MOST_PIECES`.
    """
    end = address + np.minimum(size.astype(np.uint64), ~address)
    cuts = np.unique(np.concatenate((address, end)))
    first = np.searchsorted(cuts, address)
    count = np.searchsorted(cuts, end) - first
    if int(count.sum()) > MOST_PIECES:
        raise ValueError(f"segments cut one another into {int(count.sum()):,} pieces")
    owner = np.repeat(np.arange(len(count)), count)
    piece = ranges(first, first + count)
    order = np.argsort(piece, kind="stable")
    return cuts, piece[order], owner[order]


@dataclass(frozen=True, slots=True)
class Segments:
    """Memory that the allocator had reserved before the first event: one row per range, none overlapping.

    `stream` and `pool` are rows of the trace's tables, -1 if not known. Ranges marked `expandable` grow by
    SEGMENT_MAP and shrink by SEGMENT_UNMAP; the others are allocated and freed whole. Segment events change
    this state; their `address` and `bytes` are those of the range.
    """

    device: UInt8 = column(np.uint8)
    address: UInt64 = column(np.uint64)
    bytes: Int64 = column(np.int64)
    stream: Int32 = column(np.int32)
    pool: Int32 = column(np.int32)
    expandable: UInt8 = column(np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)


@dataclass(frozen=True, slots=True)
class Annotations:
    """Starts and ends of named ranges (`record_function`, `Optimizer.step#…`), in time order.

    `name` is a row of the trace's `annotation_names`; `ends` is 0 for START, 1 for END; `device` is a
    row of the trace's devices. `event` is the index of that device's last event at or before the
    annotation, -1 if there is none: the state at the annotation is the state after that event.
    """

    time_ns: Int64 = column(np.int64)
    name: Int32 = column(np.int32)
    ends: UInt8 = column(np.uint8)
    device: UInt8 = column(np.uint8)
    event: Int64 = column(np.int64)

    def __len__(self) -> int:
        return len(self.time_ns)


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed: the index of its event, the requested bytes, and the device's free bytes.

    `free_bytes` is what the driver reported as free at that moment, outside the allocator's reserve;
    None if not known.
    """

    event: int
    requested_bytes: int
    free_bytes: int | None = None
