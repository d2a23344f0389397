"""End the blocks of communication that another thread freed, which the profiler does not see.

gloo's threads may drop the last reference to a buffer that they sent or received. Such a block would be
counted until its address is used again, or for ever.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tb_memplugin.analysis.units import counted
from tb_memplugin.record.profiler.attribution import Attribution
from tb_memplugin.trace import Allocations, Events, Kind, Note, events
from tb_memplugin.trace.tables import Int64, merged


def with_communication_frees(
    bare: Events, blocks: Allocations, attribution: Attribution, cpu: int, alive: Collection[int] | None
) -> tuple[Events, Note | None]:
    """Return the events with a free for each such block, and a note on them, None if there are none.

    A block counts only until the operator ends that allocated it, so that no freed block is counted; the note
    says how many bytes may be missing at a time.

    Args:
        cpu: the row of the CPU among the devices.
        alive: the addresses of the storages that Python has at the end, None if they were not searched.
    """
    here = blocks.device[blocks.born >= 0] == cpu
    rows = np.flatnonzero(blocks.born >= 0)[here]
    communicating = np.isin(blocks.bytes[rows], blocks.bytes[rows[attribution.communicating[here]]])
    kept = blocks.freed[rows] >= len(bare)
    lost = ~kept & (bare.kind[np.minimum(blocks.freed[rows], len(bare) - 1)] == Kind.ALLOC)
    if alive is not None:
        lost |= kept & communicating & ~np.isin(blocks.address[rows], np.fromiter(alive, np.uint64))
    if not lost.any():
        return bare, None
    born_ns = bare.time_ns[blocks.born[rows]]
    ended_ns = np.append(bare.time_ns, bare.time_ns[-1])[blocks.freed[rows]]
    end_ns = np.minimum(np.maximum(attribution.operator_end_ns[here], born_ns), ended_ns)[lost]
    order = np.argsort(end_ns, kind="stable")
    frees = events(
        end_ns[order],
        kind=np.full(len(end_ns), Kind.FREE_COMPLETED),
        device=np.full(len(end_ns), cpu),
        address=blocks.address[rows[lost]][order],
        bytes=blocks.bytes[rows[lost]][order],
    )
    missing = _most_at_once(end_ns, ended_ns[lost], blocks.bytes[rows[lost]])
    # At equal times the free comes after its own alloc and before the alloc that uses its address again.
    return merged(bare, frees), Note(
        "Freed by threads of the communication, at times that the profiler does not see: "
        f"{counted(len(end_ns), 'block')}. They count only while the operator ran that allocated them, so "
        f"that up to {missing:,} bytes may be missing at a time. Pass exact_cpu=True to see every free.",
        "freed_by_communication",
        missing,
    )


def _most_at_once(begin: Int64, end: Int64, size: Int64) -> int:
    """Return the most bytes of ranges of time that overlap."""
    times = np.concatenate((begin, end))
    order = np.lexsort((np.concatenate((size, -size)), times))
    return int(np.cumsum(np.concatenate((size, -size))[order]).max(initial=0))
