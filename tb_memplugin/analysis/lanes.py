"""Lanes under the curve: steps, phases and module calls, as far as a screen can show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.trace import Module, Phase, Spans, Step
from tb_memplugin.trace.tables import Int64

_NO_SPANS = Spans()


@dataclass(frozen=True, slots=True)
class Lanes:
    """What ran within a stretch of time. Epoch nanoseconds.

    Attributes:
        steps: the steps that touch it.
        phases: stretches of forward, backward, optimizer; `name` is a `Phase`.
        modules: module calls by depth, outermost first; `name` is a row of the modules. Within a
            depth they are sorted by start. Autograd nodes are merged into one span for as long as
            they run for the same module of that depth.
        omitted: module calls that are narrower than a column, and are left out.
    """

    steps: tuple[Step, ...]
    phases: Spans
    modules: tuple[Spans, ...]
    omitted: int


def lanes(
    steps: Sequence[Step],
    phases: Spans,
    calls: Spans,
    modules: Sequence[Module],
    t0_ns: int,
    t1_ns: int,
    columns: int,
) -> Lanes:
    """What to draw under `[t0_ns, t1_ns]`.

    Args:
        steps, phases, calls, modules: of a trace, or what a summary keeps of them.
        t0_ns, t1_ns: epoch nanoseconds, t0 < t1.
        columns: the screen's width; what is narrower than one of its columns is left out.
    """
    forward = calls.phase != Phase.BACKWARD
    parent = _called_parents(modules, calls.name[forward & (calls.name >= 0)])
    levels = [*_by_depth(calls, np.flatnonzero(forward & (calls.name >= 0)))]
    nodes = np.flatnonzero(~forward & (calls.name >= 0))
    stretch = _stretch(calls.start_ns[nodes], steps, phases)
    for depth, owner in enumerate(_owners_by_depth(calls.name[nodes].astype(np.int64), parent)):
        merged = _merged(calls, nodes, owner, stretch, depth)
        if depth == len(levels):
            levels.append(_NO_SPANS)
        levels[depth] = _in_order(levels[depth], merged)
    omitted, shown = 0, []
    for level in levels:
        inside = _touching(level, t0_ns, t1_ns)
        wide = inside[(level.end_ns[inside] - level.start_ns[inside]) * columns >= t1_ns - t0_ns]
        omitted += len(inside) - len(wide)
        shown.append(_rows(level, wide))
    while shown and not len(shown[-1]):
        shown.pop()
    return Lanes(
        steps=tuple(step for step in steps if step.start_ns <= t1_ns and step.end_ns >= t0_ns),
        phases=_rows(phases, _touching(phases, t0_ns, t1_ns)),
        modules=tuple(shown),
        omitted=omitted,
    )


def _called_parents(modules: Sequence[Module], called: np.ndarray) -> Int64:
    """The nearest enclosing module that is itself called, so that both directions lie at one depth.

    Lists and other containers are never called: no forward lane has them.
    """
    parent = np.array([module.parent for module in modules], np.int64)
    if not len(called):
        return parent
    is_called = np.zeros(len(parent) + 1, bool)
    is_called[called] = True
    is_called[-1] = True  # where row -1, "none", is looked up
    while not (settled := is_called[parent]).all():
        parent = np.where(settled, parent, parent[parent])
    return parent


def _touching(spans: Spans, t0_ns: int, t1_ns: int) -> Int64:
    return np.flatnonzero((spans.start_ns <= t1_ns) & (spans.end_ns >= t0_ns))


def _by_depth(calls: Spans, rows: Int64) -> list[Spans]:
    deepest = int(calls.depth[rows].max()) if len(rows) else -1
    return [_rows(calls, rows[calls.depth[rows] == depth]) for depth in range(deepest + 1)]


def _owners_by_depth(module: Int64, parent: Int64) -> list[Int64]:
    """For each depth of the module tree, the module of that depth around each row; -1 where it is deeper."""
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
    """A number that changes from one step or phase to the next: no span is merged across it."""
    begins = np.array([step.start_ns for step in steps], np.int64)
    edges = np.sort(np.concatenate((begins, phases.start_ns)))
    return np.searchsorted(edges, start_ns, side="right")


def _merged(calls: Spans, nodes: Int64, owner: Int64, stretch: Int64, depth: int) -> Spans:
    if not len(nodes):
        return _NO_SPANS
    changes = (owner[1:] != owner[:-1]) | (stretch[1:] != stretch[:-1])
    first = np.concatenate(([0], np.flatnonzero(changes) + 1))
    end_ns = np.maximum.reduceat(calls.end_ns[nodes], first)
    kept = owner[first] >= 0
    return Spans(
        start_ns=calls.start_ns[nodes][first][kept],
        end_ns=end_ns[kept],
        name=owner[first][kept].astype(np.int32),
        depth=np.full(int(kept.sum()), depth, np.int32),
        phase=np.full(int(kept.sum()), Phase.BACKWARD, np.uint8),
    )


def _in_order(a: Spans, b: Spans) -> Spans:
    both = Spans(*(np.concatenate((getattr(a, name), getattr(b, name))) for name in Spans.__slots__))
    return _rows(both, np.argsort(both.start_ns, kind="stable"))


def _rows(spans: Spans, rows: Int64) -> Spans:
    return Spans(*(getattr(spans, name)[rows] for name in Spans.__slots__))
