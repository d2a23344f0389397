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
    seen: Iterable[Sighting],
    *,
    has_steps: bool,
) -> MemoryEvents:
    """Return the events of the tree with those that torch left out of it.

    A free gets the address of a live block of its size: one whose address is allocated again soonest and
    that nobody was seen to hold until then, else the youngest that nobody holds. An alloc gets an address
    below the first page.

    Args:
        memory: the events of the tree.
        flat: returns `prof.profiler.kineto_results.events()`; called only if events may be missing.
        blocks: (device, address, bytes) of what was allocated at the window's start.
        seen: parameters, gradients and optimizer state that were seen in the window.
        has_steps: whether the profile has steps, so that most events are inside a range.
    """
    at_start = list(blocks)
    rows = [row for row, name in enumerate(memory.devices) if name not in ("cpu", SHARED)]
    if not any(not has_steps or misses(memory, row) or _freed_before(memory, row, at_start) for row in rows):
        return memory
    found = _outside(memory, flat())
    held: dict[tuple[str, int], list[int]] = defaultdict(list)
    for one in seen:
        held[one.device, one.address].append(one.time_ns)
    for row in rows:
        name = memory.devices[row]
        if outside := found.get(name):
            here = np.flatnonzero(memory.device == row)
            search = _Addresses(
                {place: sorted(when) for (where, place), when in held.items() if where == name}
            )
            known = [(place, size) for where, place, size in at_start if where == name]
            addresses = search.find(memory, here, known, outside)
            memory = _merged(memory, row, outside, addresses)
    return memory


def _freed_before(memory: MemoryEvents, row: int, blocks: Sequence[tuple[str, int, int]]) -> bool:
    """Whether the device's counter had changed when its first event came."""
    known = [size for name, _, size in blocks if name == memory.devices[row]]
    first = np.argmax(memory.device == row)
    return bool(known) and sum(known) != int(memory.total[first] - memory.bytes[first])


def _outside(memory: MemoryEvents, flat: Iterable[Any]) -> dict[str, list[Outside]]:
    """Return, by device, the events of the flat list that are not in the tree, in time order."""
    inside = {
        (time, memory.devices[row], size)
        for time, row, size in zip(
            memory.time_ns.tolist(), memory.device.tolist(), memory.bytes.tolist(), strict=True
        )
    }
    found = defaultdict(list)
    for event in flat:
        # Names of Python calls cannot always be decoded, so those of others are not asked for.
        if event.nbytes() and (index := event.device_index()) >= 0 and event.name() == _NAME:
            name = f"{event.device_type().name.lower()}:{index}"
            one = Outside(event.start_ns(), event.nbytes(), event.start_thread_id())
            if (one.time_ns, name, one.bytes) not in inside:
                found[name].append(one)
    return {name: sorted(several, key=lambda one: one.time_ns) for name, several in found.items()}


@dataclass(slots=True)
class _Addresses:
    """Finds the addresses of events that have none.

    Attributes:
        held: by address, when models or optimizers were seen to hold it.
        alive: by size, the addresses of live blocks, oldest first.
        size_of: the bytes of each live block.
    """

    held: Mapping[int, Sequence[int]]
    alive: dict[int, dict[int, None]] = field(default_factory=lambda: defaultdict(dict))
    size_of: dict[int, int] = field(default_factory=dict)

    def find(
        self, memory: MemoryEvents, here: Int64, known: Iterable[tuple[int, int]], outside: Sequence[Outside]
    ) -> list[int]:
        """Return an address for each of the events; 0 for a free of no known block.

        Args:
            memory: all events of the tree.
            here: the rows of the device.
            known: (address, bytes) of what was alive at the start.
            outside: the device's events that the tree lacks, in time order.
        """
        for address, size in known:
            self._born(address, size)
        times = memory.time_ns[here].tolist()
        told = list(zip(memory.address[here].tolist(), memory.bytes[here].tolist(), strict=True))
        later: dict[int, list[int]] = defaultdict(list)
        for place, (address, _) in enumerate(told):
            later[address].append(place)
        addresses, place = [], 0
        for number, one in enumerate(outside):
            while place < len(times) and times[place] <= one.time_ns:
                address, size = told[place]
                self._died(address)
                if size > 0:
                    self._born(address, size)
                place += 1
            if one.bytes > 0:
                addresses.append(number + 1)
                self._born(number + 1, one.bytes)
            else:
                addresses.append(self._freed(one, place, times, told, later))
        return addresses

    def _freed(
        self,
        one: Outside,
        place: int,
        times: Sequence[int],
        told: Sequence[tuple[int, int]],
        later: Mapping[int, Sequence[int]],
    ) -> int:
        soonest, address = len(times), 0
        open_ended: list[int] = []
        for candidate in self.alive[-one.bytes]:
            places = later.get(candidate, ())
            following = bisect_right(places, place - 1)
            if following == len(places):
                open_ended.append(candidate)
            elif (
                (again := places[following]) < soonest
                and told[again][1] > 0
                and not self._is_held(candidate, one.time_ns, times[again])
            ):
                soonest, address = again, candidate
        if not address and open_ended:
            free = [candidate for candidate in open_ended if candidate not in self.held]
            address = (free or open_ended)[-1]
        self._died(address)
        return address

    def _is_held(self, address: int, after: int, before: int) -> bool:
        times = self.held.get(address, ())
        following = bisect_right(times, after)
        return following < len(times) and times[following] < before

    def _born(self, address: int, size: int) -> None:
        self.size_of[address] = size
        self.alive[size][address] = None

    def _died(self, address: int) -> None:
        size = self.size_of.pop(address, None)
        if size is not None:
            del self.alive[size][address]


def _merged(
    memory: MemoryEvents, row: int, outside: Sequence[Outside], addresses: Sequence[int]
) -> MemoryEvents:
    """Return the events with those of one device added, whose counters follow from the events around them."""
    here = np.flatnonzero(memory.device == row)
    time = np.array([one.time_ns for one in outside], np.int64)
    size = np.array([one.bytes for one in outside], np.int64)
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
        "thread": np.array([one.thread for one in outside], np.int64),
    }
    order = np.argsort(np.concatenate((memory.time_ns, time)), kind="stable")
    columns: dict[str, Any] = {}
    for name, new in added.items():
        old = getattr(memory, name)
        columns[name] = np.concatenate((old, new.astype(old.dtype)))[order]
    return replace(memory, **columns)
