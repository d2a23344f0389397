"""Allocations and frees of one device in time order, for exports that show memory over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64, Rows


@dataclass(frozen=True, slots=True)
class Changes:
    """One row per change: the row of `trace.allocations`, the event, and the signed bytes."""

    block: Rows
    event: Int64
    change: Int64


def changes_of(trace: MemoryTrace, device: int) -> Changes:
    """Return the changes of a device's live bytes. At the same event, frees come before allocations."""
    blocks = trace.allocations
    own = blocks.device == device
    born = np.flatnonzero(own & (blocks.born >= 0))
    freed = np.flatnonzero(own & (blocks.freed < len(trace.events)))
    block = np.concatenate((freed, born))
    event = np.concatenate((blocks.freed[freed], blocks.born[born]))
    change = np.concatenate((-blocks.bytes[freed], blocks.bytes[born]))
    order = np.argsort(event, kind="stable")
    return Changes(block[order], event[order], change[order])
