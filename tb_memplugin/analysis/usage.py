"""One allocation: how much was live before and after it was made, or given back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64

Action = Literal["alloc", "free"]

_ALLOCATION = re.compile(r"(?:0x|b(?=[0-9a-f]{12}))?([0-9a-f]{1,16})(?:_([0-9]{1,12}))?", re.IGNORECASE)
"""Also as PyTorch's memory_viz writes it, `b7f3a5c000000_0`: with 13 digits it would be no address."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block and its life. Bytes; epoch nanoseconds; events are indices.

    `version` counts the blocks that lived at this address of the device, from 0; one that was alive before
    the trace is the first. `born_*` are None if it was alive before the trace, `freed_*` if it outlived
    it. `rounded_bytes` is None if not known. `frames` of its call stack: innermost first.
    """

    address: int
    version: int
    bytes: int
    rounded_bytes: int | None
    born_event: int | None
    born_ns: int | None
    freed_event: int | None
    freed_ns: int | None
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The live bytes of a device around the event at which an allocation was made or given back."""

    device: str
    event: int
    bytes_before: int
    bytes_after: int
    allocation: Allocation


def read_allocation(text: str) -> tuple[int, int]:
    """Address and version from `ADDR[_VERSION]`, the address in hexadecimal; without a version it is 0.

    Raises:
        MemPluginError: the text is no such thing.
    """
    parts = _ALLOCATION.fullmatch(text.strip())
    if parts is None:
        raise MemPluginError(
            f"{text[:80]!r} is no allocation.",
            where="--allocation",
            fix="Give an address in hexadecimal, such as 0x7f3a5c000000, or 0x7f3a5c000000_2 for the third "
            "block that lived there.",
        )
    return int(parts[1], 16), int(parts[2] or 0)


def usage(
    trace: MemoryTrace, address: int, version: int = 0, action: Action = "alloc", device: str | None = None
) -> Usage:
    """The live bytes before and after an allocation was made or given back.

    Args:
        trace: any trace that has addresses.
        address: of the block.
        version: which of the blocks that lived there, counted from 0 on each device.
        action: "alloc" or "free".
        device: a device's name; None takes the first that has such a block.

    Raises:
        NotRecordedError: no such device or block, or its alloc or free is not in the trace.
    """
    devices = range(len(trace.devices)) if device is None else [trace.device_row(device)]
    blocks = trace.allocations
    here = np.flatnonzero(blocks.address == np.uint64(address & 0xFFFF_FFFF_FFFF_FFFF))
    of_device = [here[blocks.device[here] == row].tolist() for row in devices]
    rows = next((rows for rows in of_device if 0 <= version < len(rows)), None)
    if rows is None or address <= 0:
        raise _absent(address, version, max(map(len, of_device), default=0) if address > 0 else 0)
    row = rows[version]
    event = int(blocks.born[row]) if action == "alloc" else int(blocks.freed[row])
    if event < 0 or event >= len(trace.events):
        what = "alive before the trace began" if event < 0 else "still alive when the trace ended"
        other = "free" if action == "alloc" else "alloc"
        raise NotRecordedError(
            f"The {action} of {address:#x}_{version} is not in the trace: the block was {what}.",
            where=trace.source,
            fix=f"Ask for its {other}, or for another version.",
        )
    live = trace.live(int(blocks.device[row]))
    return Usage(
        device=trace.devices[int(blocks.device[row])].name,
        event=event,
        bytes_before=int(live[event]),
        bytes_after=int(live[event + 1]),
        allocation=_allocation(trace, row, version),
    )


def versions(trace: MemoryTrace) -> Int64:
    """How many blocks lived at each allocation's address before it, on its device: int64, (allocations,)."""
    blocks = trace.allocations
    order = np.lexsort((np.arange(len(blocks)), blocks.address, blocks.device))
    address, device = blocks.address[order], blocks.device[order]
    place = np.arange(len(order))
    first = np.append(True, (address[1:] != address[:-1]) | (device[1:] != device[:-1]))[: len(order)]
    found = np.empty(len(order), np.int64)
    found[order] = place - np.maximum.accumulate(np.where(first, place, 0))
    return found


def _absent(address: int, version: int, versions: int) -> NotRecordedError:
    fix = "Take an address from the trace, with 0x before it."
    if versions:
        fix = f"{address:#x} has the versions 0 to {versions - 1}."
    return NotRecordedError(f"There is no allocation {address:#x}_{version}.", where="allocation", fix=fix)


def _allocation(trace: MemoryTrace, row: int, version: int) -> Allocation:
    blocks, time = trace.allocations, trace.events.time_ns
    born, freed, rounded = int(blocks.born[row]), int(blocks.freed[row]), int(blocks.rounded[row])
    stack = int(blocks.stack[row])
    return Allocation(
        address=int(blocks.address[row]),
        version=version,
        bytes=int(blocks.bytes[row]),
        rounded_bytes=rounded if rounded >= 0 else None,
        born_event=born if born >= 0 else None,
        born_ns=int(time[born]) if born >= 0 else None,
        freed_event=freed if freed < len(time) else None,
        freed_ns=int(time[freed]) if freed < len(time) else None,
        frames=trace.stacks[stack] if stack >= 0 else (),
    )
