"""Allocs and frees of one device in time order, as every export over time needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class Changes:
    """One row a change: which row of `trace.allocations`, at which event, by how many bytes (signed)."""

    block: npt.NDArray[np.intp]
    event: Int64
    change: Int64


def changes_of(trace: MemoryTrace, device: int) -> Changes:
    """The changes of a device's live bytes. At one event, what ends comes before what begins."""
    blocks = trace.allocations
    here = blocks.device == device
    born = np.flatnonzero(here & (blocks.born >= 0))
    freed = np.flatnonzero(here & (blocks.freed < len(trace.events)))
    block = np.concatenate((freed, born))
    event = np.concatenate((blocks.freed[freed], blocks.born[born]))
    change = np.concatenate((-blocks.bytes[freed], blocks.bytes[born]))
    order = np.argsort(event, kind="stable")
    return Changes(block[order], event[order], change[order])


def is_used(trace: MemoryTrace, device: int) -> bool:
    """Whether anything was ever alive, reserved, or happened on a device."""
    tables = (trace.allocations, trace.events, trace.segments)
    return any(bool((table.device == device).any()) for table in tables)


def first_time(trace: MemoryTrace) -> int:
    """The earliest time that a trace tells, epoch nanoseconds."""
    first = [int(time[0]) for time in (trace.events.time_ns, trace.annotations.time_ns) if len(time)]
    return min(first + [step.start_ns for step in trace.steps[:1]], default=0)


def times_are_known(trace: MemoryTrace) -> bool:
    """False where an event's index stands for its time (snapshots of PyTorch before 2.2)."""
    time = trace.events.time_ns
    if not len(time) or time[0] != 0:
        return bool(len(time))
    return any(
        bool((own != 1_000 * np.arange(len(own))).any())
        for own in (time[trace.events.device == row] for row in range(len(trace.devices)))
    )
