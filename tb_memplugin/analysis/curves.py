"""Memory curves reduced to pixel columns, with the exact lowest and highest value of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.analysis.columns import Cuts, event_cuts, extremes, highest, time_cuts
from tb_memplugin.analysis.divisions import DIVISIONS, Chosen, Divided, codes
from tb_memplugin.analysis.module_groups import MOST_GROUPS, OTHER_MODULES, ModuleGroups
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.analysis.sums import levels_of_groups, sums
from tb_memplugin.trace import Category, MemoryTrace
from tb_memplugin.trace.indexes import INDEXED, LEAST_BITS, PartSums
from tb_memplugin.trace.result import Column, Tabular
from tb_memplugin.trace.tables import Int64

OTHERS = "(others)"
SHOWN_MODULES = MOST_GROUPS
"""How many modules (stacks, lines, ...) get a band of their own; the others share one band."""

WIDE = 2
"""From how many times the distance of the moments of `PartSums` on a column is summed by them."""

_NO_ROWS = slice(0, 0)


@dataclass(frozen=True, slots=True)
class Curve(Tabular):
    """A device's live bytes over `[t0_ns, t1_ns]`, in columns of equal width: of time, or of events.

    `first_event`, `end_event`: the first event in it, and the one after its last.
    `low`, `high`, `reserved`: int64, shape (columns,); `reserved` is None if it is not known.
    `stacks`: int64, shape (keys, columns), the bytes of each key at the moment of a column's highest level,
    to which they sum.
    """

    t0_ns: int
    t1_ns: int
    first_event: int
    end_event: int
    low: Int64
    high: Int64
    reserved: Int64 | None
    keys: tuple[str, ...]
    stacks: Int64
    peak_event: int
    peak_time_ns: int
    peak_bytes: int
    peak_column: int

    def columns(self) -> dict[str, Column]:
        """Return a row for each column: its levels, and the bytes of each key, which sum to `high_bytes`."""
        reserved: dict[str, Column] = {} if self.reserved is None else {"reserved_bytes": self.reserved}
        levels: dict[str, Column] = {"low_bytes": self.low, "high_bytes": self.high, **reserved}
        return levels | {f"{key}_bytes": row for key, row in zip(self.keys, self.stacks, strict=True)}


def curve(
    trace: MemoryTrace, device: int, t0_ns: int, t1_ns: int, columns: int, by: Divided = "category"
) -> Curve:
    """Reduce a device's live bytes to pixel columns without losing the peak.

    Args:
        t0_ns, t1_ns: epoch nanoseconds, t0 < t1. Column c covers the c-th of `columns` equal parts.
    """
    return _drawn(trace, device, (t0_ns, t1_ns), time_cuts(trace, t0_ns, t1_ns, columns), by)


def event_curve(
    trace: MemoryTrace, device: int, first: int, end: int, columns: int, by: Divided = "category"
) -> Curve:
    """Return the curve over the events from `first` to before `end`, all of equal width.

    Event e spans e to e + 1; `t0_ns` and `t1_ns` are the times of the first and the last of these events.
    """
    time_ns = trace.events.time_ns
    if len(time_ns):
        times = tuple(int(time_ns[min(max(event, 0), len(time_ns) - 1)]) for event in (first, end - 1))
    else:
        times = (trace.steps[0].start_ns, trace.steps[0].end_ns)
    return _drawn(trace, device, (times[0], times[1]), event_cuts(trace, first, end, columns), by)


def _drawn(trace: MemoryTrace, device: int, times: tuple[int, int], cuts: Cuts, by: Divided) -> Curve:
    low, high, at = extremes(trace.live(device), cuts, trace.live_runs(device))
    keys, stacks = _stacks(trace, device, at, by)
    top = int(np.argmax(high))
    event = int(at[top]) - 1
    inside = event >= int(cuts[0])
    reserved = trace.reserved(device)
    return Curve(
        t0_ns=times[0],
        t1_ns=times[1],
        first_event=int(cuts[0]),
        end_event=int(cuts[-1]),
        low=low,
        high=high,
        reserved=None if reserved is None else highest(reserved, cuts, trace.reserved_runs(device)),
        keys=keys,
        stacks=stacks,
        peak_event=event,
        peak_time_ns=int(trace.events.time_ns[event]) if inside else times[0],
        peak_bytes=int(high[top]),
        peak_column=top,
    )


def _stacks(trace: MemoryTrace, device: int, at: Int64, by: Divided) -> tuple[tuple[str, ...], Int64]:
    """Return the live bytes of each key at each index into `live`."""
    top = int(np.argmax(trace.live(device)[at]))
    table = _summed(trace, device, at, by)
    if table is None:
        stacks, names = _stacks_of_blocks(trace, device, at, top, by)
    else:
        stacks, (_, names) = table.at(at), codes(trace, by, _NO_ROWS)
        if _folds(names, by):
            parts, (key_of, names) = stacks, _folded(stacks[:, top], names, by)
            stacks = np.zeros((len(names), len(at)), np.int64)
            np.add.at(stacks, key_of, parts)
    keeps_all = by == "module" or isinstance(by, ModuleGroups)
    used = np.arange(len(names)) if keeps_all else np.flatnonzero(stacks.any(axis=1))
    return tuple(names[row] for row in used), stacks[used]


def _summed(trace: MemoryTrace, device: int, at: Int64, by: Divided) -> PartSums | None:
    """Return sums by part that answer faster than a look at the blocks, None where the columns are narrow."""
    events, wide = int(at[-1] - at[0]), len(at) * WIDE
    if len(trace.allocations) < INDEXED or events < wide << LEAST_BITS or by not in DIVISIONS:
        return None
    table = trace.part_sums(device, by, lambda rows: codes(trace, by, rows))
    return table if events >= wide << table.bits else None


def _stacks_of_blocks(
    trace: MemoryTrace, device: int, at: Int64, top: int, by: Divided
) -> tuple[Int64, tuple[str, ...]]:
    blocks = trace.allocations
    near, enter, leave = blocks.alive_after(at - 1, device)
    size = blocks.bytes[near]
    part, names = codes(trace, by, near)
    if _folds(names, by):
        at_top = np.where((enter <= top) & (top < leave), size, 0)
        key_of, names = _folded(sums(part, at_top, len(names)), names, by)
        part = key_of[part]
    return levels_of_groups(part, size, enter, leave, (len(names), len(at))), names


def _folds(names: tuple[str, ...], by: Divided) -> bool:
    """Return whether only the largest parts (modules, stacks, lines, ...) have a key of their own."""
    return not (isinstance(by, (Rules, ModuleGroups)) or by in ("category", "phase")) and (
        len(names) > SHOWN_MODULES
    )


def _folded(total: Int64, names: tuple[str, ...], by: Divided) -> tuple[Int64, tuple[str, ...]]:
    """Return the key of each part: the parts with the most bytes have their own, and all others share one."""
    shown = np.argsort(-total, kind="stable")[:SHOWN_MODULES]
    shown = shown[total[shown] > 0]
    key_of = np.full(len(names), len(shown), np.int64)
    key_of[shown] = np.arange(len(shown))
    return key_of, (*(names[row] for row in shown), OTHER_MODULES if by == "module" else OTHERS)


def category_columns(trace: MemoryTrace, device: int, t0_ns: int, t1_ns: int, columns: int) -> Curve:
    """Return the coarse curve of a summary: `curve` by category, with all categories in order."""
    drawn = curve(trace, device, t0_ns, t1_ns, columns, "category")
    stacks = np.zeros((len(Category), columns), np.int64)
    keys = [category.key for category in Category]
    stacks[[keys.index(key) for key in drawn.keys]] = drawn.stacks
    return replace(drawn, keys=tuple(keys), stacks=stacks)


def profile_over_time(
    trace: MemoryTrace, device: int, by: Chosen = "category", columns: int = 1_000
) -> Curve:
    """Return `curve` over the whole window: from the first event of any device to the last."""
    time = trace.events.time_ns
    first, last = (int(time[0]), int(time[-1])) if len(time) else (0, 0)
    return curve(trace, device, first, max(last, first + 1), columns, by)
