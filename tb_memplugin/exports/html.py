"""One HTML page that shows live bytes over time in several divisions, without a server or a network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.advice_rules import Advice, advice, heading
from tb_memplugin.analysis.annotations import annotation_ranges
from tb_memplugin.analysis.divisions import By, Chosen, codes, parts_of
from tb_memplugin.analysis.lanes import lanes, what_ran
from tb_memplugin.analysis.moments import LiveAllocation, largest_rows, live_allocation
from tb_memplugin.analysis.oom import failed_requests
from tb_memplugin.analysis.source_lines import NO_STACK
from tb_memplugin.analysis.sums import sums
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.json import PHASES, spans_json, step_json
from tb_memplugin.exports.output import replacing
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import ResultTable
from tb_memplugin.trace.tables import NOT_NAMED, Int64, Rows


@dataclass(frozen=True, slots=True)
class Plot:
    """What to draw.

    Attributes:
        first, last: the first and the last event, of any device; the moment before the first is drawn, too.
        sampling_rate: draw the level after every so many events of a device, and at its peak. Blocks that
            were allocated and freed between two of them are left out.
        filter_freed: leave out blocks that were freed by the last event.
        allocation_order: stack the parts from the bottom in the order in which they first allocated, in place
            of their size.

    Raises:
        MemPluginError: the sampling rate is below 1, or the range is empty.
    """

    first: int = 0
    last: int = sys.maxsize
    sampling_rate: int = 1
    filter_freed: bool = False
    allocation_order: bool = False

    def __post_init__(self) -> None:
        if self.sampling_rate < 1:
            raise MemPluginError(
                "The sampling rate must be 1 or more.", where="sampling rate", fix="1 draws every event."
            )
        if self.first < 0 or self.last < self.first - 1:
            raise MemPluginError("The range of events is empty.", where="range", fix="Begin before it ends.")

    def note(self, trace: MemoryTrace) -> str:
        """Say what is not drawn; "" if everything is."""
        count = len(trace.events)
        parts = []
        if self.first > 0 or self.last < count - 1:
            parts.append(f"events {self.first:,} to {min(self.last, count - 1):,} of {count:,}")
        if self.sampling_rate > 1:
            parts.append(f"the level after every {self.sampling_rate:,} events of a device, and its peak")
        if self.filter_freed:
            parts.append("blocks that were not freed by the last event")
        return f"This page shows only: {'; '.join(parts)}." if parts else ""


@dataclass(frozen=True, slots=True)
class Changes:
    """One row per change: the row of `trace.allocations`, the event, and the signed bytes."""

    block: Rows
    event: Int64
    change: Int64


@dataclass(frozen=True, slots=True)
class Drawn:
    """The blocks of a device that are drawn; columns of equal length.

    `rows` are rows of `trace.allocations`. A block is drawn after the events `born` to before `freed`: `born`
    is -1 if that is from the start, and `freed` is the number of events if it is to the end. `bytes`: int64.
    `before`: the event before the first that is drawn, -1 at the start of the window.
    """

    rows: Rows
    born: Int64
    freed: Int64
    bytes: Int64
    events: int
    before: int

    @property
    def start_bytes(self) -> int:
        """The bytes before the first event that is drawn."""
        return int(self.bytes[self.born < 0].sum())

    @property
    def at_start(self) -> Rows:
        """The rows of `trace.allocations` drawn before the first event."""
        return self.rows[self.born < 0]

    def changes(self) -> Changes:
        """Return the changes of the level. At the same event, frees come before allocations."""
        born, freed = np.flatnonzero(self.born >= 0), np.flatnonzero(self.freed < self.events)
        block = np.concatenate((self.rows[freed], self.rows[born]))
        event = np.concatenate((self.freed[freed], self.born[born]))
        change = np.concatenate((-self.bytes[freed], self.bytes[born]))
        order = np.argsort(event, kind="stable")
        return Changes(block[order], event[order], change[order])

    def peak(self, changes: Changes) -> tuple[int, int]:
        """Return the highest level in bytes, and the first event that reaches it; `before` at the start."""
        level = np.cumsum(changes.change) + self.start_bytes
        ends = np.flatnonzero(np.diff(changes.event, append=self.events))
        top = int(np.argmax(level[ends])) if len(ends) else 0
        if not len(ends) or level[ends[top]] <= self.start_bytes:
            return self.start_bytes, self.before
        return int(level[ends[top]]), int(changes.event[ends[top]])

    def alive_at(self, event: int) -> Rows:
        """Return the rows of `trace.allocations` that are drawn after an event."""
        return self.rows[(self.born <= event) & (self.freed > event)]


def drawn(trace: MemoryTrace, device: int, plot: Plot | None = None) -> Drawn:
    """Return the blocks of a device (its row) that are drawn; by default all."""
    plot = plot or Plot()
    blocks, count = trace.allocations, len(trace.events)
    first, end = min(plot.first, count), min(plot.last, count - 1) + 1
    rows = blocks.alive_between(first, end, device)
    born = np.where(blocks.born[rows] < first, -1, blocks.born[rows])
    freed = np.where(blocks.freed[rows] >= end, count, blocks.freed[rows])
    if plot.sampling_rate > 1:
        samples = _samples(trace, device, first, end, plot.sampling_rate)
        born = np.where(born >= 0, samples[np.searchsorted(samples, born)], born)
        freed = np.where(freed < count, samples[np.searchsorted(samples, freed)], freed)
    kept = (born < freed) & ((freed == count) | (not plot.filter_freed))
    rows = rows[kept]
    return Drawn(rows, born[kept], freed[kept], blocks.bytes[rows], count, first - 1)


def _samples(trace: MemoryTrace, device: int, first: int, end: int, rate: int) -> Int64:
    """Return the events after which the level is drawn, in order; the last entry is the number of events."""
    own = first + np.flatnonzero(trace.events.device[first:end] == device)
    peak = first - 1 + int(np.argmax(trace.live(device)[first : end + 1]))
    kept = np.concatenate((own[rate - 1 :: rate], own[-1:], own[own == peak]))
    return np.append(np.unique(kept), len(trace.events)).astype(np.int64)


Json = dict[str, Any]

SCRIPT = Path(__file__).parent.parent / "server" / "static" / "report.js"
"""The page's script: the tab's own drawing code (frontend/src/report), which is bundled with the tab."""

_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="tb_memplugin">
<title>{title}</title>
</head>
<body>
<noscript>This page draws with JavaScript, which is switched off here.</noscript>
<script type="application/json" id="report-data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write(
    trace: MemoryTrace,
    path: str | os.PathLike[str],
    divisions: Sequence[Division],
    title: str,
    plot: Plot | None = None,
) -> None:
    """Write the page. It contains every event of the trace, at about four bytes each.

    Args:
        divisions: what the curve can be colored by; the first is shown first.
        plot: which events and blocks to draw, and in which order; default: all.

    Raises:
        MemPluginError: the tab's bundle is not built, or the file cannot be written.
    """
    page = page_with(report_data(trace, divisions, title, plot))
    with replacing(path) as stream:
        stream.write(page.encode(errors="backslashreplace"))  # of file names that are no text


def report_page(trace: MemoryTrace, title: str) -> str:
    """Return the page that `write` writes, with all divisions that apply.

    Raises:
        MemPluginError: the tab's bundle is not built.
    """
    return page_with(report_data(trace, divisions_of(trace, ()), title))


def page_with(data: Json) -> str:
    """Return the page with a report's data. No text in the data can close its element or open another."""
    script = _script()
    return _PAGE.format(
        policy=_policy(script), title=escape(data["title"]), data=_inlined(data), script=script
    )


def _inlined(data: Json) -> str:
    """Return JSON in which characters special to HTML are written as JSON escapes."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def _script() -> str:
    try:
        text = SCRIPT.read_text("utf-8")
    except FileNotFoundError:
        raise MemPluginError(
            "The JavaScript of the report is not built.",
            where=str(SCRIPT),
            fix="In a source checkout, run: make bundle. Wheels and source distributions include it.",
        ) from None
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--").strip()


def _policy(script: str) -> str:
    """Return a content security policy that allows this script only, and no network access."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"


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

    by: Chosen
    label: str

    @property
    def kind(self) -> str:
        """The name by which the page picks colors."""
        return self.by if isinstance(self.by, str) else "rules"


WORTH_SHOWING: tuple[By, ...] = ("category", "module", "phase", "annotation", "context", "line", "pool")
"""The default divisions of a page; those that do not divide the trace are left out."""


def divisions_of(trace: MemoryTrace, by: Sequence[By]) -> list[Division]:
    """Return the requested divisions; if there are none, category and all others that divide this trace."""
    if not by:
        by = [name for name in WORTH_SHOWING if name == "category" or _divides(trace, name)]
    return [Division(name, name.capitalize()) for name in dict.fromkeys(by)]


def _divides(trace: MemoryTrace, by: By) -> bool:
    if (by == "annotation" and not trace.annotation_names) or (by == "context" and not trace.contexts):
        return False  # it would only separate blocks from before the window from those in it
    part, _ = codes(trace, by)
    return bool(len(part)) and bool(np.any(part != part[0]))


def report_data(
    trace: MemoryTrace, divisions: Sequence[Division], title: str, plot: Plot | None = None
) -> Json:
    """Return everything that the page shows, ready for JSON.

    Times are nanoseconds since `epoch_ns`, the first time in the trace; `event` is an index into the trace's
    events, -1 for the moment before the first.
    """
    epoch, plot = trace.first_time_ns, plot or Plot()
    judged = advice(trace)
    devices = [
        _device(trace, row, divisions, epoch, plot, judged)
        for row in range(len(trace.devices))
        if trace.is_used(row)
    ]
    note = plot.note(trace)
    return {
        "version": VERSION,
        "title": title,
        "source": trace.source,
        "epoch_ns": str(epoch),
        "timed": trace.times_are_known,
        "first_event": min(plot.first, len(trace.events)),
        "events": min(plot.last, len(trace.events) - 1) + 1,
        "devices": devices,
        "notes": [*([note] if note else []), *trace.notes],
        "properties": dict(trace.properties),
    }


def _device(
    trace: MemoryTrace, row: int, divisions: Sequence[Division], epoch: int, plot: Plot, judged: Advice
) -> Json:
    blocks = drawn(trace, row, plot)
    changes = blocks.changes()
    size, peak = blocks.peak(changes)
    device = trace.devices[row]
    return {
        "name": device.name,
        "capacity": device.capacity,
        "product": device.product,
        "time": pack_steps(trace.events.time_ns[changes.event] - epoch),
        "event": pack_steps(changes.event),
        "change": pack(changes.change),
        "reserved": _reserved(trace, row, epoch, plot),
        "start_bytes": blocks.start_bytes,
        "end_bytes": blocks.start_bytes + int(changes.change.sum()),
        "peak": {"event": peak, "time_ns": max(0, trace.time_of(peak) - epoch), "bytes": size},
        "lanes": lanes_of(trace, row, epoch, plot),
        "divisions": [
            _division(trace, blocks, division, changes, peak, plot.allocation_order) for division in divisions
        ],
        "largest": _largest(trace, blocks.alive_at(peak), epoch),
        "advice": _advice(judged, device.name),
        "failed": [
            [oom.event, int(trace.events.time_ns[oom.event]) - epoch, oom.requested_bytes]
            for oom in (trace.ooms[number] for number in failed_requests(trace, row))
            if plot.first <= oom.event <= plot.last
        ],
    }


def _advice(of_all: Advice, device: str) -> Json:
    """Return what Advice says of a device of the whole trace: its heading and findings without evidence."""
    judged = Advice(
        findings=ResultTable(finding for finding in of_all.findings if finding.device == device),
        judgements=ResultTable(each for each in of_all.judgements if each.device == device),
    )
    shown = (
        *("kind", "level", "step", "title", "subject", "bytes", "measure", "of_bytes"),
        *("what_to_do", "price"),
    )
    return {
        "heading": heading(judged),
        "findings": [{key: getattr(finding, key) for key in shown} for finding in judged.findings],
    }


def _reserved(trace: MemoryTrace, device: int, epoch: int, plot: Plot) -> Json | None:
    """Return the reserved bytes at every change; None if they are not known."""
    reserved = trace.reserved(device)
    if reserved is None:
        return None
    changes = np.flatnonzero(np.diff(reserved))
    changes = changes[(changes >= plot.first) & (changes <= plot.last)]
    return {
        "start_bytes": int(reserved[min(plot.first, len(reserved) - 1)]),
        "time": pack_steps(trace.events.time_ns[changes] - epoch),
        "event": pack_steps(changes),
        "bytes": pack_steps(reserved[changes + 1]),
    }


def _division(
    trace: MemoryTrace, blocks: Drawn, division: Division, changes: Changes, peak: int, allocation_order: bool
) -> Json:
    part, names = codes(trace, division.by)
    keys, code = _folded(part, names, blocks, changes, trace, division.kind, allocation_order)
    start = sums(code[blocks.at_start], trace.allocations.bytes[blocks.at_start], len(keys))
    parts = parts_of(trace, blocks.alive_at(peak), division.by)
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
    blocks: Drawn,
    changes: Changes,
    trace: MemoryTrace,
    kind: str,
    allocation_order: bool,
) -> tuple[list[str], Int64]:
    """Return the keys to draw, from the bottom, and the index of each allocation's key.

    The keys with the highest bytes at any time are kept, the others share one key. Keys with the same name
    are merged.
    """
    used, first = np.unique(part[blocks.rows], return_index=True)
    if kind in ENUMERATED:
        order = np.arange(len(used))
    else:
        highest = _highest(part, len(names), changes, blocks, trace)
        order = np.argsort(-highest[used], kind="stable")
    if allocation_order:
        kept = order if kind in ENUMERATED else order[:SHOWN_KEYS]
        order = np.concatenate((kept[np.argsort(first[kept])], order[len(kept) :]))
    shown = used[order].tolist()
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


def _highest(part: Int64, names: int, changes: Changes, blocks: Drawn, trace: MemoryTrace) -> Int64:
    """Return the most bytes that each key ever has: int64, shape (names,)."""
    highest = sums(part[blocks.at_start], trace.allocations.bytes[blocks.at_start], names)
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


def _largest(trace: MemoryTrace, alive: Rows, epoch: int) -> list[Json]:
    """Return the largest of some allocations, each with the source line that stands for its stack."""
    largest = [live_allocation(trace, row) for row in largest_rows(trace, alive, LARGEST).tolist()]
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
        "tensor": block.tensor,
        "line": None if line == NO_STACK else line,
        "phase": block.phase.key,
        "born_ns": None if block.born_ns is None else block.born_ns - epoch,
        "freed_ns": None if block.freed_ns is None else block.freed_ns - epoch,
    }


LANE_COLUMNS = 8_000
"""Ranges shorter than the whole divided by this are left out and counted as `omitted`."""


def lanes_of(trace: MemoryTrace, device: int, epoch: int, plot: Plot) -> Json | None:
    """Return lanes in the form of docs/http_api.md, in nanoseconds since `epoch`; None without times.

    If annotations are shown instead of modules, `label` is "annotations". A single step without phases and
    calls is no lane, but `t0` and `t1` are still its own, so that times on the page count from its start.
    """
    if len(trace.phases) or len(trace.calls) or len(trace.steps) > 1:
        return _of_steps(trace, epoch, plot)
    if not trace.times_are_known:
        return None
    return _of_annotations(trace, device, epoch, plot) or {**_of_steps(trace, epoch, plot), "steps": []}


def _times(trace: MemoryTrace, plot: Plot, first: int, last: int) -> tuple[int, int]:
    """Return the times of the range that is drawn, in epoch nanoseconds; `first` and `last` if it is all."""
    count = len(trace.events)
    if 0 < plot.first < count:
        first = int(trace.events.time_ns[plot.first])
    if plot.last < count - 1:
        last = trace.time_of(plot.last)
    return first, max(last, first + 1)


def _of_steps(trace: MemoryTrace, epoch: int, plot: Plot) -> Json:
    t0, t1 = _times(trace, plot, trace.steps[0].start_ns, trace.steps[-1].end_ns)
    shown = lanes(what_ran(trace.steps, trace.phases, trace.calls, trace.modules), t0, t1, LANE_COLUMNS)
    modules = [module.key for module in trace.modules]
    return {
        "t0": t0 - epoch,
        "t1": t1 - epoch,
        "steps": [step_json(step, f"step {step.number}", epoch) for step in shown.steps],
        "phases": spans_json(shown.phases, PHASES, epoch),
        "modules": [spans_json(level, modules, epoch) for level in shown.modules],
        "omitted": shown.omitted,
    }


def _of_annotations(trace: MemoryTrace, device: int, epoch: int, plot: Plot) -> Json | None:
    """Place each range in the lane of its depth, or in the next free one below."""
    ranges = annotation_ranges(trace, device)
    times = [*trace.events.time_ns[[0, -1]].tolist(), *trace.annotations.time_ns[-1:].tolist()]
    if not ranges:
        return None
    first, last = (time - epoch for time in _times(trace, plot, min(times), max(times)))
    rows: list[list[Json]] = []
    omitted = 0
    for annotation in ranges:
        start = first if annotation.start_ns is None else max(first, annotation.start_ns - epoch)
        end = last if annotation.end_ns is None else min(last, annotation.end_ns - epoch)
        if (end - start) * LANE_COLUMNS < last - first or end <= start:
            omitted += 1
            continue
        lane = annotation.depth
        while lane < len(rows) and rows[lane] and rows[lane][-1]["end_ns"] > start:
            lane += 1
        rows += [[] for _ in range(len(rows), lane + 1)]
        rows[lane].append({"start_ns": start, "end_ns": end, "name": annotation.name, "phase": None})
    levels = [row for row in rows if row]
    return {
        "t0": first,
        "t1": max(last, first + 1),
        "steps": [],
        "phases": [],
        "modules": levels,
        "label": "annotations",
        "omitted": omitted,
    }


class Packed(TypedDict):
    """A column: `count` values of `width` bytes each in `data`. frontend/src/report/packed.ts unpacks it."""

    count: int
    width: int
    data: str


def pack(values: npt.ArrayLike) -> Packed:
    """Pack signed 64-bit integers: all lowest bytes, then all second bytes, ..., deflated, in base64.

    High bytes that only repeat the sign in every value are left out; `width` is how many bytes are written.
    """
    column = np.ascontiguousarray(values, "<i8")
    width = _width(column)
    planes = column.view(np.uint8).reshape(-1, 8)[:, :width].T
    data = base64.b64encode(zlib.compress(planes.tobytes(), level=6)).decode()
    return {"count": len(column), "width": width, "data": data}


def pack_steps(values: npt.ArrayLike) -> Packed:
    """Pack values that change little: the first value, then the difference of each to the one before."""
    column = np.asarray(values, np.int64)
    return pack(np.diff(column, prepend=np.int64(0)))


def _width(column: npt.NDArray[np.int64]) -> int:
    """Return how many bytes hold every value with its sign."""
    if not len(column):
        return 1
    highest = max(int(column.max()), -1 - int(column.min()))
    return min(8, highest.bit_length() // 8 + 1)
