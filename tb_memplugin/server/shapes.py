"""JSON objects of docs/http_api.md that several answers contain: statistics, parts, allocations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.moments import LiveAllocation
from tb_memplugin.analysis.reasons import reason_of
from tb_memplugin.proto.metadata_pb2 import DeviceStats
from tb_memplugin.trace import Category

Json = dict[str, Any]

CATEGORIES = tuple(category.key for category in Category)

_STATS = (
    "peak_bytes",
    "peak_time_ns",
    "start_bytes",
    "end_bytes",
    "window_peak_bytes",
    "step_start_ns",
    "step_end_ns",
    "allocated_bytes",
    "allocations",
    "stayed_bytes",
    "stayed",
)


def stats_shape(device: DeviceStats) -> Json:
    """Return STEPSTATS, in bytes and in nanoseconds since the window's epoch."""
    stats = device.stats
    shape: Json = {name: getattr(stats, name) for name in _STATS}
    shape["peak_reserved_bytes"] = reserved_bytes(device)
    shape["capacity_bytes"] = capacity_bytes(device)
    return shape


def reserved_bytes(device: DeviceStats) -> int | None:
    """Return the step's highest reserved bytes, None if the device has no such counter."""
    stats = device.stats
    return stats.peak_reserved_bytes if stats.HasField("peak_reserved_bytes") else None


def capacity_bytes(device: DeviceStats) -> int | None:
    """Return the device's memory in bytes, None if unknown."""
    return device.capacity_bytes if device.HasField("capacity_bytes") else None


def parts_shape(parts: Sequence[Part]) -> list[Json]:
    """Return PARTs, in the given order."""
    return [
        {"key": part.key, "bytes": part.bytes, "count": part.count}
        | ({"categories": part.categories} if part.categories else {})
        for part in parts
    ]


def allocation_shape(block: LiveAllocation, epoch_ns: int) -> Json:
    """Return ALLOCATION; times are nanoseconds since `epoch_ns`."""
    return {
        "bytes": block.bytes,
        "category": block.category.key,
        "module": block.module,
        "operator": block.operator,
        "phase": block.phase.key,
        "name": block.name,
        "born_ns": None if block.born_ns is None else block.born_ns - epoch_ns,
        "freed_ns": None if block.freed_ns is None else block.freed_ns - epoch_ns,
        "address": hex(block.address),
        "why": reason_of(block),
    }
