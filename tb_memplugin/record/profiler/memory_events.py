"""The allocator events of a profile as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.read.shared_memory import SHARED, in_shared_memory
from tb_memplugin.record.profiler.tree_columns import ProfilerTree
from tb_memplugin.record.torch_private.profiler import reserved_after
from tb_memplugin.trace import Note
from tb_memplugin.trace.tables import Int64, UInt8, UInt64


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """Allocs and frees in time order, columns of equal length.

    `bytes` is negative for frees. `total` and `reserved` are the reporting allocator's counters after the
    event; `reserved` is -1 on devices without a reserve. `operator` and `node` are rows of the tree, `frame`
    is a key of its frames, each -1 for none; `thread` is the profiler's thread number.
    """

    time_ns: Int64
    address: UInt64
    bytes: Int64
    total: Int64
    reserved: Int64
    device: UInt8
    operator: Int64
    node: Int64
    frame: Int64
    thread: Int64
    devices: tuple[str, ...]


def beside_counters(memory: MemoryEvents) -> list[Note]:
    """Return notes on how far each device's allocator counter differs from the sum of its events.

    Each event contains the counter after it, so changes between two events are known, but not their cause.
    The CPU is left out: its counter counts only what profilers see.
    """
    notes: list[Note] = []
    for device, name in enumerate(memory.devices):
        if name in ("cpu", SHARED):
            continue
        if above := misses(memory, device):
            high, low = above
            notes.append(
                Note(
                    f"{name}: the profile misses some of what was allocated and freed (for example, on "
                    "threads that the profiler does not see). The allocator's own counter was up to "
                    f"{high:,} bytes above this curve, and up to {low:,} below.",
                    "differs_from_counter",
                    max(high, low),
                    device=name,
                )
            )
    return notes


def misses(memory: MemoryEvents, device: int) -> tuple[int, int] | None:
    """Return the most bytes by which a device's counter was above and below the sum of its events, if any."""
    here = np.flatnonzero(memory.device == device)
    before = memory.total[here] - memory.bytes[here]
    above = np.cumsum(before[1:] - memory.total[here][:-1])
    high, low = int(above.max(initial=0)), -int(above.min(initial=0))
    return (high, low) if high or low else None


def read_memory_events(tree: ProfilerTree) -> MemoryEvents:
    """Return the memory events of the tree, sorted by time, with their devices."""
    columns = tree.memory_columns()
    order = np.argsort(columns[0], kind="stable")
    time, address, size, total, operator, node, frame = (column[order] for column in columns)
    if tree.fields:
        names, device = np.unique([str(fields.device) for fields in tree.fields], return_inverse=True)
        devices, device = [str(name) for name in names], device[order]
        reserved = np.fromiter(map(reserved_after, tree.fields), np.int64, len(order))[order]
    else:
        devices, device = ["cpu"], np.zeros(len(order), np.int64)
        reserved = np.full(len(order), -1, np.int64)
    shared = in_shared_memory(address, size, total, np.array(devices)[device] == "cpu")
    if shared.any():
        devices.append(SHARED)
        device[shared] = len(devices) - 1
    reserved[np.array([name in ("cpu", SHARED) for name in devices])[device]] = -1
    return MemoryEvents(
        time,
        address.view(np.uint64),
        size,
        total,
        reserved,
        device.astype(np.uint8),
        operator,
        node,
        frame,
        tree.thread_of(1)[order],
        tuple(devices),
    )
