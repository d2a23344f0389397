"""Events as people count them: on their own device, from 0, as in a snapshot's device_traces."""

from __future__ import annotations

import numpy as np

from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import MemoryTrace


def own_number(trace: MemoryTrace, device: int, event: int) -> int:
    """The number, among its device's events, of the last one at or before an event; -1 for before the first.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        event: index into `trace.events`.
    """
    return int(np.count_nonzero(trace.events.device[: event + 1] == device)) - 1


def event_numbered(trace: MemoryTrace, device: int, number: int) -> int:
    """The index into `trace.events` of a device's event with this number; -1 stands for before the first.

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
            fix=f"Give a number from -1, before the first, to {len(own) - 1}.",
        )
    return int(own[number])
