"""The allocator events of a profile as columns, completed by what other sources have of them.

The profiler lacks what threads without it allocate and free, and frees of blocks that no profile has seen
allocated. It reports an old size for a free of a block at an address that an earlier profile knew. The calls
of the CPU's allocator have all of that, where they were counted.

The tree's outermost events are those of the CPU (torch: csrc/autograd/profiler_kineto.cpp,
materializeOpEvents). So it lacks an alloc or free of another device if no range or operator is open: between
steps, and anywhere if the profile has no steps. The flat list of events has them, without addresses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tb_memplugin.read.shared_memory import SHARED, in_shared_memory
from tb_memplugin.record.profiler.tree_columns import ProfilerTree
from tb_memplugin.record.storages import Sighting
from tb_memplugin.record.torch_private.profiler import reserved_after
from tb_memplugin.trace import Note
from tb_memplugin.trace.tables import Bool, Int64, Rows, UInt8, UInt64

CPU = "cpu"


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


def _joined(
    memory: MemoryEvents, time_ns: Int64, *, kept: Bool | slice = slice(None), **added: np.ndarray
) -> MemoryEvents:
    """Return the events, those that are `kept`, with others in the order of time; columns left out are -1."""
    none = np.full(len(time_ns), -1)
    added["time_ns"] = time_ns
    order = np.argsort(np.concatenate((memory.time_ns[kept], time_ns)), kind="stable")
    columns: dict[str, Any] = {}
    for column in fields(MemoryEvents):
        if column.name != "devices":
            old = getattr(memory, column.name)[kept]
            new = added.get(column.name, none).astype(old.dtype)
            columns[column.name] = np.concatenate((old, new))[order]
    return replace(memory, **columns)


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
    sources = {name: np.full(len(calls), -1, np.int64) for name in ("operator", "node", "frame", "thread")}
    for name, column in sources.items():
        column[is_matched] = getattr(memory, name)[rows]
    return _joined(
        replace(memory, devices=devices),
        time,
        kept=kept,
        address=calls["address"],
        bytes=calls["bytes"],
        device=np.full(len(calls), devices.index(CPU)),
        total=np.zeros(len(calls), np.int64),
        **sources,
    )


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


_NAME = "[memory]"


@dataclass(frozen=True, slots=True)
class Outside:
    """An event that is not in the tree: signed bytes, and the profiler's number of its thread."""

    time_ns: int
    bytes: int
    thread: int


def with_events_outside(
    memory: MemoryEvents,
    flat: Callable[[], Iterable[Any]],
    blocks: Iterable[tuple[str, int, int]],
    sightings: Iterable[Sighting],
    *,
    has_steps: bool,
) -> MemoryEvents:
    """Return the events of the tree with those that torch left out of it.

    A free gets the address of a live block of its size: one whose address is allocated again soonest and
    that nobody was seen to hold until then, else the youngest that nobody holds. An alloc gets an address
    below the first page.

    Args:
        flat: returns `prof.profiler.kineto_results.events()`; called only if events may be missing.
        blocks: (device, address, bytes) of what was allocated at the window's start.
        sightings: parameters, gradients and optimizer state that were seen in the window.
        has_steps: whether the profile has steps, so that most events are inside a range.
    """
    at_start = list(blocks)
    rows = [row for row, name in enumerate(memory.devices) if name not in ("cpu", SHARED)]
    if not any(not has_steps or misses(memory, row) or _freed_before(memory, row, at_start) for row in rows):
        return memory
    by_device = _outside(memory, flat())
    held_at: dict[tuple[str, int], list[int]] = defaultdict(list)
    for sighting in sightings:
        held_at[sighting.device, sighting.address].append(sighting.time_ns)
    for row in rows:
        name = memory.devices[row]
        if outside := by_device.get(name):
            here = np.flatnonzero(memory.device == row)
            search = _Addresses(
                {address: sorted(when) for (where, address), when in held_at.items() if where == name}
            )
            start_blocks = [(address, size) for where, address, size in at_start if where == name]
            addresses = search.find(memory, here, start_blocks, outside)
            memory = _merged(memory, row, outside, addresses)
    return memory


def _freed_before(memory: MemoryEvents, row: int, blocks: Sequence[tuple[str, int, int]]) -> bool:
    """Whether the device's counter had changed when its first event came."""
    sizes = [size for name, _, size in blocks if name == memory.devices[row]]
    first = np.argmax(memory.device == row)
    return bool(sizes) and sum(sizes) != int(memory.total[first] - memory.bytes[first])


def _outside(memory: MemoryEvents, flat: Iterable[Any]) -> dict[str, list[Outside]]:
    """Return, by device, the events of the flat list that are not in the tree, in time order."""
    inside = {
        (time, memory.devices[row], size)
        for time, row, size in zip(
            memory.time_ns.tolist(), memory.device.tolist(), memory.bytes.tolist(), strict=True
        )
    }
    by_device = defaultdict(list)
    for event in flat:
        # Names of Python calls cannot always be decoded, so those of others are not asked for.
        if event.nbytes() and (index := event.device_index()) >= 0 and event.name() == _NAME:
            name = f"{event.device_type().name.lower()}:{index}"
            outside = Outside(event.start_ns(), event.nbytes(), event.start_thread_id())
            if (outside.time_ns, name, outside.bytes) not in inside:
                by_device[name].append(outside)
    return {name: sorted(several, key=lambda event: event.time_ns) for name, several in by_device.items()}


@dataclass(slots=True)
class _Addresses:
    """Finds the addresses of events that have none.

    Attributes:
        held_at: by address, when models or optimizers were seen to hold it.
        alive: by size, the addresses of live blocks, oldest first.
        size_of: the bytes of each live block.
    """

    held_at: Mapping[int, Sequence[int]]
    alive: dict[int, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    size_of: dict[int, int] = field(default_factory=dict)

    def find(
        self,
        memory: MemoryEvents,
        here: Int64,
        start_blocks: Iterable[tuple[int, int]],
        outside: Sequence[Outside],
    ) -> list[int]:
        """Return an address for each of the events; 0 for a free of no known block.

        Args:
            here: the rows of the device.
            start_blocks: (address, bytes) of what was alive at the start.
            outside: the device's events that the tree lacks, in time order.
        """
        for address, size in start_blocks:
            self._allocate(address, size)
        times = memory.time_ns[here].tolist()
        inside = list(zip(memory.address[here].tolist(), memory.bytes[here].tolist(), strict=True))
        later: dict[int, list[int]] = defaultdict(list)
        for index, (address, _) in enumerate(inside):
            later[address].append(index)
        addresses, index = [], 0
        for number, event in enumerate(outside):
            while index < len(times) and times[index] <= event.time_ns:
                address, size = inside[index]
                self._free(address)
                if size > 0:
                    self._allocate(address, size)
                index += 1
            if event.bytes > 0:
                addresses.append(number + 1)
                self._allocate(number + 1, event.bytes)
            else:
                addresses.append(self._freed(event, index, times, inside, later))
        return addresses

    def _freed(
        self,
        event: Outside,
        index: int,
        times: Sequence[int],
        inside: Sequence[tuple[int, int]],
        later: Mapping[int, Sequence[int]],
    ) -> int:
        soonest, address = len(times), 0
        open_ended: list[int] = []
        for candidate in self.alive[-event.bytes]:
            indices = later.get(candidate, ())
            following = bisect_right(indices, index - 1)
            if following == len(indices):
                open_ended.append(candidate)
            elif (
                (again := indices[following]) < soonest
                and inside[again][1] > 0
                and not self._is_held(candidate, event.time_ns, times[again])
            ):
                soonest, address = again, candidate
        if not address and open_ended:
            free = [candidate for candidate in open_ended if candidate not in self.held_at]
            address = (free or open_ended)[-1]
        self._free(address)
        return address

    def _is_held(self, address: int, after: int, before: int) -> bool:
        times = self.held_at.get(address, ())
        following = bisect_right(times, after)
        return following < len(times) and times[following] < before

    def _allocate(self, address: int, size: int) -> None:
        self.size_of[address] = size
        self.alive[size][address] = None

    def _free(self, address: int) -> None:
        size = self.size_of.pop(address, None)
        if size is not None:
            del self.alive[size][address]


def _merged(
    memory: MemoryEvents, row: int, outside: Sequence[Outside], addresses: Sequence[int]
) -> MemoryEvents:
    """Return the events with those of one device added, whose counters follow from the events around them."""
    here = np.flatnonzero(memory.device == row)
    time = np.array([event.time_ns for event in outside], np.int64)
    size = np.array([event.bytes for event in outside], np.int64)
    before = np.searchsorted(memory.time_ns[here], time, side="right") - 1
    first = int(memory.total[here[0]] - memory.bytes[here[0]])
    levels = np.where(before >= 0, memory.total[here[before]], first - int(size[before < 0].sum()))
    since = np.cumsum(size)
    starts = np.searchsorted(before, before, side="left")
    return _joined(
        memory,
        time,
        address=np.array(addresses, np.uint64),
        bytes=size,
        total=levels + since - (since - size)[starts],
        reserved=memory.reserved[here[np.maximum(before, 0)]],
        device=np.full(len(time), row),
        thread=np.array([event.thread for event in outside], np.int64),
    )
