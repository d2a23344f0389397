"""Single allocations: numbering blocks of one address, and selecting, searching and sorting them."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.frames import distinct
from tb_memplugin.trace.replay import address_order
from tb_memplugin.trace.tables import Bool, Int64, Rows, UInt64

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


def alive_between(trace: MemoryTrace, device: int, first: int, end: int) -> Rows:
    """Return the rows of allocations on a device that were alive between the events first and end."""
    blocks = trace.allocations
    return np.flatnonzero((blocks.device == device) & (blocks.born < end) & (blocks.freed >= first))


def rows_with_text(trace: MemoryTrace, rows: Rows, text: str, version: Int64) -> Rows:
    """Return the rows in which a text occurs: in a frame, module, operator, name, category or address.

    Args:
        trace: any trace.
        rows: the allocations to search.
        text: what to look for, ignoring case. It may be the beginning of an address, or an address with its
            version (`0x…_2`).
        version: the result of `versions`.
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
