"""Curves for a screen: the exact lowest and highest value in every pixel column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.breakdown import Divided, codes, sums
from tb_memplugin.analysis.module_groups import MOST_GROUPS, OTHER_MODULES, ModuleGroups
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.tables import Int64

OTHERS = "(others)"
SHOWN_MODULES = MOST_GROUPS
"""Modules (stacks, lines, ...) that get a band of their own; the rest share one exact band."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A device's live bytes over `[t0_ns, t1_ns]`, in columns of equal width.

    `low`, `high`, `reserved`: int64, shape (columns,); `reserved` is None where there is none.
    `stacks`: int64, shape (keys, columns), the state at the moment of each column's high: it sums to it.
    """

    t0_ns: int
    t1_ns: int
    low: Int64
    high: Int64
    reserved: Int64 | None
    keys: tuple[str, ...]
    stacks: Int64
    peak_event: int
    peak_time_ns: int
    peak_bytes: int
    peak_column: int


def curve(
    trace: MemoryTrace, device: int, t0_ns: int, t1_ns: int, columns: int, by: Divided = "category"
) -> Curve:
    """Reduce a device's live bytes to pixel columns without losing the peak.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        t0_ns, t1_ns: epoch nanoseconds, t0 < t1. Column c covers the c-th of `columns` equal parts.
        columns: how many pixel columns.
        by: what the stacks divide by.
    """
    edges = t0_ns + (np.arange(columns + 1, dtype=np.int64) * (t1_ns - t0_ns)) // columns
    cuts = np.searchsorted(trace.events.time_ns, edges, side="left")
    cuts[-1] = np.searchsorted(trace.events.time_ns, t1_ns, side="right")
    live = trace.live(device)
    low, high, at = extremes(live, cuts)
    keys, stacks = _stacks(trace, device, at, by)
    top = int(np.argmax(high))
    event = int(at[top]) - 1
    inside = event >= 0 and int(trace.events.time_ns[event]) >= t0_ns
    return Curve(
        t0_ns=t0_ns,
        t1_ns=t1_ns,
        low=low,
        high=high,
        reserved=_reserved(trace, device, cuts),
        keys=keys,
        stacks=stacks,
        peak_event=event,
        peak_time_ns=int(trace.events.time_ns[event]) if inside else t0_ns,
        peak_bytes=int(high[top]),
        peak_column=top,
    )


def extremes(level: Int64, cuts: Int64) -> tuple[Int64, Int64, Int64]:
    """Lowest, highest and the place of the highest in each column.

    A column spans the level on entry (`cuts[c]`, which holds after the event before it) up to the
    level after its last event. `level` has one entry more than there are events.
    """
    first, last = cuts[:-1], cuts[1:]
    low, high, at = level[first].copy(), level[first].copy(), first.astype(np.int64)
    busy = np.flatnonzero(last > first)
    if not len(busy):
        return low, high, at
    inside = level[first[busy[0]] : last[busy[-1]] + 1]
    base = first[busy[0]]
    starts = first[busy] - base
    low[busy] = np.minimum(np.minimum.reduceat(inside, starts), level[last[busy]])
    high[busy] = np.maximum(np.maximum.reduceat(inside, starts), level[last[busy]])
    at[busy] = _first_places(inside, starts, last[busy] - base, high[busy]) + base
    return low, high, at


def highest(level: Int64, cuts: Int64) -> Int64:
    """The highest in each column, as `extremes` finds it."""
    first, last = cuts[:-1], cuts[1:]
    ranges = np.stack((first, last), axis=1).ravel()
    top: Int64 = np.maximum(np.maximum.reduceat(level, ranges)[::2], level[last])
    return top


def _first_places(level: Int64, starts: Int64, ends: Int64, wanted: Int64) -> Int64:
    """The first index in each closed range [starts, ends] at which the level is the wanted one."""
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, ends[-1] + 1)))
    hits = np.flatnonzero(level[: len(group)] == wanted[group])
    owner = group[hits]  # ascending: the first hit of a group stands where the group changes
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    places: Int64 = ends.astype(np.int64).copy()
    places[owner[first]] = hits[first]
    return places


def _reserved(trace: MemoryTrace, device: int, cuts: Int64) -> Int64 | None:
    if not trace.devices[device].has_reserved:
        return None
    here = np.flatnonzero((trace.events.device == device) & (trace.events.reserved >= 0))
    first = trace.devices[device].reserved_at_start
    if first is None:
        if not len(here):
            return None
        first = int(trace.events.reserved[here[0]])
    level = np.concatenate(([first], trace.events.reserved[here]))
    return highest(level, np.searchsorted(here, cuts))


def _stacks(trace: MemoryTrace, device: int, at: Int64, by: Divided) -> tuple[tuple[str, ...], Int64]:
    """The live bytes of each key at each place (an index into `live`)."""
    blocks = trace.allocations
    part, names = codes(trace, by)
    part, names = _folded(trace, device, part, names, int(at[np.argmax(trace.live(device)[at])]) - 1, by)
    here = (blocks.device == device) & (blocks.born < at.max()) & (blocks.freed >= at.min())
    born, freed, size, part = blocks.born[here], blocks.freed[here], blocks.bytes[here], part[here]
    stacks = np.zeros((len(names), len(at)), np.int64)
    order = np.argsort(at, kind="stable")
    places = at[order]
    # A block counts at every place p with born < p <= freed: added at the first, taken off behind the last.
    enter = np.searchsorted(places, born, side="right")
    leave = np.searchsorted(places, freed, side="right")
    seen = enter < leave
    width = len(places) + 1
    delta = sums(part[seen] * width + enter[seen], size[seen], len(names) * width)
    delta -= sums(part[seen] * width + leave[seen], size[seen], len(names) * width)
    stacks[:, order] = np.cumsum(delta.reshape(len(names), width), axis=1)[:, :-1]
    keeps_all = by == "module" or isinstance(by, ModuleGroups)
    used = np.arange(len(names)) if keeps_all else np.flatnonzero(stacks.any(axis=1))
    return tuple(names[row] for row in used), stacks[used]


def _folded(
    trace: MemoryTrace, device: int, part: Int64, names: tuple[str, ...], event: int, by: Divided
) -> tuple[Int64, tuple[str, ...]]:
    """Keep the largest modules (stacks, lines, ...) at an event, and give all others one key."""
    if isinstance(by, (Rules, ModuleGroups)) or by in ("category", "phase") or len(names) <= SHOWN_MODULES:
        return part, names
    alive = trace.allocations.alive_at(event, device)
    total = sums(part[alive], trace.allocations.bytes[alive], len(names))
    shown = np.argsort(-total, kind="stable")[:SHOWN_MODULES]
    shown = shown[total[shown] > 0]
    place = np.full(len(names), len(shown), np.int64)
    place[shown] = np.arange(len(shown))
    return place[part], (*(names[row] for row in shown), OTHER_MODULES if by == "module" else OTHERS)


def category_columns(trace: MemoryTrace, device: int, t0_ns: int, t1_ns: int, columns: int) -> Curve:
    """The coarse curve that a summary keeps: like `curve` by category, with all categories in order."""
    drawn = curve(trace, device, t0_ns, t1_ns, columns, "category")
    stacks = np.zeros((len(Category), columns), np.int64)
    keys = [category.key for category in Category]
    stacks[[keys.index(key) for key in drawn.keys]] = drawn.stacks
    return Curve(
        **{**{name: getattr(drawn, name) for name in Curve.__slots__}, "keys": tuple(keys), "stacks": stacks}
    )
