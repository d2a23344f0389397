"""The allocator events of a profile as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch._C import _profiler

from tb_memplugin.sources.profiler_tree import ProfilerTree, _get_fields, _get_start
from tb_memplugin.trace.tables import Int64, UInt8, UInt64

SHARED = "shared"
"""The memory of tensors that processes share: the profiler reports it, but counts it nowhere."""


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """Allocs and frees in time order, columns of one length.

    `bytes` is signed: negative for frees. `total` and `reserved` are the reporting allocator's
    counters after the event. `operator`, `node` are rows in the tree's lists, -1 for none.
    """

    time_ns: Int64
    address: UInt64
    bytes: Int64
    total: Int64
    reserved: Int64
    device: UInt8
    operator: Int64
    node: Int64
    thread: Int64
    devices: tuple[str, ...]


def read_memory_events(tree: ProfilerTree) -> MemoryEvents:
    """Read the fields of every memory event that the walk found, and sort by time."""
    count = len(tree.memory)
    fields = list(map(_get_fields, tree.memory))
    kind = _profiler._ExtraFields_Allocation
    time = np.fromiter(map(_get_start, tree.memory), np.int64, count)
    size = np.fromiter(map(kind.alloc_size.fget, fields), np.int64, count)
    total = np.fromiter(map(kind.total_allocated.fget, fields), np.int64, count)
    if torch.accelerator.is_available():
        found = list(map(str, map(kind.device.fget, fields)))
        names, device = np.unique(np.array(found), return_inverse=True)
        devices = [str(name) for name in names]
        reserved = np.fromiter(map(kind.total_reserved.fget, fields), np.int64, count)
    else:
        devices, device = ["cpu"], np.zeros(count, np.int64)
        reserved = np.zeros(count, np.int64)
    order = np.argsort(time, kind="stable")
    address = np.fromiter(map(kind.ptr.fget, fields), np.int64, count).view(np.uint64)
    columns = [column[order] for column in (time, address, size, total, reserved, device)]
    shared = _shared(columns[1], columns[2], columns[3], np.array(devices)[columns[5]] == "cpu")
    if shared.any():
        devices.append(SHARED)
        columns[5][shared] = len(devices) - 1
    cpu_like = np.array([name in ("cpu", SHARED) for name in devices])
    columns[4][cpu_like[columns[5]]] = -1
    return MemoryEvents(
        *columns[:5],
        columns[5].astype(np.uint8),
        np.array(tree.memory_operator, np.int64)[order],
        np.array(tree.memory_node, np.int64)[order],
        np.array(tree.memory_thread, np.int64)[order],
        tuple(devices),
    )


def _shared(address: UInt64, size: Int64, total: Int64, on_cpu: np.ndarray) -> np.ndarray:
    """Mask of events in shared memory: they carry a total of 0 (c10's MapAllocator counts nothing)."""
    suspect = on_cpu & (total == 0)
    if not suspect.any():
        return suspect
    allocs = suspect & (size > 0)
    frees = suspect & (size < 0)
    regular = np.flatnonzero(on_cpu & ~suspect)
    for event in np.flatnonzero(frees):
        place = np.searchsorted(regular, event) - 1
        before = int(total[regular[place]]) if place >= 0 else None
        if before is not None and before + int(size[event]) == 0:
            frees[event] = False  # the counter really came down to 0
        elif before is None and not np.isin(address[event], address[allocs]):
            frees[event] = False
    return allocs | frees
