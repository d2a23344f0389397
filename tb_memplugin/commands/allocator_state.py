"""The JSON form of what `tb-memplugin allocator` shows of a device, with events counted on the device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from tb_memplugin.analysis.allocator import PoolState
from tb_memplugin.analysis.allocator_state import DeviceState
from tb_memplugin.analysis.oom import OomReport
from tb_memplugin.analysis.segments import SegmentState
from tb_memplugin.commands.event_numbers import own_number
from tb_memplugin.exports.json import parts_json
from tb_memplugin.trace import MemoryTrace

OF_FRAGMENTATION = ("unused", "split", "free_bytes", "largest_free_bytes")
OF_BLOCK = ("address", "state", "bytes", "extent_bytes")
"""The fields that JSON has of each."""


def number(state: DeviceState, event: int) -> int:
    """Return an event's number, counted on the state's device."""
    return own_number(state.trace, state.device, event)


def last_event_of(trace: MemoryTrace, device: int) -> int:
    """Return the index of a device's last event, -1 if it has none."""
    own = np.flatnonzero(trace.events.device == device)
    return int(own[-1]) if len(own) else -1


def state_json(state: DeviceState, blocks: bool) -> dict[str, Any]:
    """Return the state of a device's allocator for JSON; events are counted on their device."""
    return {
        "device": state.name,
        "event": number(state, state.event),
        "allocated_bytes": state.allocated_bytes,
        "pending_bytes": state.pending_bytes,
        "active_bytes": state.active_bytes,
        "rounded_bytes": state.rounded_bytes,
        "rounded_exact": state.rounded_exact,
        "reserved_bytes": state.reserved_bytes,
        "peak_reserved_bytes": state.peak_reserved_bytes,
        "peak": {**asdict(state.peak), "event": number(state, state.peak.event)},
        "fragmentation": {field: getattr(state.fragmentation, field) for field in OF_FRAGMENTATION},
        "pools": [pool_json(pool, state.rounded_bytes is not None) for pool in state.pools],
        "segments": None
        if state.segments is None
        else [segment_json(segment, blocks) for segment in state.segments],
        "free_blocks": [
            {"from_bytes": lowest, "count": count, "bytes": size} for lowest, count, size in state.free_blocks
        ],
        "ooms": [oom_json(oom, number(state, oom.event)) for oom in state.ooms],
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
