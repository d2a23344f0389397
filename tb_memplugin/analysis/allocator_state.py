"""The whole state of one device's allocator after an event, and the requests that failed on it."""

from __future__ import annotations

from dataclasses import dataclass

from tb_memplugin.analysis.allocator import (
    AllocatorHistory,
    Fragmentation,
    PeakSplit,
    PoolState,
    peak_split,
)
from tb_memplugin.analysis.oom import OomReport, failed_requests, oom_reports
from tb_memplugin.analysis.segments import SegmentState, free_histogram, segments_of
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import AnalysisResult

MOST_OOMS = 100
"""How many failed requests of a device are reported; a job that retries in a loop has thousands."""


@dataclass(frozen=True, slots=True)
class DeviceState(AnalysisResult):
    """A device's allocator after an event (an index into the trace's events), and its failed requests.

    `allocated_bytes` are requested bytes without pending blocks. `rounded_bytes` is what the allocator set
    aside for blocks, None for a device without a caching allocator; unless `rounded_exact`, a part of it was
    computed by the rounding rule. `ooms` are the last `MOST_OOMS` of all `failed_requests`. `segments` is
    None if the source does not record them. `free_blocks`: (least size, count, bytes) of free stretches.
    """

    trace: MemoryTrace
    device: int
    event: int
    allocated_bytes: int
    pending_bytes: int
    active_bytes: int
    rounded_bytes: int | None
    rounded_exact: bool
    reserved_bytes: int | None
    peak_reserved_bytes: int | None
    peak: PeakSplit
    fragmentation: Fragmentation
    pools: tuple[PoolState, ...]
    segments: tuple[SegmentState, ...] | None
    free_blocks: tuple[tuple[int, int, int], ...]
    ooms: tuple[OomReport, ...]
    failed_requests: int

    @property
    def name(self) -> str:
        """The device's name."""
        return self.trace.devices[self.device].name


def device_state(trace: MemoryTrace, device: int, event: int) -> DeviceState:
    """Return the state of a device's allocator after an event.

    Args:
        event: index into `trace.events`; -1 is before the first.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    history = AllocatorHistory(trace, device)
    memory, placed = history.levels, history.placement.at(event)
    pools, has_segments = history.pools(trace, event, placed), history.knows_segments
    failed = failed_requests(trace, device)
    return DeviceState(
        trace=trace,
        device=device,
        event=event,
        allocated_bytes=int(memory.allocated[event + 1]),
        pending_bytes=int(memory.pending[event + 1]),
        active_bytes=int(memory.active[event + 1]),
        rounded_bytes=sum(pool.rounded_bytes for pool in pools)
        if trace.devices[device].has_reserved
        else None,
        rounded_exact=all(pool.rounded_exact for pool in pools),
        reserved_bytes=None if memory.reserved is None else int(memory.reserved[event + 1]),
        peak_reserved_bytes=None if memory.reserved is None else int(memory.reserved.max()),
        peak=peak_split(trace, device),
        fragmentation=history.fragmentation(event, placed),
        pools=pools,
        segments=segments_of(trace, placed, history.pending_since <= event) if has_segments else None,
        free_blocks=free_histogram(placed) if has_segments else (),
        ooms=oom_reports(trace, device, failed[-MOST_OOMS:]),
        failed_requests=len(failed),
    )
