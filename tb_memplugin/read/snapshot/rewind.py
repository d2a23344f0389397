"""Compute what was alive and reserved before a snapshot's first entry, backward from its final state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.snapshot.blocks import FinalState
from tb_memplugin.read.snapshot.entries import Entries
from tb_memplugin.trace import Kind
from tb_memplugin.trace.allocator import RESERVE_SIGN
from tb_memplugin.trace.replay import address_order
from tb_memplugin.trace.tables import Bool, Int64, UInt64, compact


@dataclass(frozen=True, slots=True)
class Beginning:
    """The blocks alive before the first entry, and the entries that allocated the final blocks.

    Columns of equal length: `address`, `bytes` (requested), `final` (the row among the final blocks, -1
    if the block was freed), `freed` (the entry that freed it, -1 if it is among the final blocks).
    `alloc` is, for each final block, the entry that allocated it, -1 if older or unknown. `anomalies` has
    each kind of contradiction between the entries and the final state.
    """

    address: UInt64
    bytes: Int64
    final: Int64
    freed: Int64
    alloc: Int64
    anomalies: Faults


def rewind(entries: Entries, final: FinalState) -> Beginning:
    """Return the blocks alive before the first entry of one device's trace.

    The trace is the end of a longer history (a ring buffer drops the oldest entries), so only the final
    state is reliable. Going backward from it, a completed free makes a block live and an alloc removes
    it. So only the first row at each address matters: if it is not an alloc, a block was alive there at the
    start. A requested free changes nothing: the block is live until its free is completed.
    """
    touched = np.flatnonzero((entries.kind == Kind.ALLOC) | (entries.kind == Kind.FREE_COMPLETED))
    address = np.concatenate((entries.address[touched], final.address))
    size = np.concatenate((entries.bytes[touched], final.bytes))
    is_alloc = np.concatenate((entries.kind[touched] == Kind.ALLOC, np.zeros(len(final.address), bool)))
    is_final = np.arange(len(address)) >= len(touched)

    order = address_order(address)
    address, size, is_alloc, is_final = address[order], size[order], is_alloc[order], is_final[order]
    same = address[1:] == address[:-1]
    first = np.concatenate(([True], ~same))[: len(address)]
    last = np.concatenate((~same, [True]))[: len(address)]
    ended = ~first
    ended[1:] &= is_alloc[:-1]
    resized = np.zeros(len(address), bool)
    resized[1:] = ended[1:] & ~is_alloc[1:] & (size[1:] != size[:-1])
    stray = ~first & ~is_alloc & ~ended
    counts = {
        "allocations at an address where a block was still live": ended & is_alloc,
        "allocations neither freed nor among the final blocks": is_alloc & last & final.recorded,
        "frees of blocks that were not live": stray & ~is_final,
        "final blocks that were freed and not allocated again": stray & is_final,
    }
    anomalies = {fault: Tally.of(rows, size) for fault, rows in counts.items()}
    anomalies["blocks whose size changed between allocation and end"] = Tally.of(
        resized, np.diff(size, prepend=0)
    )
    source = np.concatenate((touched, np.arange(len(final.address))))[order]
    alive = first & ~is_alloc
    return Beginning(
        address=address[alive],
        bytes=size[alive],
        final=np.where(is_final[alive], source[alive], -1),
        freed=np.where(is_final[alive], -1, source[alive]),
        alloc=_allocs_of_final(source, is_final, ended, len(final.address)),
        anomalies=anomalies,
    )


def _allocs_of_final(source: Int64, is_final: Bool, ended: Bool, count: int) -> Int64:
    """Return, for each final block, the last entry at its address if that is an alloc, else -1."""
    allocs = np.full(count, -1, np.int64)
    rows = np.flatnonzero(is_final & ended)
    allocs[source[rows]] = source[rows - 1]
    return allocs


def reserved_levels(entries: Entries, final: FinalState) -> tuple[int, Int64]:
    """Return the reserved bytes before the first entry, and after each entry (int64, shape (entries,)).

    They are computed backward from the final sum of segment sizes, by segment allocs and frees and by maps
    and unmaps of expandable segments (torch: c10/cuda/CUDACachingAllocator.cpp).
    """
    change = np.cumsum(RESERVE_SIGN[entries.kind] * entries.bytes)
    start = final.reserved - (int(change[-1]) if len(change) else 0)
    change += start
    return start, compact(change)
