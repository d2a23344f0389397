"""Find the blocks of tensors that were seen while a program ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tb_memplugin.trace import Allocations
from tb_memplugin.trace.replay import blocks_at
from tb_memplugin.trace.tables import Int64

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
    seen_at = np.searchsorted(time_ns, seen_ns, side="right") - 1
    row = blocks_at(wanted, seen_at, blocks)
    return np.where(np.append(blocks.device, 0)[row] == device, row, -1).astype(np.int64)
