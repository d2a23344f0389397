"""Find where the program itself emptied the allocator's cache, as far as a recording shows it."""

from __future__ import annotations

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator.allocator_settings import UNLIMITED, recorded_settings
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Int64

GIVES_BACK = (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP)
GROWS = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)


def emptied_by_hand(trace: MemoryTrace, device: int, rows: Int64, kind: Int64) -> Int64:
    """Return the indices in `rows` of the events at which the program emptied the cache.

    Such an event is the last of a run, which is several segment frees or unmaps in a row. The allocator also
    frees segments by itself when a request finds no memory, and a recording does not tell the two apart. A
    run is assumed to be a request's if an out-of-memory event follows directly, or a segment that, without
    the run, would have raised the reserved memory above its recorded peak. If the recorded settings let the
    allocator free segments at other times too, every segment allocated directly after a run counts.

    Args:
        trace, device: what is replayed.
        rows, kind: the device's events and their kinds, shape (n,).
    """
    gives_back = np.isin(kind, GIVES_BACK)
    last = np.flatnonzero(gives_back & ~np.append(gives_back[1:], False))
    first = np.flatnonzero(gives_back & ~np.append(False, gives_back[:-1]))
    eager, level = _frees_eagerly(trace), trace.events.reserved[rows]
    most, start = int(level.max(initial=0)), trace.devices[device].reserved_at_start or 0
    by_hand = []
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        behind = end + 1
        grows = behind < len(kind) and kind[behind] in GROWS
        before = int(level[begin - 1]) if begin else start
        failed = grows and (eager or before + int(trace.events.bytes[rows[behind]]) > most)
        if not failed and not (behind < len(kind) and kind[behind] == Kind.OOM):
            by_hand.append(end)
    return np.array(by_hand, np.int64)


def _frees_eagerly(trace: MemoryTrace) -> bool:
    """Whether the recorded settings let the allocator free segments before memory runs out."""
    try:
        settings = recorded_settings(trace)
    except MemPluginError:
        return False
    return settings.max_split_bytes < UNLIMITED or settings.gc_threshold > 0
