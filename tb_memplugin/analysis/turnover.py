"""What a device allocated and freed between two moments, and what of it stayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    level = trace.live(device)[first : end + 1]
    highest = int(level.argmax())
    of_device = blocks.device == device
    is_born = of_device & (blocks.born >= first) & (blocks.born < end)
    is_freed = of_device & (blocks.freed >= first) & (blocks.freed < end)
    return Turnover(
        first=first,
        end=end,
        highest_event=first + highest - 1,
        highest_bytes=int(level[highest]),
        allocated=np.flatnonzero(is_born),
        freed=np.flatnonzero(is_freed),
        stayed=np.flatnonzero(is_born & ~is_freed),
    )
