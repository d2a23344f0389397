"""What a trace records at all: which devices, from when on, and whether its times are times."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace import MemoryTrace


def is_used(trace: MemoryTrace, device: int) -> bool:
    """Return whether a device has any allocation, event or segment."""
    tables = (trace.allocations, trace.events, trace.segments)
    return any(bool((table.device == device).any()) for table in tables)


def first_time(trace: MemoryTrace) -> int:
    """Return the earliest time in a trace, epoch nanoseconds; 0 if it has none."""
    first = [int(time[0]) for time in (trace.events.time_ns, trace.annotations.time_ns) if len(time)]
    return min(first + [step.start_ns for step in trace.steps[:1]], default=0)


def times_are_known(trace: MemoryTrace) -> bool:
    """Return False if event indices stand for times, as in snapshots of PyTorch before 2.2."""
    time = trace.events.time_ns
    if not len(time) or time[0] != 0:
        return bool(len(time))
    return any(
        bool((own != 1_000 * np.arange(len(own))).any())
        for own in (time[trace.events.device == row] for row in range(len(trace.devices)))
    )
