"""The module table of a step: what each module holds at an event, and what it allocated and ran."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from tb_memplugin.analysis.columns import first_hits
from tb_memplugin.analysis.sums import sums
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import Bool, Int64

_CATEGORIES = len(Category)


@dataclass(frozen=True, slots=True)
class ModuleTable:
    """Modules and other owners of bytes, in columns of equal length; parents come before children.

    Attributes:
        rows: int64 (n,), rows of the trace's `modules`; -1 is "(not named)", for blocks without a module.
            Every module is included, other keys only if they hold or allocate something.
        parent: int64 (n,), indices into this table, -1 for roots.
        own: int64 (n, categories), bytes at the event by `Category`, without submodules.
        inclusive: int64 (n, categories), the same with submodules. The roots sum to the live bytes.
        highest: int64 (n, categories), the inclusive bytes at each owner's own highest moment in the step;
            None if not asked for. Owners have different moments, so their rows do not add up.
        highest_event: int64 (n,), the index of the event after which that was, the first of several; -1 is
            the moment before the first event. None if not asked for.
        inside: int64 (n, 2), the device's highest live bytes while the module or a submodule ran: in forward,
            and in backward; -1 if none ran.
        inside_call: int64 (n, 2), rows of the trace's `calls`: the outermost of those calls; -1 if none ran.
        calls: int64 (n,), forward calls that began in the step.
        allocations, allocated_bytes: int64 (n,), allocated in the step, inclusive.
        forward_ns, backward_ns: int64 (n,), time in forward calls, and in autograd nodes, inclusive.
    """

    rows: Int64
    parent: Int64
    own: Int64
    inclusive: Int64
    highest: Int64 | None
    highest_event: Int64 | None
    inside: Int64
    inside_call: Int64
    calls: Int64
    allocations: Int64
    allocated_bytes: Int64
    forward_ns: Int64
    backward_ns: Int64

    @property
    def peak_inside(self) -> Int64:
        """The device's highest live bytes while the module or a submodule ran: int64 (n,), -1 if none ran."""
        top: Int64 = self.inside.max(axis=1, initial=-1)
        return top


def module_table(
    trace: MemoryTrace, device: int, step: int, event: int, *, with_highest: bool = False
) -> ModuleTable:
    """Return the owners of a device's memory at an event of a step.

    Args:
        step: row in `trace.steps`.
        event: index of the event at which bytes are divided (the step's peak, say).
        with_highest: also compute `highest` and its events, which costs a sort per tree level.
    """
    tree = _Tree.of(trace)
    first, end = trace.step_events(step)
    blocks = trace.allocations
    alive = blocks.alive_at(event, device)
    own = _by_owner_and_category(tree, blocks.module[alive], blocks.category[alive], blocks.bytes[alive])
    born = slice(*np.searchsorted(blocks.born, (first, end)))
    own_births = np.flatnonzero(blocks.device[born] == device)
    owner = tree.index(blocks.module[born][own_births])
    allocations = tree.inclusive(np.bincount(owner, minlength=tree.size))
    allocated = tree.inclusive(sums(owner, blocks.bytes[born][own_births], tree.size))
    calls, forward_ns, backward_ns = _times(trace, tree, step)
    highest, highest_event = _highest(trace, tree, device, first, end) if with_highest else (None, None)
    inside, inside_call = _inside(trace, tree, device, step)
    table = ModuleTable(
        rows=np.arange(tree.size),
        parent=tree.parent,
        own=own,
        inclusive=tree.inclusive(own),
        highest=highest,
        highest_event=highest_event,
        inside=inside,
        inside_call=inside_call,
        calls=calls,
        allocations=allocations,
        allocated_bytes=allocated,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
    )
    return _without_idle(trace, table)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The tree of all owners; the last index stands for "no module" (row -1)."""

    parent: Int64
    levels: tuple[Int64, ...]
    """Indices by depth, roots first."""

    @classmethod
    def of(cls, trace: MemoryTrace) -> _Tree:
        return cls(*_parent_and_levels(tuple(module.parent for module in trace.modules)))

    @property
    def size(self) -> int:
        return len(self.parent)

    def index(self, module: np.ndarray) -> Int64:
        """Return the index of each module row; -1 gets the last index."""
        return np.where(module < 0, self.size - 1, module).astype(np.int64)

    def inclusive(self, own: Int64) -> Int64:
        """Return each owner's value plus those of everything inside it, summed along the first axis."""
        total = own.astype(np.int64, copy=True)
        for level in self.levels[:0:-1]:
            np.add.at(total, self.parent[level], total[level])
        return total

    def filled(self, own: Int64, has_own: Bool) -> Int64:
        """Return the own value if known, else the sum of the children's (containers are never called)."""
        total = np.where(has_own, own, 0)
        for level in self.levels[:0:-1]:
            open_level = level[~has_own[self.parent[level]]]
            np.add.at(total, self.parent[open_level], total[open_level])
        return total

    def highest_inside(self, own: Int64) -> Int64:
        """Return the highest of each owner's value and those of everything inside it."""
        top: Int64 = own.copy()
        for level in self.levels[:0:-1]:
            np.maximum.at(top, self.parent[level], top[level])
        return top

    def around(self) -> list[Int64]:
        """Return, for each depth, each owner's ancestor of that depth (or itself), -1 if it is less deep."""
        ancestors = []
        for depth in range(len(self.levels)):
            outer = np.full(self.size, -1, np.int64)
            outer[self.levels[depth]] = self.levels[depth]
            for level in self.levels[depth + 1 :]:
                outer[level] = outer[self.parent[level]]
            ancestors.append(outer)
        return ancestors


@lru_cache(maxsize=8)
def _parent_and_levels(parents: tuple[int, ...]) -> tuple[Int64, tuple[Int64, ...]]:
    """Return the parents and the levels of the tree, cached because every step of a window needs them."""
    parent = np.array([*parents, -1], np.int64)
    levels = [np.flatnonzero(parent < 0)]
    while len(levels[-1]):
        levels.append(np.flatnonzero(np.isin(parent, levels[-1])))
    return parent, tuple(levels[:-1])


def _by_owner_and_category(tree: _Tree, module: np.ndarray, category: np.ndarray, size: Int64) -> Int64:
    key = tree.index(module) * _CATEGORIES + category
    return sums(key, size, tree.size * _CATEGORIES).reshape(tree.size, _CATEGORIES)


def _calls_of(trace: MemoryTrace, step: int) -> slice:
    """Return the rows of the calls that began in a step."""
    began = trace.steps[step].start_ns
    ended = trace.steps[step + 1].start_ns if step + 1 < len(trace.steps) else np.iinfo(np.int64).max
    first, end = np.searchsorted(trace.calls.start_ns, (began, ended)).tolist()
    return slice(first, end)


def _times(trace: MemoryTrace, tree: _Tree, step: int) -> tuple[Int64, Int64, Int64]:
    calls, rows = trace.calls, _calls_of(trace, step)
    start, end, name, phase = calls.start_ns[rows], calls.end_ns[rows], calls.name[rows], calls.phase[rows]
    forward = phase == Phase.FORWARD
    count = np.bincount(name[forward], minlength=tree.size)
    own_forward = sums(name[forward].astype(np.int64), (end - start)[forward], tree.size)
    backward = np.flatnonzero(~forward)
    reach = np.maximum.accumulate(end[backward]) if len(backward) else end[backward]
    outer = backward[np.concatenate((backward[:1] >= 0, end[backward][1:] > reach[:-1]))]
    own_backward = sums(name[outer].astype(np.int64), (end - start)[outer], tree.size)
    return count, tree.filled(own_forward, count > 0), tree.inclusive(own_backward)


def _inside(trace: MemoryTrace, tree: _Tree, device: int, step: int) -> tuple[Int64, Int64]:
    """Return `inside` and `inside_call`, from range maxima of the live curve."""
    top, call = np.full((2, tree.size, 2), -1, np.int64)
    time, calls, in_step = trace.events.time_ns, trace.calls, _calls_of(trace, step)
    end = trace.step_events(step)[1]
    low = np.searchsorted(time, calls.start_ns[in_step], side="left")
    high = np.searchsorted(time, calls.end_ns[in_step], side="right").clip(max=end)
    if not len(low):
        return top, call
    level = np.append(trace.live(device)[low[0] : end + 1], np.iinfo(np.int64).min)
    ranges = np.stack((low, np.maximum(high, low) + 1), axis=1).ravel()
    peak = np.maximum.reduceat(level, ranges - low[0])[::2]
    by_peak = np.lexsort((calls.end_ns[in_step] - calls.start_ns[in_step], peak))
    is_backward = (calls.phase[in_step] != Phase.FORWARD)[by_peak].astype(np.int64)
    peak_index = np.full((tree.size, 2), -1, np.int64)
    np.maximum.at(peak_index, (calls.name[in_step][by_peak], is_backward), np.arange(len(by_peak)))
    peak_index = tree.highest_inside(peak_index)
    ran = peak_index >= 0
    top[ran] = peak[by_peak][peak_index[ran]]
    call[ran] = in_step.start + by_peak[peak_index[ran]]
    return top, call


def _highest(trace: MemoryTrace, tree: _Tree, device: int, first: int, end: int) -> tuple[Int64, Int64]:
    """Return `highest` and `highest_event` of a step; the moment before its first event counts."""
    blocks = trace.allocations
    overlaps = blocks.alive_between(first, end, device)
    born, freed = np.maximum(blocks.born[overlaps], first - 1), np.minimum(blocks.freed[overlaps], end)
    size, category = blocks.bytes[overlaps], blocks.category[overlaps]
    highest = np.zeros((tree.size, _CATEGORIES), np.int64)
    event = np.full(tree.size, first - 1, np.int64)
    owner = tree.index(blocks.module[overlaps])
    for around in tree.around():
        ancestor = around[owner]
        deep = np.flatnonzero(ancestor >= 0)
        if not len(deep):  # no module this deep, or deeper, has bytes in the step
            break
        key = np.tile(ancestor[deep], 2)
        moment = np.concatenate((born[deep], freed[deep]))
        delta = np.concatenate((size[deep], np.where(freed[deep] < end, -size[deep], 0)))
        order = np.lexsort((delta > 0, moment, key))
        key, moment = key[order], moment[order]
        level = np.cumsum(delta[order])
        starts = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        lengths = np.diff(np.append(starts, len(key)))
        level -= np.repeat(np.concatenate(([0], level[starts[1:] - 1])), lengths)
        event[key[starts]] = moment[first_hits(level, starts, np.maximum.reduceat(level, starts))[1]]
        then = event[ancestor[deep]]
        alive = deep[(born[deep] <= then) & (then < freed[deep])]
        highest += _by_owner_and_category(tree, ancestor[alive], category[alive], size[alive])
    return highest, event


def _without_idle(trace: MemoryTrace, table: ModuleTable) -> ModuleTable:
    """Drop keys that are no modules and neither hold nor allocate anything."""
    is_module = np.array([*(module.is_module for module in trace.modules), False])
    keep = np.flatnonzero(is_module | (table.allocations > 0) | table.inclusive.any(axis=1))
    new_index = np.full(len(is_module) + 1, -1, np.int64)
    new_index[keep] = np.arange(len(keep))
    rows = np.where(table.rows[keep] < len(trace.modules), table.rows[keep], -1)
    columns = {each.name: getattr(table, each.name) for each in fields(table)}
    kept: dict[str, Any] = {name: None if each is None else each[keep] for name, each in columns.items()}
    return ModuleTable(**{**kept, "rows": rows, "parent": new_index[table.parent[keep]]})
