"""One allocation: the live bytes before and after it was allocated or freed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.analysis.why import why
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.trace import MemoryTrace

Action = Literal["alloc", "free"]

_ALLOCATION = re.compile(r"(?:0x|b(?=[0-9a-f]{12}))?([0-9a-f]{1,16})(?:_([0-9]{1,12}))?", re.IGNORECASE)
"""`ADDR[_VERSION]`. A leading `b`, as PyTorch's memory_viz writes (`b7f3a5c000000_0`), counts as a prefix if
12 or more hexadecimal digits follow: addresses do not have 13."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One block and its lifetime. Bytes; epoch nanoseconds; events are indices.

    `version` counts the blocks at this address of the device, from 0; a block that was alive before the
    trace is the first. `born_*` are None if the block was alive before the trace, `freed_*` if it outlived
    it. `rounded_bytes` is None if not known. `frames` is the call stack, innermost frame first.
    `why` says why it has its category.
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
    why: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The live bytes of a device before and after the event that allocated or freed a block."""

    device: str
    event: int
    bytes_before: int
    bytes_after: int
    allocation: Allocation


def read_allocation(text: str) -> tuple[int, int]:
    """Read address and version from `ADDR[_VERSION]`, the address in hexadecimal; the default version is 0.

    Raises:
        MemPluginError: the text does not have this form.
    """
    parts = _ALLOCATION.fullmatch(text.strip())
    if parts is None:
        raise MemPluginError(
            f"{text[:80]!r} is not an allocation.",
            where="--allocation",
            fix=(
                "Give an address in hexadecimal, such as 0x7f3a5c000000, or 0x7f3a5c000000_2 for the third "
                "block at that address."
            ),
        )
    return int(parts[1], 16), int(parts[2] or 0)


def usage(
    trace: MemoryTrace, address: int, version: int = 0, action: Action = "alloc", device: str | None = None
) -> Usage:
    """Return the live bytes before and after a block was allocated or freed.

    Args:
        trace: any trace that has addresses.
        address: the block's address.
        version: which of the blocks at that address, counted from 0 on each device.
        action: "alloc" or "free".
        device: a device's name; None takes the first that has such a block.

    Raises:
        NotRecordedError: no such device or block, or the block's allocation or free is not in the trace.
    """
    devices = trace.device_rows(device)
    blocks = trace.allocations
    at_address = np.flatnonzero(blocks.address == np.uint64(address & 0xFFFF_FFFF_FFFF_FFFF))
    of_device = [at_address[blocks.device[at_address] == row].tolist() for row in devices]
    rows = next((rows for rows in of_device if 0 <= version < len(rows)), None)
    if rows is None or address <= 0:
        raise _absent(address, version, max(map(len, of_device), default=0) if address > 0 else 0)
    row = rows[version]
    event = int(blocks.born[row]) if action == "alloc" else int(blocks.freed[row])
    if event < 0 or event >= len(trace.events):
        state = "alive before the trace began" if event < 0 else "still alive when the trace ended"
        other = "free" if action == "alloc" else "alloc"
        raise NotRecordedError(
            f"The {action} of {address:#x}_{version} is not in the trace: the block was {state}.",
            where=trace.source,
            fix=f"Choose its {other}, or another version.",
        )
    live = trace.live(int(blocks.device[row]))
    return Usage(
        device=trace.devices[int(blocks.device[row])].name,
        event=event,
        bytes_before=int(live[event]),
        bytes_after=int(live[event + 1]),
        allocation=_allocation(trace, row, version),
    )


def _absent(address: int, version: int, versions: int) -> NotRecordedError:
    fix = "Take an address from the trace, and write it with 0x in front."
    if versions:
        fix = f"{address:#x} has versions 0 to {versions - 1}."
    return NotRecordedError(f"There is no allocation {address:#x}_{version}.", where="allocation", fix=fix)


def _allocation(trace: MemoryTrace, row: int, version: int) -> Allocation:
    blocks, time = trace.allocations, trace.events.time_ns
    born, freed, rounded = int(blocks.born[row]), int(blocks.freed[row]), int(blocks.rounded[row])
    return Allocation(
        address=int(blocks.address[row]),
        version=version,
        bytes=int(blocks.bytes[row]),
        rounded_bytes=rounded if rounded >= 0 else None,
        born_event=born if born >= 0 else None,
        born_ns=int(time[born]) if born >= 0 else None,
        freed_event=freed if freed < len(time) else None,
        freed_ns=int(time[freed]) if freed < len(time) else None,
        frames=trace.stack(int(blocks.stack[row])),
        why=why(trace, row),
    )
