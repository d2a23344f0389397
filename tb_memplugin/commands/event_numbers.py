"""Event numbers as commands show them: counted on each device from 0, as in a snapshot's device_traces."""

from __future__ import annotations

import numpy as np

from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import MemoryTrace


def own_number(trace: MemoryTrace, device: int, event: int) -> int:
    """Return the number, counted on a device, of its last event at or before an event; -1 if there is none.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        event: index into `trace.events`.
    """
    return int(np.count_nonzero(trace.events.device[: event + 1] == device)) - 1


def event_numbered(trace: MemoryTrace, device: int, number: int) -> int:
    """Return the index into `trace.events` of a device's event, by its number; -1 is before the first event.

    Raises:
        NotRecordedError: the device has no event with this number.
    """
    own = np.flatnonzero(trace.events.device == device)
    if number == -1:
        return -1
    if not 0 <= number < len(own):
        raise NotRecordedError(
            f"{trace.devices[device].name} has no event {number}.",
            where=trace.source,
            fix=f"Give a number from -1 (before the first event) to {len(own) - 1}.",
        )
    return int(own[number])
