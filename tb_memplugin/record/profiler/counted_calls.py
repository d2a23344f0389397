"""Complete the CPU's events of a profile with the calls of its allocator, where these were counted.

The profiler lacks what threads without it allocate and free, and frees of blocks that no profile has seen
allocated. It reports an old size for a free of a block at an address that an earlier profile knew.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tb_memplugin.record.profiler.memory_events import MemoryEvents
from tb_memplugin.trace.tables import Bool, Int64, Rows

CPU = "cpu"


def with_counted_calls(memory: MemoryEvents, calls: npt.NDArray[np.void]) -> MemoryEvents:
    """Return the events with every call as an event of the CPU, and with the profiler's where they match.

    A matched event keeps the profiler's time and operator, and gets the bytes of its call. The events at one
    address are in the order of their calls.

    Args:
        calls: dtype `CALL`, those at one address in their order.
    """
    devices = memory.devices if CPU in memory.devices else (*memory.devices, CPU)
    here = np.flatnonzero(memory.device == devices.index(CPU))
    event = _matched(memory, here, calls)
    is_matched = event >= 0
    rows = here[event[is_matched]]
    behind = _median(memory.time_ns[rows] - calls["time_ns"][is_matched])
    time = calls["time_ns"] + behind
    time[is_matched] = memory.time_ns[rows]
    time = _in_order(time, calls["address"])
    kept = np.ones(len(memory.time_ns), bool)
    kept[rows] = False
    columns = {
        "time_ns": time,
        "address": calls["address"],
        "bytes": calls["bytes"],
        "device": np.full(len(calls), devices.index(CPU), np.uint8),
        "total": np.zeros(len(calls), np.int64),
        "reserved": np.full(len(calls), -1, np.int64),
    }
    for name in ("operator", "node", "frame", "thread"):
        columns[name] = np.full(len(calls), -1, np.int64)
        columns[name][is_matched] = getattr(memory, name)[rows]
    joined = {name: np.concatenate((getattr(memory, name)[kept], column)) for name, column in columns.items()}
    order = np.argsort(joined["time_ns"], kind="stable")
    return replace(memory, devices=devices, **{name: column[order] for name, column in joined.items()})


def _matched(memory: MemoryEvents, here: Rows, calls: npt.NDArray[np.void]) -> Int64:
    """Return for each call the place in `here` of the event that reports it, -1 for none.

    Calls and events are grouped by address and direction. Groups of the same number match in their order; in
    others, each event matches the call that is nearest in time, and no call before that of an earlier event.
    """
    matched = np.full(len(calls), -1, np.int64)
    by_call = np.lexsort((np.arange(len(calls)), calls["bytes"] > 0, calls["address"]))
    by_event = np.lexsort((memory.time_ns[here], memory.bytes[here] > 0, memory.address[here]))
    groups_of_calls = _groups(calls["address"][by_call], calls["bytes"][by_call] > 0)
    groups_of_events = _groups(memory.address[here][by_event], memory.bytes[here][by_event] > 0)
    uneven = []
    for key, events in groups_of_events.items():
        rows = groups_of_calls.get(key)
        if rows is None:
            continue
        if events.stop - events.start == rows.stop - rows.start:
            matched[by_call[rows]] = by_event[events]
        else:
            uneven.append((by_call[rows], by_event[events]))
    is_matched = matched >= 0
    behind = _median(memory.time_ns[here[matched[is_matched]]] - calls["time_ns"][is_matched])
    for rows_left, events_left in uneven:
        times = calls["time_ns"][rows_left] + behind
        first = 0
        for event in events_left.tolist():
            if first == len(times):
                break
            nearest = first + int(np.abs(times[first:] - memory.time_ns[here[event]]).argmin())
            matched[rows_left[nearest]] = event
            first = nearest + 1
    return matched


def _groups(address: npt.NDArray[np.uint64], is_alloc: Bool) -> dict[tuple[int, bool], slice]:
    """Return the range of each (address, direction) in sorted columns."""
    if not len(address):
        return {}
    new = np.flatnonzero((address[1:] != address[:-1]) | (is_alloc[1:] != is_alloc[:-1])) + 1
    starts = np.concatenate(([0], new))
    keys = zip(address[starts].tolist(), is_alloc[starts].tolist(), strict=True)
    ends = np.append(new, len(address)).tolist()
    return {key: slice(start, end) for key, start, end in zip(keys, starts.tolist(), ends, strict=True)}


def _median(differences: Int64) -> int:
    return int(np.median(differences)) if len(differences) else 0


def _in_order(time: Int64, address: npt.NDArray[np.uint64]) -> Int64:
    """Return the times, later where a call at the same address would else come after its successor."""
    order = np.lexsort((np.arange(len(time)), address))
    sorted_time, sorted_address = time[order], address[order]
    same = sorted_address[1:] == sorted_address[:-1]
    for row in (np.flatnonzero(same & (sorted_time[1:] < sorted_time[:-1])) + 1).tolist():
        latest = sorted_time[row - 1]
        while (
            row < len(order) and sorted_address[row] == sorted_address[row - 1] and sorted_time[row] < latest
        ):
            sorted_time[row] = latest
            row += 1
    later: Int64 = time.copy()
    later[order] = sorted_time
    return later
