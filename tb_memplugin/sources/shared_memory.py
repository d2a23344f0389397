"""Memory that processes share: the profiler reports it among the CPU's, but counts it nowhere."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace.tables import Bool, Int64

SHARED = "shared"
"""The name of the device that stands for it."""

_PAGE = 4096


def in_shared_memory(address: Int64, size: Int64, total: Int64, on_cpu: Bool) -> Bool:
    """Mask of the events in shared memory: c10's MapAllocator reports a total of 0 with each.

    A free that brings the CPU's own counter down to 0 looks alike. It is one where the counter stood at
    its bytes before, and at 0 before the next event. Of a free before all other events it is not known
    where the counter stood: then shared memory is what begins a page, as mapped files do.

    Args:
        address, size, total: columns of events in time order; sizes of frees are negative, and `total`
            is the counter after the event, negative where it is not told.
        on_cpu: mask of the events that the profiler reports as the CPU's.
    """
    shared: Bool = on_cpu & (total == 0) & (size != 0)
    suspects, regular = np.flatnonzero(shared), np.flatnonzero(on_cpu & (total > 0))
    place = np.searchsorted(regular, suspects)
    known = place > 0
    before = np.append(total[regular], 0)[place - 1]
    after = np.append(total[regular] - size[regular], 0)[place]
    at = address[suspects]
    mapped = np.isin(at, at[size[suspects] > 0]) | ((at % _PAGE == 0) & (at != 0))
    emptied = (size[suspects] < 0) & (after == 0) & np.where(known, before + size[suspects] == 0, ~mapped)
    first = np.unique(place[emptied], return_index=True)[1]  # the counter comes down to 0 once
    shared[suspects[emptied][first]] = False
    return shared
