"""Pending blocks: those whose free was requested while another stream may still use them."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.replay import match_frees
from tb_memplugin.trace.tables import Bool, Int64


def pending_since(trace: MemoryTrace, device: int) -> Int64:
    """Return when each block's free was requested: int64, one entry per row of `trace.allocations`.

    An entry is the index of the event that requested the free, -1 if that was before the window, or the
    block's `freed` if nothing requested it before the block was freed. So a block is pending after event e
    if since <= e < freed. Blocks of other devices are never pending.

    If the free of a start-state block is completed in the window but not requested in it, the request came
    before the window, because CUDACachingAllocator.cpp records a request before each completion. If a source
    records no requests for the device, only the `pending` of the start state counts.
    """
    blocks, events = trace.allocations, trace.events
    since: Int64 = blocks.freed.copy()
    at_start = blocks.device[: len(trace.start)] == device
    before = np.flatnonzero(at_start & (trace.start.pending != 0))
    changes = np.flatnonzero(
        ((events.kind == Kind.ALLOC) | (events.kind == Kind.FREE_REQUESTED)) & (events.device == device)
    )
    is_alloc = events.kind[changes] == Kind.ALLOC
    if not is_alloc.all():
        rows = np.concatenate(
            (
                np.flatnonzero(at_start & (trace.start.address != 0)),
                len(trace.start) + np.flatnonzero(blocks.device[len(trace.start) :] == device),
            )
        )
        requested = _first_request(trace, rows, changes, is_alloc)
        since[rows] = np.minimum(since[rows], requested)
        before = np.union1d(before, _completed_only(trace, since, device))
    since[before] = -1
    return since


def _first_request(trace: MemoryTrace, rows: Int64, changes: Int64, is_alloc: Bool) -> Int64:
    """Return the event that requested the free of each block; the number of events if none did.

    Args:
        trace: any trace.
        rows: blocks of one device, in order of allocation.
        changes: that device's allocations and free requests, in time order.
        is_alloc: which of these are allocations.
    """
    old = len(rows) - int(np.count_nonzero(is_alloc))
    allocates = np.concatenate((np.ones(old, bool), is_alloc))
    event = np.concatenate((np.full(old, -1, np.int64), changes))
    address = np.concatenate((trace.allocations.address[rows[:old]], trace.events.address[changes]))
    began, ended, _ = match_frees(address, np.zeros(len(address), np.uint8), allocates)
    by_request = ~allocates[ended]
    requested = np.full(len(rows), len(trace.events), np.int64)
    index = np.cumsum(allocates) - 1  # index in `rows` of each allocation
    requested[index[began[by_request]]] = event[ended[by_request]]
    return requested


def _completed_only(trace: MemoryTrace, since: Int64, device: int) -> Int64:
    """Return the rows of the start state whose free is completed, but not requested, in the window."""
    blocks = trace.allocations
    rows = np.flatnonzero(blocks.device[: len(trace.start)] == device)
    rows = rows[(blocks.freed[rows] < len(trace.events)) & (since[rows] == blocks.freed[rows])]
    completed: Int64 = rows[trace.events.kind[blocks.freed[rows]] == Kind.FREE_COMPLETED]
    return completed
