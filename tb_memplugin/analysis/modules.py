"""The module table of a step: what each module holds at the peak, and what it did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tb_memplugin.analysis.breakdown import sums
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import Bool, Int64

_CATEGORIES = len(Category)


@dataclass(frozen=True, slots=True)
class ModuleTable:
    """Owners of bytes in columns of one length, parents before children.

    Attributes:
        rows: int64 (n,), rows of the trace's `modules`; -1 stands for "(not named)", where a trace has
            blocks without a row. Modules come always, other keys where they hold or allocate something.
        parent: int64 (n,), places in this table, -1 for roots.
        own: int64 (n, 12), bytes at the event by `Category`, without those of inner modules.
        inclusive: int64 (n, 12), with them. Roots sum to the live bytes.
        highest: int64 (n, 12), each category's highest inclusive bytes within the step; None if not asked.
        peak_inside: int64 (n,), highest live bytes of the device while the module or one inside it
            ran, -1 if none did.
        calls: int64 (n,), forward calls that began in the step.
        allocations, allocated_bytes: int64 (n,), born in the step, inclusive.
        forward_ns, backward_ns: int64 (n,), time in forward calls; time in autograd nodes, inclusive.
    """

    rows: Int64
    parent: Int64
    own: Int64
    inclusive: Int64
    highest: Int64 | None
    peak_inside: Int64
    calls: Int64
    allocations: Int64
    allocated_bytes: Int64
    forward_ns: Int64
    backward_ns: Int64


def module_table(
    trace: MemoryTrace, device: int, step: int, event: int, *, with_highest: bool = False
) -> ModuleTable:
    """The owners of a device's memory at an event of a step.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        step: row in `trace.steps`.
        event: index of the event at which bytes are divided (the step's peak, say).
        with_highest: also find each category's highest within the step; costs a sort per tree level.
    """
    tree = _Tree.of(trace)
    first, end = trace.step_events(step)
    blocks = trace.allocations
    alive = blocks.alive_at(event, device)
    own = _by_owner_and_category(tree, blocks.module[alive], blocks.category[alive], blocks.bytes[alive])
    born = slice(*np.searchsorted(blocks.born, (first, end)))
    mine = np.flatnonzero(blocks.device[born] == device)
    owner = tree.place(blocks.module[born][mine])
    allocations = tree.inclusive(np.bincount(owner, minlength=tree.size))
    allocated = tree.inclusive(sums(owner, blocks.bytes[born][mine], tree.size))
    calls, forward_ns, backward_ns = _times(trace, tree, step)
    table = ModuleTable(
        rows=np.arange(tree.size),
        parent=tree.parent,
        own=own,
        inclusive=tree.inclusive(own),
        highest=_highest(trace, tree, device, first, end) if with_highest else None,
        peak_inside=_peak_inside(trace, tree, device, first, end),
        calls=calls,
        allocations=allocations,
        allocated_bytes=allocated,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
    )
    return _without_idle(trace, table)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The parents of all owners, by level; the last place stands for "no module" (row -1)."""

    parent: Int64
    levels: tuple[Int64, ...]
    """Places by depth, outermost first."""

    @classmethod
    def of(cls, trace: MemoryTrace) -> _Tree:
        return cls(*_parent_and_levels(tuple(module.parent for module in trace.modules)))

    @property
    def size(self) -> int:
        return len(self.parent)

    def place(self, module: np.ndarray) -> Int64:
        """Places of modules' rows: the last one for -1."""
        return np.where(module < 0, self.size - 1, module).astype(np.int64)

    def inclusive(self, own: Int64) -> Int64:
        """Own values plus those of everything inside, summed along the first axis."""
        total = own.astype(np.int64, copy=True)
        for level in self.levels[:0:-1]:
            np.add.at(total, self.parent[level], total[level])
        return total

    def filled(self, own: Int64, known: Bool) -> Int64:
        """Own values where known; elsewhere (a container is never called) the sum of those just inside."""
        total = np.where(known, own, 0)
        for level in self.levels[:0:-1]:
            open_level = level[~known[self.parent[level]]]
            np.add.at(total, self.parent[open_level], total[open_level])
        return total

    def highest_inside(self, own: Int64) -> Int64:
        """The highest of the own value and those of everything inside."""
        top: Int64 = own.copy()
        for level in self.levels[:0:-1]:
            np.maximum.at(top, self.parent[level], top[level])
        return top

    def around(self) -> list[Int64]:
        """For each depth, the place of that depth that each place is or lies in, -1 if it is further out."""
        found = []
        for depth in range(len(self.levels)):
            outer = np.full(self.size, -1, np.int64)
            outer[self.levels[depth]] = self.levels[depth]
            for level in self.levels[depth + 1 :]:
                outer[level] = outer[self.parent[level]]
            found.append(outer)
        return found


@lru_cache(maxsize=8)
def _parent_and_levels(parents: tuple[int, ...]) -> tuple[Int64, tuple[Int64, ...]]:
    """Kept, because every step of a window asks for the same."""
    parent = np.array([*parents, -1], np.int64)
    levels = [np.flatnonzero(parent < 0)]
    while len(levels[-1]):
        levels.append(np.flatnonzero(np.isin(parent, levels[-1])))
    return parent, tuple(levels[:-1])


def _by_owner_and_category(tree: _Tree, module: np.ndarray, category: np.ndarray, size: Int64) -> Int64:
    key = tree.place(module) * _CATEGORIES + category
    return sums(key, size, tree.size * _CATEGORIES).reshape(tree.size, _CATEGORIES)


def _times(trace: MemoryTrace, tree: _Tree, step: int) -> tuple[Int64, Int64, Int64]:
    calls = trace.calls
    began = trace.steps[step].start_ns
    ended = trace.steps[step + 1].start_ns if step + 1 < len(trace.steps) else np.iinfo(np.int64).max
    here = slice(*np.searchsorted(calls.start_ns, (began, ended)))
    start, end, name, phase = calls.start_ns[here], calls.end_ns[here], calls.name[here], calls.phase[here]
    forward = phase == Phase.FORWARD
    count = np.bincount(name[forward], minlength=tree.size)
    own_forward = sums(name[forward].astype(np.int64), (end - start)[forward], tree.size)
    backward = np.flatnonzero(~forward)
    reach = np.maximum.accumulate(end[backward]) if len(backward) else end[backward]
    outer = backward[np.concatenate((backward[:1] >= 0, end[backward][1:] > reach[:-1]))]
    own_backward = sums(name[outer].astype(np.int64), (end - start)[outer], tree.size)
    return count, tree.filled(own_forward, count > 0), tree.inclusive(own_backward)


def _peak_inside(trace: MemoryTrace, tree: _Tree, device: int, first: int, end: int) -> Int64:
    """The highest level during any call, from range maxima over the live curve."""
    top = np.full(tree.size, -1, np.int64)
    if first == end:
        return top
    time, calls = trace.events.time_ns, trace.calls
    here = slice(*np.searchsorted(calls.start_ns, (time[first], time[end - 1] + 1)))
    low = np.searchsorted(time, calls.start_ns[here], side="left")
    high = np.searchsorted(time, calls.end_ns[here], side="right").clip(max=end)
    if not len(low):
        return top
    level = np.append(trace.live(device), np.iinfo(np.int64).min)
    ranges = np.stack((low, np.maximum(high, low) + 1), axis=1).ravel()
    np.maximum.at(top, calls.name[here], np.maximum.reduceat(level, ranges)[::2])
    return tree.highest_inside(top)


def _highest(trace: MemoryTrace, tree: _Tree, device: int, first: int, end: int) -> Int64:
    """Each category's highest inclusive bytes of each owner in a step, the state at its start included."""
    blocks = trace.allocations
    seen = np.flatnonzero((blocks.device == device) & (blocks.born < end) & (blocks.freed >= first))
    born, freed = np.maximum(blocks.born[seen], first - 1), np.minimum(blocks.freed[seen], end)
    size, category = blocks.bytes[seen], blocks.category[seen]
    highest = np.zeros((tree.size, _CATEGORIES), np.int64)
    owner = tree.place(blocks.module[seen])
    for around in tree.around():
        place = around[owner]
        there = np.flatnonzero(place >= 0)
        key = np.tile(place[there] * _CATEGORIES + category[there], 2)
        moment = np.concatenate((born[there], freed[there]))
        delta = np.concatenate((size[there], np.where(freed[there] < end, -size[there], 0)))
        order = np.lexsort((delta > 0, moment, key))
        key, moment = key[order], moment[order]
        level = np.cumsum(delta[order])
        starts = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        level -= np.repeat(np.concatenate(([0], level[starts[1:] - 1])), np.diff(np.append(starts, len(key))))
        top = np.maximum.reduceat(level, starts)
        np.maximum.at(highest.reshape(-1), key[starts], top)
    return highest


def _without_idle(trace: MemoryTrace, table: ModuleTable) -> ModuleTable:
    """Drop keys that are no modules and hold, allocate and ran nothing."""
    is_module = np.array([*(module.is_module for module in trace.modules), False])
    keep = np.flatnonzero(is_module | (table.allocations > 0) | table.inclusive.any(axis=1))
    place = np.full(len(is_module) + 1, -1, np.int64)
    place[keep] = np.arange(len(keep))
    rows = np.where(table.rows[keep] < len(trace.modules), table.rows[keep], -1)
    return ModuleTable(
        rows,
        place[table.parent[keep]],
        table.own[keep],
        table.inclusive[keep],
        None if table.highest is None else table.highest[keep],
        *(
            getattr(table, name)[keep]
            for name in (
                "peak_inside",
                "calls",
                "allocations",
                "allocated_bytes",
                "forward_ns",
                "backward_ns",
            )
        ),
    )
