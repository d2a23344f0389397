"""Single allocations: which lived when, how they are told apart, found and put in order."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.replay import address_order
from tb_memplugin.trace.tables import Bool, Int64, UInt64

Rows = npt.NDArray[np.intp]

SORTS = ("bytes", "born", "lifetime", "address")
_ADDRESS = re.compile(r"(?:0x)?(?P<digits>[0-9a-f]{3,16})(?:_(?P<version>\d{1,9}))?")


def versions(trace: MemoryTrace) -> Int64:
    """For each allocation, how many blocks lived at its address of its device before it: int64."""
    blocks = trace.allocations
    order = address_order(blocks.address)
    order = order[np.argsort(blocks.device[order], kind="stable")]
    address, device = blocks.address[order], blocks.device[order]
    new = np.ones(len(order), bool)
    new[1:] = (address[1:] != address[:-1]) | (device[1:] != device[:-1])
    starts = np.flatnonzero(new)
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    found = np.empty(len(order), np.int64)
    found[order] = place
    return found


def alive_between(trace: MemoryTrace, device: int, first: int, end: int) -> Rows:
    """Rows of allocations that were alive at some time between two places: how many events come before."""
    blocks = trace.allocations
    return np.flatnonzero((blocks.device == device) & (blocks.born < end) & (blocks.freed >= first))


def found(trace: MemoryTrace, rows: Rows, text: str, version: Int64) -> Rows:
    """The rows in which a text occurs, case aside: in a frame, module, operator, name, category or address.

    Args:
        trace: any trace.
        rows: which allocations to look at.
        text: what to look for; an address is found by its beginning, and `0x…_2` by its version too.
        version: from `versions`.
    """
    if not text.strip():
        return rows
    wanted = text.strip().casefold()
    blocks = trace.allocations
    mask = _has(blocks.stack[rows], [_in_any(wanted, stack) for stack in _lowered(trace)])
    for column, names in (
        (blocks.module, [module.key for module in trace.modules]),
        (blocks.operator, trace.operators),
        (blocks.label, trace.labels),
    ):
        mask |= _has(column[rows], [wanted in name.casefold() for name in names])
    categories = [wanted in each.key or wanted in each.key.replace("_", " ") for each in Category]
    mask |= _has(blocks.category[rows], categories)
    address = _ADDRESS.fullmatch(wanted)
    if address:
        mask |= _at(blocks.address[rows], version[rows], address)
    return rows[mask]


def _lowered(trace: MemoryTrace) -> list[tuple[str, ...]]:
    lowered: dict[str, str] = {}
    for stack in trace.stacks:
        for text in stack:
            if text not in lowered:
                lowered[text] = text.casefold()
    return [tuple(map(lowered.__getitem__, stack)) for stack in trace.stacks]


def _in_any(wanted: str, texts: tuple[str, ...]) -> bool:
    return any(wanted in text for text in texts)


def _has(column: npt.NDArray[np.integer], table: list[bool]) -> Bool:
    """Whether the table says yes for each row; -1, which is none, is the entry behind the last."""
    mask: Bool = np.array([*table, False])[column]
    return mask


def _at(address: UInt64, version: Int64, wanted: re.Match[str]) -> Bool:
    """Addresses whose hexadecimal digits begin as wanted."""
    digits = wanted["digits"].lstrip("0") or "0"
    length = np.searchsorted(16 ** np.arange(1, 16, dtype=np.uint64), address, side="right") + 1
    shift = length - len(digits)
    shifted = address >> (4 * np.maximum(shift, 0)).astype(np.uint64)
    mask: Bool = (shift >= 0) & (shifted == np.uint64(int(digits, 16)))
    if wanted["version"] is not None:
        mask &= (shift == 0) & (version == int(wanted["version"]))
    return mask


def in_order(trace: MemoryTrace, rows: Rows, sort: str) -> Rows:
    """Rows by `bytes`, `born`, `lifetime` or `address`, the greatest first; with a leading `-` the least.

    Equal ones stay in order of birth. The life of what was alive before the trace, or outlived it, counts
    as far as the trace shows it.

    Raises:
        MemPluginError: no such order.
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
    """How long allocations lived within the trace, nanoseconds."""
    blocks, time = trace.allocations, trace.events.time_ns
    if not len(time):
        return np.zeros(len(rows), np.int64)
    edges = np.append(time, time[-1])
    begun = time[np.maximum(blocks.born[rows], 0)]
    lived: Int64 = edges[blocks.freed[rows]] - begun
    return lived
