"""Read the `[memory]` and `[OutOfMemory]` events of a Kineto trace as columns, in time order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from sys import intern
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.kineto.fields import Column, time_column, whole_column
from tb_memplugin.read.shared_memory import SHARED, in_shared_memory
from tb_memplugin.read.tables import addresses_by_size
from tb_memplugin.trace.tables import MOST_BYTES, Bool, Int64, UInt8, UInt64

DEVICE_TYPES = [
    *("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan"),
    *("metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone"),
]
"""Device types by their number in c10/core/DeviceType.h."""

DEVICE_NAME = re.compile(r"[a-z_]{1,32}(:\d{1,4})?")

MOST_DEVICES = 256
LONGEST_PROCESS = 40
"""The largest number of characters of a process's name, which merged traces of several ranks may have."""

MEMORY_NAMES = ("[memory]", "[OutOfMemory]")

_NUMBERS = re.compile(r"-?[0-9]+ -?[0-9]+")

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


class WrittenMemory(NamedTuple):
    """The `[memory]` and `[OutOfMemory]` events of a trace, as columns in the file's order.

    `timed`, `sized` and `named` mark valid times, sizes and addresses. `device` is as torch spells it, "" for
    none, and `numberless` marks devices that should have a number. `process` and `thread` are what tells them
    apart. `total` and `reserved` are -1 where they are not recorded.
    """

    time_ns: Int64
    timed: Bool
    bytes: Int64
    sized: Bool
    device: list[str]
    numberless: Bool
    process: list[str]
    thread: list[str]
    event_index: Int64
    oom: Bool
    total: Int64
    reserved: Int64
    address: Int64
    named: Bool


Columns = TypeVar("Columns", bound=tuple[Any, ...])


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the columns of all parts, one after the other."""
    columns = zip(*parts, strict=True)
    kind: Callable[..., Columns] = type(parts[0])
    return kind(*(list(chain(*each)) if type(each[0]) is list else np.concatenate(each) for each in columns))


class Threads:
    """The rows of the distinct threads of the trace."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}

    def rows(self, threads: Sequence[str]) -> Int64:
        """Return the row of each event's thread: int64. New ones are in the order of their numbers."""
        new = [thread for thread in dict.fromkeys(threads) if thread not in self._rows]
        if all(map(_NUMBERS.fullmatch, new)):
            new.sort(key=lambda thread: tuple(map(int, thread.split())))
        self._rows.update({thread: len(self._rows) + place for place, thread in enumerate(new)})
        return np.array([self._rows[thread] for thread in threads], np.int64)


def threads_of(events: Sequence[Written]) -> list[str]:
    """Return what tells each event's thread apart: its process and thread id, numbers or texts.

    Ids are texts because a hostile file may contain numbers whose look-up takes hours.
    """
    process, thread = [event.get("pid") for event in events], [event.get("tid") for event in events]
    (of_process, whole_process), (of_thread, whole_thread) = whole_column(process), whole_column(thread)
    if whole_process.all() and whole_thread.all():
        pairs = zip(of_process.tolist(), of_thread.tolist(), strict=True)
        return [intern(f"{process} {thread}") for process, thread in pairs]
    return [
        intern(f"{str(process)[:100]} {str(thread)[:100]}")
        for process, thread in zip(process, thread, strict=True)
    ]


def memory_columns(events: Sequence[Written]) -> WrittenMemory:
    """Return the columns of memory events."""
    arguments = list(map(arguments_of, events))
    device, numberless = _devices(arguments)
    address, named = whole_column([args.get("Addr") for args in arguments])
    return WrittenMemory(
        *time_column([event.get("ts") for event in events]),
        *whole_column([args.get("Bytes") for args in arguments]),
        device=device,
        numberless=numberless,
        process=_processes([event.get("pid") for event in events]),
        thread=threads_of(events),
        event_index=indices(arguments),
        oom=np.array([event["name"] == MEMORY_NAMES[1] for event in events], bool),
        total=_counter(arguments, "Total Allocated"),
        reserved=_counter(arguments, "Total Reserved"),
        address=address,
        named=named,
    )


def read_memory(written: WrittenMemory, threads: Threads, where: str) -> MemoryRows:
    """Return a trace's memory events, sorted by (`ts`, event index).

    Rows without a time, a size or a device are left out and counted.

    Raises:
        UnreadableFileError: there are impossibly many devices or bytes.
    """
    time, timed, size, sized = written[:4]
    devices = tuple(sorted(set(written.device) - {""}))
    row_of = {name: row for row, name in enumerate(devices)}
    device = np.array([row_of.get(name, -1) for name in written.device], np.int64)
    device, devices = _split_processes(device, devices, written.process)
    if len(devices) > MOST_DEVICES // 2:  # each may have shared memory beside it
        raise UnreadableFileError(f"The trace has {len(devices)} devices.", where=where, fix=FIX)
    has_device = timed & sized & (device >= 0)
    faults = {
        "memory events have no time; left out": Tally.of(~timed, np.where(sized, size, 0)),
        "memory events have no device; left out": Tally.of(timed & sized & (device < 0), size),
        "memory events have no device number; taken as 0": Tally.of(timed & sized & written.numberless, size),
    }
    good = np.flatnonzero(has_device)
    # Of the same time and index, failed requests are last.
    order = good[np.lexsort((written.oom[good], written.event_index[good], time[good]))]
    if float(np.sum(np.abs(size[order].astype(np.float64)))) >= MOST_BYTES:
        raise UnreadableFileError("The sum of the memory events is impossibly large.", where=where, fix=FIX)
    oom, total = written.oom[order], written.total[order]
    if (total >= 0).any():
        faults["memory events have no total, or an impossible one; it is not checked"] = Tally.of(
            (total < 0) & ~oom, size[order]
        )
    address = written.address[order]
    named = written.named[order] & (address != 0)
    device, devices = _split_shared(device[order], devices, size[order], total, address, oom)
    loose = np.flatnonzero(~named & ~oom)
    address[loose] = addresses_by_size(device[loose], size[order][loose]).view(np.int64)
    address[oom] = 0
    thread = threads.rows(written.thread)[order]
    return MemoryRows(
        time_ns=time[order],
        address=address.view(np.uint64),
        bytes=size[order],
        total=np.where(np.array([name.startswith(SHARED) for name in devices], bool)[device], -1, total),
        reserved=written.reserved[order],
        device=device.astype(np.uint8),
        thread=thread,
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


def _devices(arguments: Sequence[Written]) -> tuple[list[str], Bool]:
    """Return each event's device as torch spells it ("" for none), and which lack a number."""
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
        name_of[event] = intern(_spelled(arguments[event]))
    return name_of, has_kind & (kind > 0) & ~(has_number & (number >= 0))


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


def _processes(ids: Sequence[object]) -> list[str]:
    """Return what tells each event's process apart."""
    number, there = whole_column(ids)
    return [
        intern(str(number) if is_number else pid[:LONGEST_PROCESS] if isinstance(pid, str) else "not told")
        for pid, number, is_number in zip(ids, number.tolist(), there.tolist(), strict=True)
    ]


def _split_processes(
    device: Int64, devices: tuple[str, ...], processes: Sequence[str]
) -> tuple[Int64, tuple[str, ...]]:
    """Give each process its own devices if several use one, as in merged traces of several ranks.

    Addresses and counters are per process: on one device, processes would free one another's blocks.
    """
    if len(set(processes)) < 2:
        return device, devices
    names, process = np.unique(processes, return_inverse=True)
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
