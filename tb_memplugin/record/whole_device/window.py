"""What fills the whole devices at the start, the peak and the end of a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.steps.counters import resident_memory
from tb_memplugin.record.whole_device.card import CardMemory, cards_memory, with_private_pools
from tb_memplugin.record.whole_device.host import HostMemory, host_memory
from tb_memplugin.trace import MemoryTrace, Moment
from tb_memplugin.trace.counters import DevicePart, WholeDevice, parts_of


@dataclass(frozen=True, slots=True)
class WholeReading:
    """All devices at one moment.

    Attributes:
        cards: by device name.
        host: the CPU's memory; None where there is no /proc of Linux.
        highest: the most that was resident since the process began, None if not known.
    """

    cards: Mapping[str, CardMemory]
    host: HostMemory | None = None
    highest: int | None = None


def read_whole(*, children: bool, segments: Iterable[Mapping[str, Any]] = ()) -> WholeReading:
    """Return what fills all devices now.

    Args:
        children: whether to read the memory of this process's children, which takes up to 50 ms.
        segments: those of CUDA's allocator, as far as they are in private pools.
    """
    host = highest = None
    with suppress(OSError, KeyError, ValueError, MemPluginError):
        host = host_memory(children=children)
        highest = resident_memory().since_start()[1]
    return WholeReading(with_private_pools(cards_memory(), segments), host, highest)


def whole_devices(
    start: WholeReading | None, end: WholeReading | None, trace: MemoryTrace
) -> tuple[WholeDevice, ...]:
    """Return what filled each device of a trace, as far as it was read.

    Args:
        start, end: the readings at the window's start and end, None where nothing was read.
    """
    return tuple(filled for row in range(len(trace.devices)) for filled in _of_device(row, start, end, trace))


def _of_device(
    row: int, start: WholeReading | None, end: WholeReading | None, trace: MemoryTrace
) -> Iterator[WholeDevice]:
    name = trace.devices[row].name
    bounds = {
        moment: filled
        for moment, reading in ((Moment.START, start), (Moment.END, end))
        if reading is not None and (filled := _at(reading, name, row, moment)) is not None
    }
    peak = None
    if start is not None and end is not None:
        peak = _host_peak(row, start, end) if name == "cpu" else _card_peak(row, [*bounds.values()], trace)
    yield from sorted([*bounds.values(), *([peak] if peak else [])], key=lambda filled: filled.moment)


def _at(reading: WholeReading, name: str, row: int, moment: Moment) -> WholeDevice | None:
    if name == "cpu":
        host = reading.host
        parts = parts_of(host.total, host.parts) if host is not None else None
        return WholeDevice(row, moment, moment, parts, host.is_limit) if host and parts else None
    card = reading.cards.get(name)
    return WholeDevice(row, moment, moment, parts_of(card.total, card.parts)) if card is not None else None


def _host_peak(row: int, start: WholeReading, end: WholeReading) -> WholeDevice | None:
    """Return the host when most of the process was resident; None if that was not in this window.

    The system keeps the highest value since the process began. If it rose, the new one is of this window.
    """
    if end.host is None or start.highest is None or end.highest is None or end.highest <= start.highest:
        return None
    parts = parts_of(end.host.total, {DevicePart.RESIDENT: end.highest})
    return WholeDevice(row, Moment.PEAK, Moment.PEAK, parts, end.host.is_limit)


def _card_peak(row: int, read: list[WholeDevice], trace: MemoryTrace) -> WholeDevice | None:
    """Return a card at the peak of the trace: PyTorch's bytes of then, the rest from the nearest reading.

    A reading of which the rest does not leave enough for PyTorch's bytes is of another time.
    """
    live, reserved = trace.live(row), trace.reserved(row)
    if reserved is None or not len(trace.events):
        return None
    at = int(np.argmax(live))
    first, last = trace.steps[0].start_ns, trace.steps[-1].end_ns
    is_late = at > 0 and 2 * int(trace.events.time_ns[at - 1]) > first + last
    for filled in reversed(read) if is_late else read:
        other_parts = {part: size for part, size in filled.parts if part not in _AT_PEAK}
        free = filled.total - sum(other_parts.values()) - int(reserved[at])
        if free >= 0:
            parts: dict[DevicePart, int] = {
                DevicePart.ALLOCATED: int(live[at]),
                DevicePart.CACHED: int(reserved[at] - live[at]),
                **other_parts,
                DevicePart.FREE: free,
            }
            return WholeDevice(row, Moment.PEAK, filled.moment, parts_of(filled.total, parts))
    return None


_AT_PEAK = {
    *(DevicePart.REQUESTED, DevicePart.ROUNDING, DevicePart.ALLOCATED, DevicePart.CACHED),
    *(DevicePart.PRIVATE_POOLS, DevicePart.FREE),
}
"""The parts of a card that follow from the trace, or from the others."""
