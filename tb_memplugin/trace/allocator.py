"""What only an allocator's own record tells: segments, annotations beside its events, failed requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace.tables import Int32, Int64, UInt8, UInt64, column

DEFAULT_POOL = (0, 0)
"""The id of the pool that serves all but CUDA graphs and `torch.cuda.MemPool`."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Memory that the allocator had reserved before the first event: one row a range, not overlapping.

    `stream` and `pool` are rows of the trace's tables, -1 if not known. `expandable` ranges grow by
    SEGMENT_MAP and shrink by SEGMENT_UNMAP; the others come and go whole. Segment events carry on from
    here: their `address` and `bytes` are the range's.
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
    """Beginnings and ends of named ranges (`record_function`, `Optimizer.step#…`), in time order.

    `name` is a row of the trace's `annotation_names`; `ends` is 0 for START, 1 for END; `device` is a
    row of the trace's devices. `event` is the index of the last event of that device at or before it,
    -1 where there is none: the state at the annotation is the state after that event.
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
    """A request that failed: the index of its event, the bytes asked for, and those free on the device.

    `free_bytes` is what the driver called free at that moment, outside of the allocator's reserve;
    None if not known.
    """

    event: int
    requested_bytes: int
    free_bytes: int | None = None
