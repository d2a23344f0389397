"""Statistics of each profiled step on a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Bool


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step on one device. Bytes and epoch nanoseconds.

    Attributes:
        step: the step's number.
        peak_bytes: highest live bytes in the step, the moment of its start included.
        peak_event: index of the event after which the peak was reached; one less than the step's first
            event if that was at its start.
        peak_time_ns: when the peak was reached.
        start_bytes: bytes alive when the profiled *window* began (the same for all its steps).
        entry_bytes: bytes alive when this step began.
        end_bytes: bytes alive when this step ended.
        window_peak_bytes: the highest running sum, at this step's events, of what the source has reported
            since the window began.
        peak_reserved_bytes: highest reserved bytes, including those at the step's start; None if the device
            reserves no memory or it is not known.
        allocated_bytes, allocations: what was allocated in this step.
        stayed_bytes, stayed: what was allocated in this step and alive at its end.
    """

    step: int
    start_ns: int
    end_ns: int
    peak_bytes: int
    peak_event: int
    peak_time_ns: int
    start_bytes: int
    entry_bytes: int
    end_bytes: int
    window_peak_bytes: int
    peak_reserved_bytes: int | None
    allocated_bytes: int
    allocations: int
    stayed_bytes: int
    stayed: int


def step_stats(trace: MemoryTrace, device: int) -> tuple[StepStats, ...]:
    """Return the statistics of every step on one device (a row in `trace.devices`), in time order."""
    return tuple(_stats_of(trace, device, row) for row in range(len(trace.steps)))


def _stats_of(trace: MemoryTrace, device: int, row: int) -> StepStats:
    first, end = trace.step_events(row)
    step = trace.steps[row]
    live, window, reserved = trace.live(device), trace.window(device), trace.reserved(device)
    peak_event = first - 1 + int(np.argmax(live[first : end + 1]))
    reported = window[first + 1 : end + 1][_reported(trace, device, first, end)]
    blocks = trace.allocations
    born_first, born_end = np.searchsorted(blocks.born, (first, end))
    own = blocks.device[born_first:born_end] == device
    size = blocks.bytes[born_first:born_end][own]
    stayed = blocks.freed[born_first:born_end][own] >= end
    return StepStats(
        step=step.number,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        peak_bytes=int(live[peak_event + 1]),
        peak_event=peak_event,
        peak_time_ns=int(trace.events.time_ns[peak_event]) if peak_event >= first else step.start_ns,
        start_bytes=int(live[0]),
        entry_bytes=int(live[first]),
        end_bytes=int(live[end]),
        window_peak_bytes=int(reported.max()) if len(reported) else int(window[first]),
        peak_reserved_bytes=None if reserved is None else int(reserved[first : end + 1].max()),
        allocated_bytes=int(size.sum()),
        allocations=len(size),
        stayed_bytes=int(size[stayed].sum()),
        stayed=int(np.count_nonzero(stayed)),
    )


def _reported(trace: MemoryTrace, device: int, first: int, end: int) -> Bool:
    """Return the mask of the events from first to end that the source reported for a device."""
    kind = trace.events.kind[first:end]
    mask: Bool = (trace.events.device[first:end] == device) & (
        (kind == Kind.ALLOC) | (kind == Kind.FREE_COMPLETED)
    )
    return mask
