"""The state of one device that `tb-memplugin allocator` shows, and its JSON form."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tb_memplugin.analysis.allocator import (
    Fragmentation,
    PeakSplit,
    PoolState,
    fragmentation_of,
    knows_segments,
    levels,
    peak_split,
    pools_of,
)
from tb_memplugin.analysis.layout import layout
from tb_memplugin.analysis.oom import OomReport, failed_requests, oom_reports
from tb_memplugin.analysis.segments import SegmentState, free_histogram, segments_at
from tb_memplugin.commands.event_numbers import own_number
from tb_memplugin.exports.json import parts_json
from tb_memplugin.trace import MemoryTrace

OF_FRAGMENTATION = ("unused", "split", "free_bytes", "largest_free_bytes")
OF_BLOCK = ("address", "state", "bytes", "extent_bytes")
"""The fields that JSON has of each."""

MOST_OOMS = 100
"""How many failed requests of a device are reported; a job that retries in a loop has thousands."""


@dataclass(frozen=True, slots=True)
class DeviceState:
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

    def number(self, event: int) -> int:
        """Return an event's number, counted on the device."""
        return own_number(self.trace, self.device, event)


def device_state(trace: MemoryTrace, device: int, event: int) -> DeviceState:
    """Return the state of a device's allocator after an event.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        event: index into `trace.events`; -1 is before the first.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    memory, placed = levels(trace, device), layout(trace, device, event)
    pools = pools_of(trace, device, event, placed)
    known, reserves = knows_segments(trace, device), trace.devices[device].has_reserved
    failed = failed_requests(trace, device)
    return DeviceState(
        trace=trace,
        device=device,
        event=event,
        allocated_bytes=int(memory.allocated[event + 1]),
        pending_bytes=int(memory.pending[event + 1]),
        active_bytes=int(memory.active[event + 1]),
        rounded_bytes=sum(pool.rounded_bytes for pool in pools) if reserves else None,
        rounded_exact=all(pool.rounded_exact for pool in pools),
        reserved_bytes=None if memory.reserved is None else int(memory.reserved[event + 1]),
        peak_reserved_bytes=None if memory.reserved is None else int(memory.reserved.max()),
        peak=peak_split(trace, device),
        fragmentation=fragmentation_of(memory, placed if known else None, event),
        pools=pools,
        segments=segments_at(trace, device, event) if known else None,
        free_blocks=free_histogram(placed) if known else (),
        ooms=oom_reports(trace, device, failed[-MOST_OOMS:]),
        failed_requests=len(failed),
    )


def last_event_of(trace: MemoryTrace, device: int) -> int:
    """Return the index of a device's last event, -1 if it has none."""
    own = np.flatnonzero(trace.events.device == device)
    return int(own[-1]) if len(own) else -1


def state_json(state: DeviceState, blocks: bool) -> dict[str, Any]:
    """Return the state of a device's allocator for JSON; events are counted on their device."""
    return {
        "device": state.name,
        "event": state.number(state.event),
        "allocated_bytes": state.allocated_bytes,
        "pending_bytes": state.pending_bytes,
        "active_bytes": state.active_bytes,
        "rounded_bytes": state.rounded_bytes,
        "rounded_exact": state.rounded_exact,
        "reserved_bytes": state.reserved_bytes,
        "peak_reserved_bytes": state.peak_reserved_bytes,
        "peak": {**asdict(state.peak), "event": state.number(state.peak.event)},
        "fragmentation": {field: getattr(state.fragmentation, field) for field in OF_FRAGMENTATION},
        "pools": [pool_json(pool, state.rounded_bytes is not None) for pool in state.pools],
        "segments": None
        if state.segments is None
        else [segment_json(segment, blocks) for segment in state.segments],
        "free_blocks": [
            {"from_bytes": lowest, "count": count, "bytes": size} for lowest, count, size in state.free_blocks
        ],
        "ooms": [oom_json(oom, state.number(oom.event)) for oom in state.ooms],
    }


def pool_json(pool: PoolState, rounds: bool = True) -> dict[str, Any]:
    """Return a pool for JSON; `rounded_bytes` is null if the device does not round sizes."""
    document = asdict(pool)
    del document["by_rule_bytes"]
    if not rounds:
        document["rounded_bytes"] = None
    return {**document, "active_bytes": pool.active_bytes, "rounded_exact": pool.rounded_exact}


def segment_json(segment: SegmentState, blocks: bool) -> dict[str, Any]:
    """Return a segment for JSON, with its blocks if `blocks`."""
    free = [block.extent_bytes for block in segment.blocks if block.state == "free"]
    document: dict[str, Any] = {
        "address": segment.address,
        "bytes": segment.bytes,
        "pool": segment.pool,
        "stream": segment.stream,
        "expandable": bool(segment.expandable),
        "active_blocks": len(segment.blocks) - len(free),
        "active_bytes": sum(block.bytes for block in segment.blocks),
        "free_bytes": sum(free),
        "largest_free_bytes": max(free, default=0),
    }
    if blocks:
        document["blocks"] = [
            {field: getattr(block, field) for field in OF_BLOCK} for block in segment.blocks
        ]
    return document


def oom_json(oom: OomReport, event: int) -> dict[str, Any]:
    """Return a failed request for JSON; `event` is its number on the device."""
    document = asdict(oom)
    document.update(
        event=event,
        parts=parts_json(oom.parts),
        stacks=parts_json(oom.stacks),
        pools=[pool_json(pool) for pool in oom.pools],
    )
    return document
