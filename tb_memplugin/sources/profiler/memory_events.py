"""The allocator events of a profile as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch._C import _profiler

from tb_memplugin.sources.profiler.tree import ProfilerTree, getter
from tb_memplugin.sources.shared_memory import SHARED, in_shared_memory
from tb_memplugin.trace.tables import Int64, UInt8, UInt64

_get_reserved = getter(_profiler._ExtraFields_Allocation, "total_reserved")


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """Allocs and frees in time order, columns of one length.

    `bytes` is signed: negative for frees. `total` and `reserved` are the reporting allocator's
    counters after the event; `reserved` is -1 on devices that keep none. `operator`, `node` and `frame`
    are rows and keys of the tree, -1 for none; `thread` is the profiler's number.
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


def beside_counters(memory: MemoryEvents) -> list[str]:
    """By how much a device's allocator counted more or less than its events tell, as sentences.

    Each event has the counter after it, so what changed between two events is known, though not who did it.
    The CPU's counter tells nothing: it counts for profilers alone.
    """
    notes = []
    for device, name in enumerate(memory.devices):
        if name in ("cpu", SHARED):
            continue
        here = np.flatnonzero(memory.device == device)
        before = memory.total[here] - memory.bytes[here]
        above = np.cumsum(before[1:] - memory.total[here][:-1])
        high, low = int(above.max(initial=0)), -int(above.min(initial=0))
        if high or low:
            notes.append(
                f"{name}: the profile lacks some of what was allocated and freed there (on threads that the "
                f"profiler does not see, say): the allocator's own counter was up to {high:,} bytes above "
                f"this curve, and up to {low:,} below."
            )
    return notes


def read_memory_events(tree: ProfilerTree) -> MemoryEvents:
    """The memory events that the walk found, sorted by time, with their devices told apart."""
    columns = tree.memory_columns()
    order = np.argsort(columns[0], kind="stable")
    time, address, size, total, operator, node, frame = (column[order] for column in columns)
    if tree.fields:
        found, device = np.unique([str(fields.device) for fields in tree.fields], return_inverse=True)
        devices, device = [str(name) for name in found], device[order]
        reserved = np.fromiter(map(_get_reserved, tree.fields), np.int64, len(order))[order]
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
