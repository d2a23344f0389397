"""Blocks that their owner let go of while another stream may still use them."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.replay import match_frees
from tb_memplugin.trace.tables import Bool, Int64


def pending_since(trace: MemoryTrace, device: int) -> Int64:
    """When each block's free was requested: int64, one entry per row of `trace.allocations`.

    The index of the event that asked for the free, -1 if that was before the window, the block's
    `freed` where nothing asked before it ended: a block is pending after event e when since <= e < freed.
    Blocks of other devices are never pending. A block of the start state whose free was completed in
    the window, but not requested in it, was requested before (CUDACachingAllocator.cpp records a request
    before each completion); where a source writes no requests for the device, only the start state's
    own `pending` counts.
    """
    blocks, events = trace.allocations, trace.events
    since: Int64 = blocks.freed.copy()
    old = blocks.device[: len(trace.start)] == device
    before = np.flatnonzero(old & (trace.start.pending != 0))
    touched = np.flatnonzero(
        ((events.kind == Kind.ALLOC) | (events.kind == Kind.FREE_REQUESTED)) & (events.device == device)
    )
    is_alloc = events.kind[touched] == Kind.ALLOC
    if not is_alloc.all():
        rows = np.concatenate(
            (
                np.flatnonzero(old & (trace.start.address != 0)),
                len(trace.start) + np.flatnonzero(blocks.device[len(trace.start) :] == device),
            )
        )
        asked = _first_request(trace, rows, touched, is_alloc)
        since[rows] = np.minimum(since[rows], asked)
        before = np.union1d(before, _completed_only(trace, since, device))
    since[before] = -1
    return since


def _first_request(trace: MemoryTrace, rows: Int64, touched: Int64, is_alloc: Bool) -> Int64:
    """The event that asked for the free of each block, the number of events where none did.

    Args:
        trace: any trace.
        rows: blocks of one device, in order of birth.
        touched: that device's allocs and requests, in time order.
        is_alloc: which of them are allocs.
    """
    old = len(rows) - int(np.count_nonzero(is_alloc))
    gives = np.concatenate((np.ones(old, bool), is_alloc))
    event = np.concatenate((np.full(old, -1, np.int64), touched))
    address = np.concatenate((trace.allocations.address[rows[:old]], trace.events.address[touched]))
    began, ended, _ = match_frees(address, np.zeros(len(address), np.uint8), gives)
    by_request = ~gives[ended]
    asked = np.full(len(rows), len(trace.events), np.int64)
    place = np.cumsum(gives) - 1  # in `rows`, of an alloc
    asked[place[began[by_request]]] = event[ended[by_request]]
    return asked


def _completed_only(trace: MemoryTrace, since: Int64, device: int) -> Int64:
    """Rows of the start state whose free the window completes without a request in it."""
    blocks = trace.allocations
    rows = np.flatnonzero(blocks.device[: len(trace.start)] == device)
    rows = rows[(blocks.freed[rows] < len(trace.events)) & (since[rows] == blocks.freed[rows])]
    completed: Int64 = rows[trace.events.kind[blocks.freed[rows]] == Kind.FREE_COMPLETED]
    return completed
