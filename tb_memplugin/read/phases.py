"""The phases of a step: disjoint time ranges of forward, backward and optimizer, in time order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tb_memplugin.trace import Phase, Spans
from tb_memplugin.trace.tables import Bool, Int64, UInt8

Stretch = tuple[Int64, Int64]
"""Starts and ends, epoch nanoseconds."""

_Pieces = tuple[Int64, Int64, UInt8]
"""Starts, ends and phases of disjoint spans, in time order."""


def phase_spans(
    forward: Stretch, backward: Stretch, optimizer: Stretch, step_starts: Int64, making: Stretch | None = None
) -> Spans:
    """Join the marks of each phase into stretches.

    Consecutive autograd nodes form one stretch of backward. Forward marks before a backward form one
    stretch up to its start, so the loss belongs to forward. Other forward marks (inference) are not joined,
    so the time between two calls is `OTHER`. Where one phase runs inside another, the inner one counts: the
    closure of `optimizer.step(closure)`, an optimizer step in a hook of backward, `autograd.grad` in a
    module's forward. But recomputation in backward counts as backward.

    Args:
        forward: outermost module calls, and operators outside modules that autograd will visit.
        step_starts: when the profiled steps begin; no stretch crosses one.
        making: the forward marks that made autograd nodes, None for all. Those before the first of them are
            inference, too: what follows a call without gradients may be the next batch.
    """
    calls, nodes = _pieces(forward, Phase.FORWARD), _pieces(backward, Phase.BACKWARD)
    steps = _pieces(optimizer, Phase.OPTIMIZER)
    node = _covering(nodes, calls[0])
    first_hand = (node < 0) | (np.append(nodes[0], 0)[node] >= calls[0])
    calls = calls[0][first_hand], calls[1][first_hand], calls[2][first_hand]
    nodes = _joined(nodes, (*calls[:2], *steps[:2]), step_starts)
    making_pieces = None if making is None else _pieces(making, Phase.FORWARD)
    stretches = _joined(_innermost(calls, nodes), steps[:2], step_starts, making_pieces)
    start, end, phase = _innermost(stretches, steps)
    return Spans(start, end, phase.astype(np.int32), np.zeros(len(start), np.int32), phase)


def stretch(spans: Iterable[tuple[int, int]]) -> Stretch:
    """Return (start, end) pairs as columns."""
    columns = np.array(list(spans), np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def phase_at(spans: Spans, time_ns: Int64) -> UInt8:
    """Return the phase at each time: uint8; `OTHER` between stretches."""
    if not len(spans):
        return np.full(len(time_ns), Phase.OTHER, np.uint8)
    row = np.searchsorted(spans.start_ns, time_ns, side="right") - 1
    inside = (row >= 0) & (time_ns < spans.end_ns[row])
    return np.where(inside, spans.phase[row], Phase.OTHER).astype(np.uint8)


def _pieces(marks: Stretch, phase: Phase) -> _Pieces:
    """Return the marks of one phase, with overlapping and nested ones merged."""
    order = np.argsort(marks[0], kind="stable")
    start, end = marks[0][order], marks[1][order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.append(True, start[1:] >= reach[:-1])[: len(start)])
    last = np.append(first, len(start))[1:] - 1
    return start[first], reach[last], np.full(len(first), phase, np.uint8)


def _covering(pieces: _Pieces, time_ns: Int64) -> Int64:
    """Return the row of the piece that covers each time, -1 for none."""
    row = np.searchsorted(pieces[0], time_ns, side="right") - 1
    return np.where(time_ns < np.append(pieces[1], 0)[row], row, -1)


def _innermost(left: _Pieces, right: _Pieces) -> _Pieces:
    """Return both sets of pieces; where two overlap, the one that began later counts."""
    if not len(left[0]) or not len(right[0]):
        return right if len(right[0]) else left
    bounds = np.unique(np.concatenate((left[0], left[1], right[0], right[1])))
    left_row, right_row = _covering(left, bounds[:-1]), _covering(right, bounds[:-1])
    later = np.where(left_row >= 0, left[0][left_row], -1) < np.where(right_row >= 0, right[0][right_row], -1)
    piece = np.where(later, len(left[0]) + right_row, left_row)
    first = np.flatnonzero(np.append(True, piece[1:] != piece[:-1])[: len(piece)])
    end = bounds[np.append(first, len(piece))[1:]]
    runs = piece[first] >= 0
    phase = np.concatenate((left[2], right[2]))[piece[first]]
    return bounds[first][runs], end[runs], phase[runs]


def _joined(
    pieces: _Pieces, edges: Sequence[Int64], step_starts: Int64, making_pieces: _Pieces | None = None
) -> _Pieces:
    """Join consecutive pieces of backward, and extend the forward pieces before a backward to its start.

    Nothing is joined across one of the times in `edges`, or across the start of a profiled step. Forward
    pieces before the first that overlaps one in `making_pieces` stay as they are, if there is one.
    """
    start, end, phase = pieces
    if not len(start):
        return pieces
    apart: Bool = _cut(step_starts, start[:-1], start[1:])
    for times in edges:
        apart |= _cut(times, end[:-1], start[1:])
    first, run = _runs(apart, phase)
    if making_pieces is not None:
        apart |= _before_the_first(_overlap(pieces, making_pieces), first, run)[:-1]
        first, run = _runs(apart, phase)
    run_end = np.maximum.reduceat(end, first)
    leads = np.zeros(len(first), bool)
    leads[:-1] = (phase[first[:-1]] == Phase.FORWARD) & ~apart[first[1:] - 1]
    run_end[:-1] = np.where(leads[:-1], start[first[1:]], run_end[:-1])
    joined = (phase == Phase.BACKWARD) | leads[run]
    keep = ~joined
    keep[first] = True
    return start[keep], np.where(joined, run_end[run], end)[keep], phase[keep]


def _runs(apart: Bool, phase: UInt8) -> tuple[Int64, Int64]:
    """Return the first piece of each run of one phase, and the run of each piece."""
    first = np.flatnonzero(np.append(True, apart | (phase[1:] != phase[:-1])))
    return first, np.repeat(np.arange(len(first)), np.diff(np.append(first, len(phase))))


def _before_the_first(marked: Bool, first: Int64, run: Int64) -> Bool:
    """Return the pieces before the first marked one of their run, in runs that have one."""
    count = np.cumsum(marked)
    before: Int64 = (count - marked)[first]
    until = np.append(before[1:], count[-1])
    leading: Bool = (count == before[run]) & (until > before)[run]
    return leading


def _overlap(pieces: _Pieces, other_pieces: _Pieces) -> Bool:
    """Whether each piece overlaps any of the others."""
    begun = np.searchsorted(other_pieces[0], pieces[1], side="left")
    overlap: Bool = begun > np.searchsorted(other_pieces[1], pieces[0], side="right")
    return overlap


def _cut(edges: Int64, after: Int64, until: Int64) -> Bool:
    """Whether an edge lies in (after, until], for each pair of times."""
    between: Bool = np.searchsorted(edges, until, side="right") > np.searchsorted(edges, after, side="right")
    return between
