"""Find the blocks of tensors that were seen while a program ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tb_memplugin.trace import Allocations
from tb_memplugin.trace.tables import Int64, UInt64

if TYPE_CHECKING:
    from tb_memplugin.record.storages import Sighting


def match_sightings(
    sightings: Sequence[Sighting], devices: Sequence[str], blocks: Allocations, time_ns: Int64
) -> Int64:
    """Return the row of the block that was alive at each sighting's time and address, -1 for none.

    Args:
        sightings: sightings at any time within the window.
        devices: device names; values of `blocks.device` are rows of them.
        blocks: the paired allocations.
        time_ns: the times of the events.
    """
    if not sightings:
        return np.empty(0, np.int64)
    wanted = np.array([sighting.address for sighting in sightings], np.uint64)
    seen_ns = np.array([sighting.time_ns for sighting in sightings], np.int64)
    row_of = {name: row for row, name in enumerate(devices)}
    device = np.array([row_of.get(sighting.device, -1) for sighting in sightings])
    row = blocks_at(wanted, seen_ns, blocks, time_ns)
    return np.where(np.append(blocks.device, 0)[row] == device, row, -1).astype(np.int64)


def blocks_at(wanted: UInt64, seen_ns: Int64, blocks: Allocations, time_ns: Int64) -> Int64:
    """Return the row of the block that was alive at each address and time, -1 for none: int64, shape (n,).

    Args:
        wanted, seen_ns: addresses, and epoch nanoseconds within the window; shape (n,).
        blocks: the paired allocations.
        time_ns: the times of the events.
    """
    if not len(wanted):
        return np.empty(0, np.int64)
    seen_at = np.searchsorted(time_ns, seen_ns, side="right") - 1
    addresses = np.unique(wanted)
    code = np.searchsorted(addresses, blocks.address).clip(max=len(addresses) - 1)
    candidates = np.flatnonzero(addresses[code] == blocks.address)
    width = len(time_ns) + 2
    keys = code[candidates] * width + blocks.born[candidates] + 1
    order = np.argsort(keys, kind="stable")
    candidates, keys = candidates[order], keys[order]
    last = np.searchsorted(keys, np.searchsorted(addresses, wanted) * width + seen_at + 1, side="right") - 1
    row = np.append(candidates, -1)[last]
    is_match = (last >= 0) & (blocks.address[row] == wanted) & (blocks.freed[row] > seen_at)
    return np.where(is_match, row, -1).astype(np.int64)
