"""Single allocations: search, order, lifetimes, what a stretch turned over, the use at one, largest bands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.columns import extremes
from tb_memplugin.analysis.moments import tensor_name
from tb_memplugin.analysis.reasons import why
from tb_memplugin.analysis.sums import levels_of_groups
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.frames import distinct
from tb_memplugin.trace.indexes import Alive
from tb_memplugin.trace.replay import address_order
from tb_memplugin.trace.result import AnalysisResult
from tb_memplugin.trace.tables import Bool, Int32, Int64, Rows, UInt64

SORTS = ("bytes", "born", "lifetime", "address")
_ADDRESS = re.compile(r"(?:0x)?(?P<digits>[0-9a-f]{3,16})(?:_(?P<version>\d{1,9}))?")


def versions(trace: MemoryTrace) -> Int64:
    """Return, for each allocation, how many blocks lived at its address on its device before it: int64."""
    blocks = trace.allocations
    order = address_order(blocks.address)
    order = order[np.argsort(blocks.device[order], kind="stable")]
    address, device = blocks.address[order], blocks.device[order]
    new = np.ones(len(order), bool)
    new[1:] = (address[1:] != address[:-1]) | (device[1:] != device[:-1])
    starts = np.flatnonzero(new)
    version = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    versions_by_row = np.empty(len(order), np.int64)
    versions_by_row[order] = version
    return versions_by_row


def rows_with_text(trace: MemoryTrace, rows: Rows, text: str, version: Int64) -> Rows:
    """Return the rows in which a text occurs: in a frame, a name, a tensor or an address.

    Args:
        text: what to look for, ignoring case. It may be the beginning of an address, or an address with its
            version (`0x…_2`).
    """
    if not text.strip():
        return rows
    needle = text.strip().casefold()
    blocks = trace.allocations
    mask = _has(blocks.stack[rows], [any(needle in text for text in stack) for stack in _lowered(trace)])
    for column, names in (
        (blocks.module, [module.key for module in trace.modules]),
        (blocks.operator, trace.operators),
        (blocks.label, trace.labels),
        (blocks.tensor, list(map(str, trace.tensors))),
    ):
        mask |= _has(column[rows], [needle in name.casefold() for name in names])
    categories = [needle in each.key or needle in each.key.replace("_", " ") for each in Category]
    mask |= _has(blocks.category[rows], categories)
    address = _ADDRESS.fullmatch(needle)
    if address:
        mask |= _at(blocks.address[rows], version[rows], address)
    return rows[mask]


def _lowered(trace: MemoryTrace) -> list[tuple[str, ...]]:
    lowered = {text: text.casefold() for text in distinct(trace.stacks)}
    return [tuple(map(lowered.__getitem__, stack)) for stack in trace.stacks]


def _has(column: npt.NDArray[np.integer], table: list[bool]) -> Bool:
    """Look up each row in a table of booleans; -1 (no row) gives False."""
    mask: Bool = np.array([*table, False])[column]
    return mask


def _at(address: UInt64, version: Int64, wanted: re.Match[str]) -> Bool:
    """Return the mask of addresses that begin with the wanted digits; with a version, of that block only."""
    digits = wanted["digits"].lstrip("0") or "0"
    length = np.searchsorted(16 ** np.arange(1, 16, dtype=np.uint64), address, side="right") + 1
    shift = length - len(digits)
    shifted = address >> (4 * np.maximum(shift, 0)).astype(np.uint64)
    mask: Bool = (shift >= 0) & (shifted == np.uint64(int(digits, 16)))
    if wanted["version"] is not None:
        mask &= (shift == 0) & (version == int(wanted["version"]))
    return mask


def in_order(trace: MemoryTrace, rows: Rows, sort: str) -> Rows:
    """Sort rows by `bytes`, `born`, `lifetime` or `address`, largest first; `-bytes`, ... smallest first.

    Equal rows stay in order of allocation. A block that was alive before the trace, or outlived it, has the
    lifetime that lies within the trace.

    Raises:
        MemPluginError: `sort` is none of these.
    """
    by = sort.removeprefix("-")
    if by not in SORTS:
        raise MemPluginError(f"Cannot sort by {sort[:40]!r}.", where="sort", fix=f"Choose one of: {SORTS}.")
    value = _value(trace, rows, by)
    if sort.startswith("-"):
        return rows[np.argsort(value, kind="stable")]
    backward = np.argsort(value[::-1], kind="stable")[::-1]
    return rows[::-1][backward]


def _value(trace: MemoryTrace, rows: Rows, by: str) -> Int64 | UInt64:
    blocks = trace.allocations
    if by == "bytes":
        return blocks.bytes[rows]
    if by == "born":
        return blocks.born[rows]
    return blocks.address[rows] if by == "address" else lifetimes(trace, rows)


def lifetimes(trace: MemoryTrace, rows: Rows) -> Int64:
    """Return how long allocations lived within the trace, in nanoseconds."""
    blocks, time = trace.allocations, trace.events.time_ns
    if not len(time):
        return np.zeros(len(rows), np.int64)
    edges = np.append(time, time[-1])
    begun = time[np.maximum(blocks.born[rows], 0)]
    lived: Int64 = edges[blocks.freed[rows]] - begun
    return lived


Action = Literal["alloc", "free"]

_ALLOCATION = re.compile(r"(?:0x|b(?=[0-9a-f]{12}))?([0-9a-f]{1,16})(?:_([0-9]{1,12}))?", re.IGNORECASE)
"""`ADDR[_VERSION]`. A leading `b`, as PyTorch's memory_viz writes (`b7f3a5c000000_0`), counts as a prefix if
12 or more hexadecimal digits follow: addresses do not have 13. `usage` tries it too if no block is found."""


@dataclass(frozen=True, slots=True)
class Allocation(AnalysisResult):
    """One block and its lifetime. Bytes; epoch nanoseconds; events are indices.

    `version` counts the blocks at this address of the device, from 0; a block that was alive before the
    trace is the first. `born_*` are None if the block was alive before the trace, `freed_*` if it outlived
    it. `rounded_bytes` is None if not known. `frames` is the call stack, innermost frame first.
    `why` says why it has its category; `tensor` is what lies in it, None if not known.
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
    tensor: str | None


@dataclass(frozen=True, slots=True)
class Usage(AnalysisResult):
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
        version: which of the blocks at that address, counted from 0 on each device.
        device: a device's name; None takes the first that has such a block.

    Raises:
        NotRecordedError: no such device or block, or the block's allocation or free is not in the trace.
    """
    devices = trace.device_rows(device)
    blocks = trace.allocations
    at_address = np.flatnonzero(blocks.address == np.uint64(address & 0xFFFF_FFFF_FFFF_FFFF))
    without_b = f"{address:x}"[1:]
    if not len(at_address) and f"{address:x}".startswith("b") and without_b:
        at_address = np.flatnonzero(blocks.address == np.uint64(int(without_b, 16)))
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
        tensor=tensor_name(trace, row),
    )


@dataclass(frozen=True, slots=True)
class Bands:
    """A device's live bytes in columns, divided into single allocations. Bytes, int64.

    `low`, `high`: the lowest and highest of each column, shape (columns,). A column shows the moment of its
    highest level: allocation `rows[i]` (a row of `trace.allocations`) is alive in the columns `first[i]` to
    `last[i]`. They are in order of allocation, those from before the trace by category. In each column the
    `bytes` of these and `rest` sum to `high`. `alive` are all allocations that are alive in any column, those
    in `rest`, too, and `alive_bytes` their bytes; `chosen` are the indices of `rows` in `alive.rows`.
    """

    low: Int64
    high: Int64
    rows: Rows
    bytes: Int64
    first: Int32
    last: Int32
    rest: Int64
    alive: Alive
    alive_bytes: Int64
    chosen: Rows
    peak_event: int
    peak_column: int


def bands(trace: MemoryTrace, device: int, cuts: Int64, most: int) -> Bands:
    """Divide the live bytes of a stretch into its `most` largest allocations and a rest.

    Args:
        cuts: how many events come before each edge of the columns, from `time_cuts` or `event_cuts`.
    """
    low, high, at = extremes(trace.live(device), cuts, trace.live_runs(device))
    blocks = trace.allocations
    alive = blocks.alive_after(at - 1, device)
    size = blocks.bytes[alive.rows]
    chosen = _largest(size, alive.rows, most)
    rows = alive.rows[chosen]
    order = np.lexsort((rows, np.where(blocks.born[rows] < 0, blocks.category[rows], len(Category))))
    chosen, rows, top = chosen[order], rows[order], int(np.argmax(high))
    _, first, end = alive.of(chosen)
    in_bands = levels_of_groups(np.zeros(len(rows), np.int64), size[chosen], first, end, (1, len(at)))
    return Bands(
        low=low,
        high=high,
        rows=rows,
        bytes=size[chosen],
        first=first,
        last=end - 1,
        rest=high - in_bands[0],
        alive=alive,
        alive_bytes=size,
        chosen=chosen,
        peak_event=int(at[top]) - 1,
        peak_column=top,
    )


def divided_rest(drawn: Bands, part: Int64, parts: int) -> Int64:
    """Divide the rest of each column into parts. Returns bytes, int64, shape (parts, columns).

    Args:
        part: the part of each of `drawn.alive`, from 0 to `parts` - 1.
    """
    size = drawn.alive_bytes.copy()
    size[drawn.chosen] = 0
    return levels_of_groups(part, size, drawn.alive.first, drawn.alive.end, (parts, len(drawn.rest)))


def _largest(size: Int64, rows: Rows, most: int) -> Rows:
    """Return the indices of the `most` largest; of equal ones those whose row comes first."""
    if len(size) <= most:
        return np.arange(len(size), dtype=np.intp)
    least = np.partition(size, len(size) - most)[len(size) - most]
    larger, equal = np.flatnonzero(size > least), np.flatnonzero(size == least)
    equal = equal[np.argsort(rows[equal])]
    return np.concatenate((larger, equal[: most - len(larger)]))


@dataclass(frozen=True, slots=True)
class Turnover:
    """What a stretch of events allocated and freed.

    The live bytes at the end are those at the start plus `allocated_bytes` minus `freed_bytes`.

    Attributes:
        highest_event: after which event the most bytes were alive, the first of several; the one before the
            stretch is the moment before it, and counts.
        highest_bytes: the live bytes then.
        allocated_bytes, allocated: of blocks allocated in the stretch, and how many.
        freed_bytes, freed: of blocks freed in the stretch, which may be older than it.
        stayed: rows of `trace.allocations`: allocated in the stretch and not freed in it.
    """

    highest_event: int
    highest_bytes: int
    allocated_bytes: int
    allocated: int
    freed_bytes: int
    freed: int
    stayed: Rows


def turnover(trace: MemoryTrace, device: int, first: int, end: int) -> Turnover:
    """Return what a device allocated and freed in the events from `first` to `end - 1`."""
    blocks, live = trace.allocations, trace.live(device)
    _, high, at = extremes(live, np.array([first, end]), trace.live_runs(device))
    before, after = (blocks.alive_at(event, device) for event in (first - 1, end - 1))
    rows = slice(*np.searchsorted(blocks.born, (first, end)).tolist())
    own, size = blocks.device[rows] == device, blocks.bytes[rows]
    allocated_bytes, allocated = int(size.sum(where=own)), int(np.count_nonzero(own))
    return Turnover(
        highest_event=int(at[0]) - 1,
        highest_bytes=int(high[0]),
        allocated_bytes=allocated_bytes,
        allocated=allocated,
        freed_bytes=int(live[first]) + allocated_bytes - int(live[end]),
        freed=len(before) + allocated - len(after),
        stayed=after[blocks.born[after] >= first],
    )
