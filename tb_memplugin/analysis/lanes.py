"""Lanes under the curve: steps, phases and module calls, as far as a screen can show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.trace import MemoryTrace, Module, Phase, Spans, Step
from tb_memplugin.trace.tables import Bool, Int64

_NO_SPANS = Spans()

MOST_LEVELS = 100
"""Autograd nodes of deeper modules count to the module around them at the last level: each node is in every
level, so a chain of modules would take time and memory with the square of its length."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What ran within a stretch, in epoch nanoseconds or, for the output of `over_events`, in events.

    Attributes:
        phases: spans of forward, backward and optimizer; `name` is a `Phase`.
        modules: module calls by depth, outermost first, without depths at which there are none; `name` is a
            row of the modules. Each depth is sorted by start. Consecutive autograd nodes of the same module
            at that depth are merged into one span.
        omitted: how many module calls are left out because they are narrower than a column. Calls of zero
            width, such as those without an event, are left out too, but not counted.
    """

    steps: tuple[Step, ...]
    phases: Spans
    modules: tuple[Spans, ...]
    omitted: int


@dataclass(frozen=True, slots=True)
class Ran:
    """What ran, prepared for `lanes`. `reach`: the latest end up to each span of a depth, int64."""

    steps: tuple[Step, ...]
    phases: Spans
    depths: tuple[Spans, ...]
    reach: tuple[Int64, ...]


def lanes(ran: Ran, t0_ns: int, t1_ns: int, columns: int) -> Lanes:
    """Return what to draw under the curve over `[t0_ns, t1_ns]`.

    Args:
        t0_ns, t1_ns: epoch nanoseconds, t0 < t1; for the output of `over_events`, events.
        columns: the width of the chart; calls narrower than a column are left out.
    """
    omitted, shown = 0, []
    for level, reach in zip(ran.depths, ran.reach, strict=True):
        first, end = int(np.searchsorted(reach, t0_ns)), int(np.searchsorted(level.start_ns, t1_ns, "right"))
        near = _rows(level, slice(first, end))
        width = near.end_ns - near.start_ns
        inside = near.end_ns >= t0_ns
        wide = inside & (width >= -((t0_ns - t1_ns) // columns))
        omitted += int(np.count_nonzero(width[inside])) - int(np.count_nonzero(wide))
        shown.append(_rows(near, wide))
    while shown and not len(shown[-1]):
        shown.pop()
    return Lanes(
        steps=tuple(step for step in ran.steps if step.start_ns <= t1_ns and step.end_ns >= t0_ns),
        phases=_rows(ran.phases, (ran.phases.start_ns <= t1_ns) & (ran.phases.end_ns >= t0_ns)),
        modules=tuple(shown),
        omitted=omitted,
    )


def what_ran(steps: Sequence[Step], phases: Spans, calls: Spans, modules: Sequence[Module]) -> Ran:
    """Return steps, phases and calls (of a trace, a summary or `over_events`) as `lanes` needs them."""
    forward = calls.phase != Phase.BACKWARD
    parent = _called_parents(modules, calls.name[forward & (calls.name >= 0)])
    levels = [*_by_depth(calls, np.flatnonzero(forward & (calls.name >= 0)))]
    nodes = np.flatnonzero(~forward & (calls.name >= 0))
    stretch = _stretch(calls.start_ns[nodes], steps, phases)
    owners = _not_deeper(parent, MOST_LEVELS)[calls.name[nodes]]
    for depth, owner in enumerate(_owners_by_depth(owners, parent)):
        merged = _merged(calls, nodes, owner, stretch, depth)
        if depth == len(levels):
            levels.append(_NO_SPANS)
        levels[depth] = _in_order(levels[depth], merged)
    reach = tuple(np.maximum.accumulate(level.end_ns) for level in levels)
    return Ran(tuple(steps), phases, tuple(levels), reach)


def over_events(trace: MemoryTrace) -> tuple[tuple[Step, ...], Spans, Spans]:
    """Return a trace's steps, phases and calls on an axis of events, where event e spans e to e + 1.

    Their `start_ns` and `end_ns` are events: the first one within, and the one after the last.
    """
    bounds = map(trace.step_events, range(len(trace.steps)))
    steps = tuple(
        replace(step, start_ns=first, end_ns=end)
        for step, (first, end) in zip(trace.steps, bounds, strict=True)
    )
    return steps, _events_in(trace, trace.phases), _events_in(trace, trace.calls)


def _events_in(trace: MemoryTrace, spans: Spans) -> Spans:
    start, end = (np.searchsorted(trace.events.time_ns, edge) for edge in (spans.start_ns, spans.end_ns))
    return replace(spans, start_ns=start.astype(np.int64), end_ns=end.astype(np.int64))


def _called_parents(modules: Sequence[Module], called: np.ndarray) -> Int64:
    """Return each module's nearest ancestor that is called, so that forward and backward have the same depth.

    Lists and other containers are never called, so they are in no lane of forward.
    """
    parent = np.array([module.parent for module in modules], np.int64)
    if not len(called):
        return parent
    is_called = np.zeros(len(parent) + 1, bool)
    is_called[called] = True
    is_called[-1] = True  # for row -1, which means no parent
    while not (settled := is_called[parent]).all():
        parent = np.where(settled, parent, parent[parent])
    return parent


def _not_deeper(parent: Int64, levels: int) -> Int64:
    """Return for each module itself, or the module around it at the last of the levels."""
    kept: list[int] = []
    depth: list[int] = []
    for row, above in enumerate(parent.tolist()):
        depth.append(depth[above] + 1 if above >= 0 else 0)
        kept.append(row if depth[row] < levels else kept[above])
    return np.array(kept, np.int64)


def _by_depth(calls: Spans, rows: Int64) -> list[Spans]:
    """Return the calls of each depth that occurs; a depth without calls has no lane."""
    ordered = rows[np.lexsort((calls.start_ns[rows], calls.depth[rows]))]
    edges = np.flatnonzero(np.diff(calls.depth[ordered])) + 1
    return [_rows(calls, level) for level in np.split(ordered, edges) if len(level)]


def _owners_by_depth(module: Int64, parent: Int64) -> list[Int64]:
    """Return, for each depth, the module of that depth around each row; -1 if the row is less deep."""
    chain = [module]
    while len(module) and (chain[-1] >= 0).any():
        chain.append(np.where(chain[-1] >= 0, parent[chain[-1]], -1))
    chain = chain[:-1]
    if not chain:
        return []
    table = np.stack(chain)  # (steps towards the root, rows)
    own_depth = (table >= 0).sum(axis=0) - 1
    rows = np.arange(len(module))
    return [
        np.where(own_depth >= depth, table[np.maximum(own_depth - depth, 0), rows], -1)
        for depth in range(int(own_depth.max()) + 1)
    ]


def _stretch(start_ns: Int64, steps: Sequence[Step], phases: Spans) -> Int64:
    """Return a number that changes with each step or phase; spans are not merged across such a change."""
    begins = np.array([step.start_ns for step in steps], np.int64)
    edges = np.sort(np.concatenate((begins, phases.start_ns)))
    return np.searchsorted(edges, start_ns, side="right")


def _merged(calls: Spans, nodes: Int64, owner: Int64, stretch: Int64, depth: int) -> Spans:
    if not len(nodes):
        return _NO_SPANS
    changes = (owner[1:] != owner[:-1]) | (stretch[1:] != stretch[:-1])
    first = np.concatenate(([0], np.flatnonzero(changes) + 1))
    end_ns = np.maximum.reduceat(calls.end_ns[nodes], first)
    has_owner = owner[first] >= 0
    return Spans(
        start_ns=calls.start_ns[nodes][first][has_owner],
        end_ns=end_ns[has_owner],
        name=owner[first][has_owner].astype(np.int32),
        depth=np.full(int(has_owner.sum()), depth, np.int32),
        phase=np.full(int(has_owner.sum()), Phase.BACKWARD, np.uint8),
    )


def _in_order(a: Spans, b: Spans) -> Spans:
    both = Spans(*(np.concatenate((getattr(a, name), getattr(b, name))) for name in Spans.__slots__))
    return _rows(both, np.argsort(both.start_ns, kind="stable"))


def _rows(spans: Spans, rows: Int64 | Bool | slice) -> Spans:
    return Spans(*(getattr(spans, name)[rows] for name in Spans.__slots__))
