"""Where a program calls its model again and again, if nothing in the recording marks steps."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from tb_memplugin.analysis.sums import sums
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import Int64

FEWEST_CALLS = 4
"""Fewer whole calls are no evidence of a loop."""

FREED_SHARE, OFTEN = 0.5, 0.75
"""Least share of a call's bytes that is freed before the next, and of the calls of which this holds.

The layers of one forward, whose activations are kept for backward, look like calls that free almost nothing.
"""


def call_bounds(trace: MemoryTrace, device: int) -> Int64:
    """Return where calls of a model begin, by stacks: int64, shape (calls + 1,), ascending; empty without.

    The model is the outermost module call with most bytes, from one line. Of the stacks that allocate more
    than `FEWEST_CALLS` times in it, the first that does so least often marks its calls.
    """
    blocks = trace.allocations
    rows = np.flatnonzero((blocks.device == device) & (blocks.born >= 0) & (blocks.stack >= 0))
    rows = rows[blocks.category[rows] != Category.WORKSPACE]
    used, at = np.unique(blocks.stack[rows], return_inverse=True)
    callers: dict[tuple[str, ...], int] = {}
    caller = np.array([callers.setdefault(_caller(trace.stack(row)), len(callers)) for row in used.tolist()])
    outside = callers.get((), -1)
    if not len(callers) - (outside >= 0):
        return np.empty(0, np.int64)
    total = sums(caller[at], blocks.bytes[rows], len(callers))
    total[outside if outside >= 0 else len(total) :][:1] = 0
    inside = caller[at] == int(np.argmax(total))
    rows, at = rows[inside], at[inside]
    allocations = np.bincount(at)[at]
    if int(allocations.max()) <= FEWEST_CALLS:
        return np.empty(0, np.int64)
    fewest = int(allocations[allocations > FEWEST_CALLS].min())  # what is not in a loop within the model
    begins = at == at[np.argmax(allocations == fewest)]
    begins[1:] &= ~begins[:-1]  # one operator may allocate several blocks
    bounds: Int64 = blocks.born[rows[begins]].astype(np.int64)
    last = rows[(blocks.born[rows] >= bounds[-2:].min()) & (blocks.born[rows] < bounds[-1])]
    in_loop = _shared_frames(trace, last) > _shared_frames(trace, rows)
    return bounds if not in_loop and _mostly_free(trace, rows, bounds) else bounds[:0]


def _shared_frames(trace: MemoryTrace, rows: Int64) -> int:
    """Return how many frames all stacks of some blocks share, from the outermost on.

    The rounds of a loop within a model share its line, which other blocks of the model do not.
    """
    stacks = [trace.stack(row)[::-1] for row in np.unique(trace.allocations.stack[rows]).tolist()]
    return sum(1 for _ in takewhile(lambda frames: len(set(frames)) == 1, zip(*stacks, strict=False)))


def _caller(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames outside of the outermost module call of a stack, () if there is none."""
    calls = [at for at, text in enumerate(stack) if read_frame(text).function == "_call_impl"]
    return stack[calls[-1] + 1 :] if calls else ()


def _mostly_free(trace: MemoryTrace, rows: Int64, bounds: Int64) -> bool:
    """Return whether there are enough calls and most of them free most of what they allocate."""
    count = len(bounds) - 1
    if count < FEWEST_CALLS:
        return False
    blocks = trace.allocations
    call = np.searchsorted(bounds, blocks.born[rows], side="right") - 1
    rows, call = rows[(call >= 0) & (call < count)], call[(call >= 0) & (call < count)]
    size, is_freed = blocks.bytes[rows], blocks.freed[rows] <= bounds[call + 1]
    freed = sums(call[is_freed], size[is_freed], count)
    return bool(np.mean(freed >= FREED_SHARE * sums(call, size, count)) >= OFTEN)
