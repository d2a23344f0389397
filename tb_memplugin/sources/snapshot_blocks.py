"""The final state in a memory snapshot: reserved bytes and live blocks of every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tb_memplugin.sources.snapshot_entries import MOST_BYTES, addresses, whole_numbers
from tb_memplugin.trace.tables import Int64, UInt64

LIVE_STATES = frozenset({"active_allocated", "active_pending_free", "active_awaiting_free"})
"""A block whose free waits for another stream is still live. The third is in PyTorch's docstring only."""

STATES = LIVE_STATES | {"inactive"}


@dataclass(slots=True)
class FinalState:
    """One device when the snapshot was taken.

    `reserved`: bytes, the sum of all segments' `total_size`. `address`, `bytes`: the live blocks, with
    REQUESTED bytes. `faults`: what made no sense, and how often.
    """

    reserved: int
    address: UInt64
    bytes: Int64
    faults: dict[str, int]


@dataclass(slots=True)
class _Device:
    reserved: int = 0
    address: list[int] = field(default_factory=list)
    requested: list[int] = field(default_factory=list)
    rounded: list[int] = field(default_factory=list)
    disagree: int = 0
    without_request: int = 0
    foreign_states: int = 0


def final_states(segments: Sequence[dict[str, Any]]) -> dict[int, FinalState]:
    """The final state of each device that has segments.

    Blocks of old eras have no address: they lie in the segment one behind the other, without gaps.
    Where no requested size is told (PyTorch before 2.0), the newest `history` entry has it as
    `real_size`; where that is absent too, the rounded size stands in and is counted as a fault.

    Args:
        segments: as PyTorch writes them (schema: docstring of `torch.cuda.memory._snapshot`).

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: a field is absent or of a wrong type.
    """
    shared = len(segments) - len({id(segment["blocks"]) for segment in segments if segment["blocks"]})
    if shared > sum(not segment["blocks"] for segment in segments):
        raise ValueError("segments share one list of blocks")
    devices: dict[int, _Device] = {}
    for segment in segments:
        number = segment["device"]
        if type(number) is not int or number < 0:
            raise ValueError(f"the device of a segment is {str(number)[:80]!r}")
        _add(devices.setdefault(number, _Device()), segment)
    return {number: _columns(device) for number, device in sorted(devices.items())}


def _add(device: _Device, segment: dict[str, Any]) -> None:
    device.reserved += segment["total_size"]
    at: int = segment["address"]
    before = len(device.requested)
    for block in segment["blocks"]:
        at = block.get("address", at)
        state, size = block["state"], block["size"]
        if state in LIVE_STATES:
            device.address.append(at)
            device.rounded.append(size)
            device.requested.append(_requested(device, block))
        elif state not in STATES:
            device.foreign_states += 1
        at += size
    told = segment.get("requested_size")
    device.disagree += told is not None and told != sum(device.requested[before:])


def _requested(device: _Device, block: dict[str, Any]) -> int:
    size = block.get("requested_size")
    if size is None and block.get("history"):
        size = block["history"][0].get("real_size")
    if size is None:
        device.without_request += 1
        size = block["size"]
    return int(size) if type(size) is int else size  # another type is refused with the whole column


def _columns(device: _Device) -> FinalState:
    address, size = addresses(device.address), whole_numbers(device.requested)
    rounded = whole_numbers(device.rounded)
    total = float(np.sum(np.abs(size), dtype=np.float64))
    if type(device.reserved) is not int or not 0 <= device.reserved < MOST_BYTES or total >= MOST_BYTES:
        raise OverflowError("the segments sum to no possible size")
    order = np.argsort(address)
    # Addresses are compared by distance: a sum near 2**64 would wrap.
    gap = np.diff(address[order])
    overlap = gap < np.maximum(rounded[order][:-1], 0).astype(np.uint64)
    faults = {
        "live blocks have a negative size; counted as 0": int(np.count_nonzero(size < 0)),
        "live blocks overlap": int(np.count_nonzero(overlap)),
        "segments do not tell the sum of their blocks' requested sizes": device.disagree,
        "blocks are in an unknown state; taken as free": device.foreign_states,
        "live blocks tell no requested size; their rounded size is used": device.without_request,
    }
    return FinalState(device.reserved, address, np.maximum(size, 0), faults)
