"""What counters other than the profile's events say of a window's live bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import numpy as np

from tb_memplugin.record.profiler.memory_events import MemoryEvents, misses
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.record.whole_device.card import COUNTERS, highest_between
from tb_memplugin.trace import Cause, Counter, CounterReading, Moment


def counter_readings(
    window: Window,
    memory: MemoryEvents,
    devices: Sequence[str],
    not_traced: Mapping[str, int],
    unseen: int,
    freed: int = 0,
) -> tuple[CounterReading, ...]:
    """Return the readings of each device's counter at the start, peak and end of a window.

    Args:
        not_traced: by device, the bytes of storages that were seen in use, but not allocated.
        unseen: the CPU's bytes that are alive at the end, and that the window does not have. They may be in
            `not_traced`, too.
        freed: the CPU's bytes that count to the end, but that other threads have perhaps freed.
    """
    readings: list[CounterReading] = []
    for device, name in enumerate(devices):
        if name == "cpu" and window.counted is not None:
            readings += window.counted.readings(device, _foreign(window))
        elif counted := list(_of_allocator(device, name, window, memory)):
            readings += counted
        else:
            used, at_end = (
                (Cause.NOT_TRACED, not_traced.get(name, 0)),
                (Cause.UNSEEN, unseen * (name == "cpu")),
            )
            still_counted = Cause.STILL_COUNTED, -freed * (name == "cpu")
            causes = {
                Moment.START: (),
                Moment.PEAK: (used,),
                Moment.END: (max(used, at_end, key=itemgetter(1)), still_counted),
            }
            readings += (
                CounterReading(device, moment, Counter.SEEN, causes=tuple(filter(itemgetter(1), found)))
                for moment, found in causes.items()
            )
    return tuple(readings)


def _of_allocator(device: int, name: str, window: Window, memory: MemoryEvents) -> Iterator[CounterReading]:
    """Yield what an allocator counted at the window's start and end, and the highest that any reading had.

    Each event has the counter after it. If the events explain all of its changes, none of its values is
    missing; else the highest is a lower bound, unless the allocator itself says that it is not.
    """
    before, after = window.levels_at_start, window.levels_at_stop
    here = np.flatnonzero(memory.device == memory.devices.index(name)) if name in memory.devices else None
    for counter in COUNTERS:
        if (name, counter) not in before or (name, counter) not in after:
            continue
        start, end = before[name, counter], after[name, counter]
        highest, is_exact = highest_between(start, end)
        if counter is Counter.ALLOCATED and here is not None and not is_exact:
            highest = max(highest, int(memory.total[here].max()))
            is_exact = not misses(memory, memory.devices.index(name))
        yield CounterReading(device, Moment.START, counter, start.current)
        yield CounterReading(device, Moment.PEAK, counter, highest, at_least=not is_exact)
        yield CounterReading(device, Moment.END, counter, end.current)


def _foreign(window: Window) -> int:
    """Return the bytes of the start state that the CPU's allocator did not allocate."""
    listed = {address for name, address, _ in window.blocks if name == "cpu"}
    return sum(
        sighting.bytes
        for sighting in window.start
        if sighting.device == "cpu" and sighting.address not in listed
    )
