"""The data of the HTML report: every allocation and free of each device, and their divisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.divisions import By, breakdown, codes
from tb_memplugin.analysis.moments import LiveAllocation, moment
from tb_memplugin.analysis.oom import failed_requests
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.analysis.source_lines import NO_STACK
from tb_memplugin.analysis.sums import sums
from tb_memplugin.exports.changes import Changes, changes_of
from tb_memplugin.exports.packed import pack, pack_steps
from tb_memplugin.exports.recorded import first_time, is_used, times_are_known
from tb_memplugin.exports.report_lanes import lanes_of
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import NOT_NAMED, Int64

Json = dict[str, Any]

VERSION = 1
SHOWN_KEYS = 10
"""How many parts get a color of their own; all others share one band."""

OTHERS = "(others)"
PEAK_ROWS = 300
"""How many parts the table at the peak lists; all others share one row."""

LARGEST = 25
ENUMERATED = ("category", "phase")
"""Divisions with few keys, all of which are shown in their own order."""


@dataclass(frozen=True, slots=True)
class Division:
    """A way to divide memory, and its display name."""

    by: By | Rules
    label: str

    @property
    def kind(self) -> str:
        """The name by which the page picks colors."""
        return self.by if isinstance(self.by, str) else "rules"


def report_data(trace: MemoryTrace, divisions: Sequence[Division], title: str) -> Json:
    """Return everything that the page shows, ready for JSON.

    Times are nanoseconds since `epoch_ns`, the first time in the trace; `event` is an index into the trace's
    events, -1 for the moment before the first.
    """
    epoch = first_time(trace)
    devices = [
        _device(trace, row, divisions, epoch) for row in range(len(trace.devices)) if is_used(trace, row)
    ]
    return {
        "version": VERSION,
        "title": title,
        "source": trace.source,
        "epoch_ns": str(epoch),
        "timed": times_are_known(trace),
        "events": len(trace.events),
        "devices": devices,
        "notes": list(trace.notes),
        "properties": dict(trace.properties),
    }


def _device(trace: MemoryTrace, row: int, divisions: Sequence[Division], epoch: int) -> Json:
    changes = changes_of(trace, row)
    live = trace.live(row)
    peak = int(np.argmax(live)) - 1
    top = moment(trace, row, peak, largest=0)
    device = trace.devices[row]
    return {
        "name": device.name,
        "capacity": device.capacity,
        "product": device.product,
        "time": pack_steps(trace.events.time_ns[changes.event] - epoch),
        "event": pack_steps(changes.event),
        "change": pack(changes.change),
        "reserved": _reserved(trace, row, epoch),
        "start_bytes": int(live[0]),
        "end_bytes": int(live[-1]),
        "peak": {"event": peak, "time_ns": max(0, top.time_ns - epoch), "bytes": top.bytes},
        "lanes": lanes_of(trace, row, epoch),
        "divisions": [_division(trace, row, division, changes, peak) for division in divisions],
        "largest": _largest(trace, row, peak, epoch),
        "failed": [
            [oom.event, int(trace.events.time_ns[oom.event]) - epoch, oom.requested_bytes]
            for oom in (trace.ooms[number] for number in failed_requests(trace, row))
        ],
    }


def _reserved(trace: MemoryTrace, device: int, epoch: int) -> Json | None:
    """Return the reserved bytes at every change; None if they are not known."""
    reserved = trace.reserved(device)
    if reserved is None:
        return None
    changes = np.flatnonzero(np.diff(reserved))
    return {
        "start_bytes": int(reserved[0]),
        "time": pack_steps(trace.events.time_ns[changes] - epoch),
        "event": pack_steps(changes),
        "bytes": pack_steps(reserved[changes + 1]),
    }


def _division(trace: MemoryTrace, device: int, division: Division, changes: Changes, peak: int) -> Json:
    part, names = codes(trace, division.by)
    own = trace.allocations.device == device
    keys, code = _folded(part, names, own, changes, trace, division.kind)
    at_start = own & (trace.allocations.born < 0)
    start = sums(code[at_start], trace.allocations.bytes[at_start], len(keys))
    parts = breakdown(trace, device, peak, division.by)
    rest = parts[PEAK_ROWS:]
    return {
        "by": division.kind,
        "label": division.label,
        "keys": keys,
        "start": start.tolist(),
        "code": pack(code[changes.block]),
        "peak": [[part.key, part.bytes, part.count] for part in parts[:PEAK_ROWS]],
        "peak_rest": [len(rest), sum(part.bytes for part in rest), sum(part.count for part in rest)],
    }


def _folded(
    part: Int64,
    names: tuple[str, ...],
    own: npt.NDArray[np.bool_],
    changes: Changes,
    trace: MemoryTrace,
    kind: str,
) -> tuple[list[str], Int64]:
    """Return the keys to draw, from the bottom, and the index of each allocation's key.

    The keys with the highest bytes at any time are kept, the others share one key. Keys with the same name
    are merged.
    """
    used = np.flatnonzero(np.bincount(part[own], minlength=len(names)))
    if kind in ENUMERATED:
        shown = used.tolist()
    else:
        highest = _highest(part, len(names), changes, own, trace)
        shown = used[np.argsort(-highest[used], kind="stable")].tolist()
    key_of: dict[str, int] = {}
    table = np.zeros(len(names), np.int64)
    for row in shown:
        name = names[row]
        full = len(key_of) >= SHOWN_KEYS and kind not in ENUMERATED
        if name not in key_of and not full:
            key_of[name] = len(key_of)
        table[row] = key_of.get(name, -1)
    keys = list(key_of)
    if (table[used] < 0).any():
        table[table < 0] = len(keys)
        keys.append(OTHERS)
    return keys, table[part]


def _highest(
    part: Int64, names: int, changes: Changes, own: npt.NDArray[np.bool_], trace: MemoryTrace
) -> Int64:
    """Return the most bytes that each key ever has: int64, shape (names,)."""
    at_start = own & (trace.allocations.born < 0)
    highest = sums(part[at_start], trace.allocations.bytes[at_start], names)
    key = part[changes.block]
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    if not len(first):
        return highest
    level = np.cumsum(changes.change[order])
    before = np.concatenate(([0], level))[first]
    rise = np.maximum.reduceat(level, first) - before
    owner = key[order][first]
    highest[owner] += np.maximum(rise, 0)
    return highest


def _largest(trace: MemoryTrace, device: int, event: int, epoch: int) -> list[Json]:
    """Return the largest live blocks after an event, each with the source line that stands for its stack."""
    largest = moment(trace, device, event, largest=LARGEST).largest
    line, lines = codes(trace, "line", np.array([block.row for block in largest], np.intp))
    return [_allocation(block, lines[at], epoch) for block, at in zip(largest, line.tolist(), strict=True)]


def _allocation(block: LiveAllocation, line: str, epoch: int) -> Json:
    return {
        "bytes": block.bytes,
        "address": f"{block.address:#x}" if block.address else None,
        "category": block.category.key,
        "module": None if block.module == NOT_NAMED else block.module,
        "operator": block.operator,
        "name": block.name,
        "line": None if line == NO_STACK else line,
        "phase": block.phase.key,
        "born_ns": None if block.born_ns is None else block.born_ns - epoch,
        "freed_ns": None if block.freed_ns is None else block.freed_ns - epoch,
    }
