"""Tables that only an allocator's history can fill: segments, annotations, failed allocations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64, UInt8, UInt64, column

PoolId = tuple[int, int]
"""The id of a pool of the caching allocator, as torch counts them."""

DEFAULT_POOL: PoolId = (0, 0)
"""The id of the pool that serves every allocation outside CUDA graphs and `torch.cuda.MemPool`."""


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
