"""Allocator events of devices that torch leaves out of the profiler's tree.

The tree's outermost events are those of the CPU (torch: csrc/autograd/profiler_kineto.cpp,
materializeOpEvents). So it lacks an alloc or free of another device if no range or operator is open: between
steps, and anywhere if the profile has no steps. The flat list of events has them, without addresses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tb_memplugin.read.shared_memory import SHARED
from tb_memplugin.record.profiler.memory_events import MemoryEvents, misses
from tb_memplugin.record.storages import Sighting
from tb_memplugin.trace.tables import Int64

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
    none = np.full(len(time), -1, np.int64)
    added = {
        "time_ns": time,
        "address": np.array(addresses, np.uint64),
        "bytes": size,
        "total": levels + since - (since - size)[starts],
        "reserved": memory.reserved[here[np.maximum(before, 0)]],
        "device": np.full(len(time), row),
        "operator": none,
        "node": none,
        "frame": none,
        "thread": np.array([event.thread for event in outside], np.int64),
    }
    order = np.argsort(np.concatenate((memory.time_ns, time)), kind="stable")
    columns: dict[str, Any] = {}
    for name, new in added.items():
        old = getattr(memory, name)
        columns[name] = np.concatenate((old, new.astype(old.dtype)))[order]
    return replace(memory, **columns)
