"""Read the `[memory]` and `[OutOfMemory]` events of a Kineto trace as columns, in time order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.by_size import addresses_by_size
from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.kineto.fields import Column, time_column, whole_column
from tb_memplugin.read.shared_memory import SHARED, in_shared_memory
from tb_memplugin.trace.tables import Bool, Int64, UInt8, UInt64

DEVICE_TYPES = [
    *("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan"),
    *("metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone"),
]
"""Device types by their number in c10/core/DeviceType.h."""

DEVICE_NAME = re.compile(r"[a-z_]{1,32}(:\d{1,4})?")

MOST_BYTES = 1 << 62
"""The sum of all sizes must be below this, so that 64-bit running sums do not overflow."""

MOST_DEVICES = 256
LONGEST_PROCESS = 40
"""The largest number of characters of a process's name, which merged traces of several ranks may have."""

FIX = "Export the trace again with torch.profiler, or load a complete copy of the file."

Written = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Memory events as columns of equal length, in time order.

    `time_ns` counts from the file's base time, or from the epoch. `bytes` is negative for frees; for `oom`
    rows it is the failed request. `total` and `reserved` are the allocator's counters after the row, -1 if
    not recorded. `thread` is a row of the threads. `named` marks addresses from the file (and `oom` rows);
    the others are made up. `faults` has each kind of invalid event;
    `sizeless` counts events that were left out because they have no size.
    """

    time_ns: Int64
    address: UInt64
    bytes: Int64
    total: Int64
    reserved: Int64
    device: UInt8
    thread: Int64
    oom: Bool
    named: Bool
    devices: tuple[str, ...]
    faults: Faults
    sizeless: int


class Threads:
    """The distinct threads of the trace, by process and thread id of any type."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def rows(self, events: Sequence[Written]) -> Int64:
        """Return the row of each event's thread: int64.

        Ids are looked up as texts, once per distinct pair: a hostile file may contain numbers whose look-up
        takes hours.
        """
        process, thread = [event.get("pid") for event in events], [event.get("tid") for event in events]
        (of_process, whole_process), (of_thread, whole_thread) = whole_column(process), whole_column(thread)
        if not (whole_process.all() and whole_thread.all()):
            return np.array([self._row(*pair) for pair in zip(process, thread, strict=True)], np.int64)
        pairs, pair = np.unique(np.stack((of_process, of_thread)), axis=1, return_inverse=True)
        rows = [self._row(*ids) for ids in pairs.T.tolist()]
        return np.array(rows, np.int64)[pair.reshape(-1)]

    def _row(self, process: object, thread: object) -> int:
        return self._rows.setdefault(f"{str(process)[:100]} {str(thread)[:100]}", len(self._rows))


def read_memory(
    written: Sequence[Written], ooms: Sequence[Written], threads: Threads, where: str
) -> MemoryRows:
    """Return the columns of a trace's memory events, sorted by (`ts`, event index).

    Rows without a time, a size or a device are left out and counted.

    Raises:
        UnreadableFileError: there are impossibly many devices or bytes.
    """
    both = [*written, *ooms]
    arguments = list(map(arguments_of, both))
    time, timed = time_column([event.get("ts") for event in both])
    size, sized = whole_column([args.get("Bytes") for args in arguments])
    device, devices, numberless = _devices(arguments)
    device, devices = _split_processes(device, devices, [event.get("pid") for event in both])
    if len(devices) > MOST_DEVICES // 2:  # each may have shared memory beside it
        raise UnreadableFileError(f"The trace has {len(devices)} devices.", where=where, fix=FIX)
    index = indices(arguments)
    faults = {
        "memory events have no time; left out": Tally.of(~timed, np.where(sized, size, 0)),
        "memory events have no device; left out": Tally.of(timed & sized & (device < 0), size),
        "memory events have no device number; taken as 0": Tally.of(timed & sized & numberless, size),
    }
    good = np.flatnonzero(timed & sized & (device >= 0))
    order = good[np.lexsort((index[good], time[good]))]
    if float(np.sum(np.abs(size[order].astype(np.float64)))) >= MOST_BYTES:
        raise UnreadableFileError("The sum of the memory events is impossibly large.", where=where, fix=FIX)
    oom = (np.arange(len(both)) >= len(written))[order]
    total = _counter(arguments, "Total Allocated")[order]
    if (total >= 0).any():
        faults["memory events have no total, or an impossible one; it is not checked"] = Tally.of(
            (total < 0) & ~oom, size[order]
        )
    address, named = whole_column([args.get("Addr") for args in arguments])
    address, named = address[order], (named & (address != 0))[order]
    device, devices = _split_shared(device[order], devices, size[order], total, address, oom)
    loose = np.flatnonzero(~named & ~oom)
    address[loose] = addresses_by_size(device[loose], size[order][loose]).view(np.int64)
    address[oom] = 0
    return MemoryRows(
        time_ns=time[order],
        address=address.view(np.uint64),
        bytes=size[order],
        total=np.where(np.array([name.startswith(SHARED) for name in devices], bool)[device], -1, total),
        reserved=_counter(arguments, "Total Reserved")[order],
        device=device.astype(np.uint8),
        thread=threads.rows(both)[order],
        oom=oom,
        named=named | oom,
        devices=devices,
        faults=faults,
        sizeless=int(np.count_nonzero(timed & ~sized)),
    )


def arguments_of(event: Written) -> Written:
    """Return the arguments of an event; empty if it has none."""
    args = event.get("args")
    return args if type(args) is dict else {}


def indices(arguments: Sequence[Written]) -> Int64:
    """Return the index that the profiler gave to each event; -1 if not recorded."""
    number, there = whole_column(
        [args.get("Ev Idx", args.get("Profiler Event Index", -1)) for args in arguments]
    )
    return np.where(there, number, -1)


def _counter(arguments: Sequence[Written], name: str) -> Int64:
    number, there = whole_column([args.get(name) for args in arguments])
    return np.where(there & (number >= 0) & (number < MOST_BYTES), number, -1)


def _devices(arguments: Sequence[Written]) -> tuple[Int64, tuple[str, ...], Bool]:
    """Return each event's device row (-1 for none), the sorted device names, and which lack a number."""
    kind, has_kind = _types(arguments)
    number, has_number = whole_column([args.get("Device Id", -1) for args in arguments])
    pairs, pair = np.unique(
        np.stack((np.where(has_kind, kind, -1), np.where(has_number, number, -1))),
        axis=1,
        return_inverse=True,
    )
    names = [_name(*key) for key in pairs.T.tolist()]
    name_of = [names[row] for row in pair.reshape(-1).tolist()]
    for event in np.flatnonzero(~has_kind).tolist():
        name_of[event] = _spelled(arguments[event])
    devices = tuple(sorted(set(name_of) - {""}))
    rows = {name: row for row, name in enumerate(devices)}
    numberless = has_kind & (kind > 0) & ~(has_number & (number >= 0))
    return np.array([rows.get(name, -1) for name in name_of], np.int64), devices, numberless


def _types(arguments: Sequence[Written]) -> Column:
    kinds = {name: number for number, name in enumerate(DEVICE_TYPES)}
    written = [args.get("Device Type") for args in arguments]
    return whole_column([kinds.get(kind.lower(), kind) if type(kind) is str else kind for kind in written])


def _name(kind: int, number: int) -> str:
    """Return a device as torch spells it; "" for none."""
    if kind < 0:
        return ""
    if kind == 0:
        return "cpu"
    spelled = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"device{kind}"
    return f"{spelled}:{max(number, 0)}"


def _spelled(arguments: Written) -> str:
    """Return the device in old traces, which is a name, or a number with -1 for the CPU."""
    device = arguments.get("Device")
    if type(device) is int and -1 <= device < MOST_DEVICES:
        return "cpu" if device < 0 else f"cuda:{device}"
    if isinstance(device, str) and DEVICE_NAME.fullmatch(device.lower()):
        name = device.lower().partition(":")[0]
        return name if name == "cpu" else device.lower() if ":" in device else f"{name}:0"
    return ""


def _split_processes(
    device: Int64, devices: tuple[str, ...], processes: Sequence[object]
) -> tuple[Int64, tuple[str, ...]]:
    """Give each process its own devices if several use one, as in merged traces of several ranks.

    Addresses and counters are per process: on one device, processes would free one another's blocks.
    """
    number, there = whole_column(processes)
    if not len(number) or (there.all() and (number == number[0]).all()):
        return device, devices
    named = [
        str(number) if is_number else pid[:LONGEST_PROCESS] if isinstance(pid, str) else "not told"
        for pid, number, is_number in zip(processes, number.tolist(), there.tolist(), strict=True)
    ]
    names, process = np.unique(named, return_inverse=True)
    pairs, pair = np.unique(np.stack((device, process.reshape(-1))), axis=1, return_inverse=True)
    users = np.bincount(pairs[0] + 1)  # places from 0 on: -1 stands for no device
    own = [
        devices[row] if users[row + 1] == 1 else f"{devices[row]} (process {names[user]})"
        for row, user in pairs.T.tolist()
        if row >= 0
    ]
    row_of = np.where(pairs[0] < 0, -1, np.arange(len(pairs[0])) - np.count_nonzero(pairs[0] < 0))
    return row_of[pair.reshape(-1)], tuple(own)


def _split_shared(
    device: Int64, devices: tuple[str, ...], size: Int64, total: Int64, address: Int64, oom: Bool
) -> tuple[Int64, tuple[str, ...]]:
    """Give shared memory its own device; c10's MapAllocator reports a total of 0 for it."""
    device, names = device.copy(), devices
    for row in (row for row, name in enumerate(devices) if name.startswith("cpu")):
        here = np.flatnonzero((device == row) & ~oom)
        shared = in_shared_memory(address[here], size[here], total[here], np.ones(len(here), bool))
        if shared.any():
            device[here[shared]] = len(names)
            names = (*names, devices[row].replace("cpu", SHARED, 1))
    return device, names
