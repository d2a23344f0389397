"""Memory shared between processes: the profiler reports it as the CPU's, but no counter includes it."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace.tables import Bool, Int64

SHARED = "shared"
"""The name of the device that stands for shared memory."""

_PAGE = 4096


def in_shared_memory(address: Int64, size: Int64, total: Int64, on_cpu: Bool) -> Bool:
    """Return a mask of the events in shared memory, with each of which c10's MapAllocator reports total 0.

    A free that brings the CPU's own counter down to 0 looks the same. It is taken for one if the counter was
    equal to its bytes before it, and is 0 before the next event. The counter before the first event is not
    known: such a free is taken for shared memory if its address begins a page, as that of a mapped file
    does, or was allocated as shared memory.

    Args:
        address, size, total: columns of events in time order; sizes of frees are negative, and `total`
            is the counter after the event, negative if it was not reported.
        on_cpu: mask of the events that the profiler reports as the CPU's.
    """
    shared: Bool = on_cpu & (total == 0) & (size != 0)
    suspects, regular = np.flatnonzero(shared), np.flatnonzero(on_cpu & (total > 0))
    if not len(suspects):
        return shared
    next_regular = np.searchsorted(regular, suspects)
    has_before = next_regular > 0
    before = np.append(total[regular], 0)[next_regular - 1]
    after = np.append(total[regular] - size[regular], 0)[next_regular]
    at = address[suspects]
    mapped = np.isin(at, at[size[suspects] > 0]) | ((at % _PAGE == 0) & (at != 0))
    emptied = (
        (size[suspects] < 0) & (after == 0) & np.where(has_before, before + size[suspects] == 0, ~mapped)
    )
    first = np.unique(next_regular[emptied], return_index=True)[1]  # the counter comes down to 0 once
    shared[suspects[emptied][first]] = False
    return shared
