"""What a device allocated and freed between two moments, and what of it stayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.columns import extremes
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Rows


@dataclass(frozen=True, slots=True)
class Turnover:
    """The blocks of a stretch of events, as rows of `trace.allocations`.

    The live bytes at the end are those at the start plus `allocated` minus `freed`.

    Attributes:
        first, end: the half-open range of event indices.
        highest_event: after which event the most bytes were alive, the first of several; `first - 1` is the
            moment before the stretch, and counts.
        highest_bytes: the live bytes then.
        allocated, freed: allocated or freed in the stretch, in order of allocation.
        stayed: allocated in the stretch and not freed in it.
    """

    first: int
    end: int
    highest_event: int
    highest_bytes: int
    allocated: Rows
    freed: Rows
    stayed: Rows


def turnover(trace: MemoryTrace, device: int, first: int, end: int) -> Turnover:
    """Return what a device allocated and freed in the events from `first` to `end - 1`."""
    blocks = trace.allocations
    _, high, at = extremes(trace.live(device), np.array([first, end]), trace.live_runs(device))
    before = blocks.alive_at(first - 1, device)
    row, row_end = np.searchsorted(blocks.born, (first, end)).tolist()
    own, stays = blocks.device[row:row_end] == device, blocks.freed[row:row_end] >= end
    return Turnover(
        first=first,
        end=end,
        highest_event=int(at[0]) - 1,
        highest_bytes=int(high[0]),
        allocated=row + np.flatnonzero(own),
        freed=np.concatenate((before[blocks.freed[before] < end], row + np.flatnonzero(own & ~stays))),
        stayed=row + np.flatnonzero(own & stays),
    )
