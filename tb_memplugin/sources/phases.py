"""The phases of a step: stretches of forward, backward and optimizer, disjoint and in time order."""

from __future__ import annotations

import numpy as np

from tb_memplugin.trace import Phase, Spans
from tb_memplugin.trace.tables import Bool, Int64, UInt8

Stretch = tuple[Int64, Int64]
"""Starts and ends, epoch nanoseconds."""


def phase_spans(forward: Stretch, backward: Stretch, optimizer: Stretch, step_starts: Int64) -> Spans:
    """Join the marks of each phase into stretches.

    Args:
        forward: outermost module calls, and operators outside modules that autograd will visit.
        backward: autograd nodes.
        optimizer: optimizer steps.
        step_starts: where profiled steps begin; no stretch reaches over one.

    Autograd nodes that follow one another are one stretch of backward. Forward marks that lead to a
    backward are one stretch up to its start: the loss belongs to it. Others (inference) stay as they
    are, so what happens between two calls is `other`.
    """
    start = np.concatenate((forward[0], backward[0], optimizer[0]))
    end = np.concatenate((forward[1], backward[1], optimizer[1]))
    phase = np.repeat(
        np.array([Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER], np.uint8),
        [len(forward[0]), len(backward[0]), len(optimizer[0])],
    )
    if not len(start):
        return Spans()
    order = np.argsort(start, kind="stable")
    start, end, phase = start[order], end[order], phase[order]
    outer = _outermost(end)
    start, end, phase = start[outer], end[outer], phase[outer]
    step = np.searchsorted(step_starts, start, side="right")
    new_run = np.concatenate(([True], (phase[1:] != phase[:-1]) | (step[1:] != step[:-1])))
    run = np.cumsum(new_run) - 1
    first = np.flatnonzero(new_run)
    run_end = np.maximum.reduceat(end, first)
    leads = np.zeros(len(first), bool)
    leads[:-1] = (
        (phase[first[:-1]] == Phase.FORWARD)
        & (phase[first[1:]] == Phase.BACKWARD)
        & (step[first[:-1]] == step[first[1:]])
    )
    run_end[:-1] = np.where(leads[:-1], start[first[1:]], run_end[:-1])
    joined = (phase == Phase.BACKWARD) | leads[run]
    keep = new_run | ~joined
    return Spans(
        start[keep],
        np.where(joined, run_end[run], end)[keep],
        phase[keep].astype(np.int32),
        np.zeros(int(keep.sum()), np.int32),
        phase[keep],
    )


def _outermost(end: Int64) -> Bool:
    """Mask of spans (sorted by start) that do not lie inside an earlier one."""
    reach = np.maximum.accumulate(end)
    return np.concatenate(([True], end[1:] > reach[:-1]))


def phase_at(spans: Spans, time_ns: Int64) -> UInt8:
    """The phase at each time: uint8, `OTHER` between stretches."""
    if not len(spans):
        return np.full(len(time_ns), Phase.OTHER, np.uint8)
    row = np.searchsorted(spans.start_ns, time_ns, side="right") - 1
    inside = (row >= 0) & (time_ns < spans.end_ns[row])
    return np.where(inside, spans.phase[row], Phase.OTHER).astype(np.uint8)
