"""Compute the figures of layers from an allocator's history and the times at which layers ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.sources.modules import ModuleNames
from tb_memplugin.sources.tables import Owners
from tb_memplugin.sources.tracer.layers import LayerFigures
from tb_memplugin.sources.tracer.results import (
    EVENT_TYPES,
    PhaseMemoryStats,
    Row,
    TracerResult,
    fragmentation,
    layer_names,
    layer_stats,
)
from tb_memplugin.trace import Kind, MemoryTrace, Module, Phase, Spans, Step
from tb_memplugin.trace.tables import Int64

Crossing = tuple[int, int, bool, Phase, int, bool]
"""(epoch ns, module's row or -1, whether it ends, phase, thread ident, whether it comes from autograd).

A crossing from autograd ends the previous one: backward runs for one layer at a time. Row -1 with thread 0
means that a backward has ended.
"""

_ALLOC, _FREE, _ENTER, _EXIT, _SNAPSHOT = range(len(EVENT_TYPES))


@dataclass(frozen=True, slots=True)
class HistoryCalls:
    """What was recorded in addition to an allocator's history. Times are epoch nanoseconds.

    `counted_peak` is the peak in bytes by the allocator's own counter, -1 if that is not known; `is_full`
    is True if the history, which has `entries` entries, overwrote its oldest ones; `phases` are (time,
    name, whether it ends).
    """

    names: ModuleNames
    device: str
    crossings: Sequence[Crossing]
    phases: Sequence[tuple[int, str, bool]]
    start_ns: int
    stop_ns: int
    counted_peak: int = -1
    is_full: bool = False
    entries: int = 0
    max_events: int = 0
    with_fragmentation: bool = True


@dataclass(frozen=True, slots=True)
class _Span:
    start_ns: int
    end_ns: int
    row: int
    phase: Phase


def result_of(history: MemoryTrace, noted: HistoryCalls) -> TracerResult:
    """Join both into a result: the trace with modules and calls, and the figures of every layer."""
    spans = sorted(_spans(noted), key=lambda span: (span.start_ns, -span.end_ns))
    device = next((row for row, one in enumerate(history.devices) if one.name == noted.device), -1)
    trace = _with_calls(history, noted, spans)
    curve = _Curve.of(trace, device)
    figures = [LayerFigures() for _ in noted.names.modules]
    reserved = [-1] * len(figures)
    ratios: list[list[float]] = [[] for _ in figures]
    for span in spans:
        low, high = curve.between(span.start_ns, span.end_ns)
        one = figures[span.row]
        one.peak = max(one.peak, int(curve.allocated[low : high + 1].max()))
        reserved[span.row] = max(reserved[span.row], int(curve.reserved[low : high + 1].max()))
        if noted.with_fragmentation:
            ratios[span.row] += [curve.fragmentation(low), curve.fragmentation(high)]
        if span.phase is Phase.FORWARD:
            one.calls += 1
            one.forward_ns += span.end_ns - span.start_ns
    _count(figures, spans, curve)
    rows = _rows(curve, spans, noted)
    seen = int(curve.allocated.max())
    return TracerResult(
        trace=replace(trace, notes=(*trace.notes, *_notes(noted))),
        layers=layer_stats(
            noted.names, figures, reserved, [sum(found) / len(found) if found else 0.0 for found in ratios]
        ),
        phases=_phases(curve, noted),
        rows=rows[-noted.max_events :] if noted.max_events else rows,
        names=layer_names(noted.names),
        start_ns=noted.start_ns,
        stop_ns=noted.stop_ns,
        peak_allocated=max(seen, noted.counted_peak if noted.is_full else -1),
        peak_reserved=int(curve.reserved.max()),
        dropped=max(0, len(rows) - noted.max_events) if noted.max_events else 0,
        total=len(rows),
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    """One device's levels: entry e + 1 of `allocated` and `reserved` is the level after event e."""

    time_ns: Int64
    allocated: Int64
    reserved: Int64
    kind: np.ndarray
    bytes: Int64

    @classmethod
    def of(cls, trace: MemoryTrace, device: int) -> _Curve:
        if device < 0:
            nothing = np.zeros(1, np.int64)
            return cls(nothing[:0], nothing, nothing, np.empty(0, np.uint8), nothing[:0])
        here = np.flatnonzero(trace.events.device == device)
        reserved = trace.events.reserved[here]
        before = trace.devices[device].reserved_at_start
        start = int(before if before is not None else (reserved[0] if len(reserved) else 0))
        live = trace.live(device)
        return cls(
            trace.events.time_ns[here],
            np.concatenate((live[:1], live[here + 1])),
            np.maximum(np.concatenate(([start], reserved)), 0),
            trace.events.kind[here],
            trace.events.bytes[here],
        )

    def between(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the indices of the entries at a start time and at an end time."""
        low = int(np.searchsorted(self.time_ns, start_ns, side="left"))
        return low, max(low, int(np.searchsorted(self.time_ns, end_ns, side="right")))

    def fragmentation(self, entry: int) -> float:
        """Return the fragmentation at an entry, 0 to 1."""
        return fragmentation(int(self.allocated[entry]), int(self.reserved[entry]))


def _spans(noted: HistoryCalls) -> list[_Span]:
    """Return the spans of layers: nested calls per thread, and one layer after another from autograd."""
    found: list[_Span] = []
    open_calls: dict[int, list[tuple[int, int, Phase]]] = {}
    running: tuple[int, int] | None = None
    for time, row, ends, phase, thread, by_autograd in noted.crossings:
        if by_autograd:
            if running is not None and running[0] >= 0:
                found.append(_Span(running[1], time, running[0], Phase.BACKWARD))
            running = (row, time)
        elif not ends:
            open_calls.setdefault(thread, []).append((row, time, phase))
        elif any(call[0] == row for call in open_calls.get(thread, ())):
            while True:
                inner, began, how = open_calls[thread].pop()
                found.append(_Span(began, time, inner, how))
                if inner == row:
                    break
    left = [call for calls in open_calls.values() for call in calls]
    found += [_Span(began, noted.stop_ns, row, phase) for row, began, phase in left]
    if running is not None and running[0] >= 0:
        found.append(_Span(running[1], noted.stop_ns, running[0], Phase.BACKWARD))
    return found


def _innermost(spans: Sequence[_Span], time_ns: Int64) -> Int64:
    """Return the index of the last-begun span that covers each time, -1 for none."""
    place = np.full(len(time_ns), -1, np.int64)
    for number, span in enumerate(spans):  # sorted by start: an inner one comes later
        low, high = np.searchsorted(time_ns, (span.start_ns, span.end_ns), side="left")
        place[low:high] = number
    return place


def _count(figures: list[LayerFigures], spans: Sequence[_Span], curve: _Curve) -> None:
    place = _innermost(spans, curve.time_ns)
    for number, kind, size in zip(place.tolist(), curve.kind.tolist(), curve.bytes.tolist(), strict=True):
        if number < 0:
            continue
        one = figures[spans[number].row]
        if kind == Kind.ALLOC:
            one.allocations += 1
            one.allocated_bytes += size
        elif kind == Kind.FREE_COMPLETED:
            one.frees += 1
    bounds = sorted({span.start_ns for span in spans} | {span.end_ns for span in spans})
    inside = _innermost(spans, np.array(bounds, np.int64))
    for number, begin, end in zip(inside.tolist(), bounds, bounds[1:], strict=False):
        if number >= 0 and spans[number].phase is Phase.BACKWARD:
            figures[spans[number].row].backward_ns += end - begin


def _with_calls(trace: MemoryTrace, noted: HistoryCalls, spans: Sequence[_Span]) -> MemoryTrace:
    """Return the trace with every layer in its table, calls, and layers for allocs that had no module."""
    row_of = {module.key: row for row, module in enumerate(trace.modules)}
    modules = list(trace.modules)
    rows = []
    for module in noted.names.modules:
        if module.key not in row_of:
            row_of[module.key] = len(modules)
            parent = row_of[noted.names.modules[module.parent].key] if module.parent >= 0 else -1
            modules.append(Module(module.key, parent, module.class_name))
        rows.append(row_of[module.key])
    owners = Owners(modules)
    name = np.array([rows[span.row] for span in spans], np.int32)
    place = _innermost(spans, trace.events.time_ns)
    owner = np.append(name, -1)[place].astype(np.int32)
    unowned = np.array([not one.is_module for one in modules] + [True], bool)[trace.events.module]
    owned = np.where(unowned & (place >= 0), owner, trace.events.module)
    calls = Spans(
        np.array([span.start_ns for span in spans], np.int64),
        np.array([span.end_ns for span in spans], np.int64),
        name,
        owners.depth()[name].astype(np.int32),
        np.array([span.phase for span in spans], np.uint8),
    )
    return replace(
        trace,
        source="MemoryTracer",
        modules=tuple(modules),
        calls=calls,
        steps=(Step(0, noted.start_ns, noted.stop_ns),),
        events=replace(trace.events, module=owned.astype(np.int32)),
    )


def _rows(curve: _Curve, spans: Sequence[_Span], noted: HistoryCalls) -> list[Row]:
    """Return the events of the timeline, sorted by time."""
    place = _innermost(spans, curve.time_ns)
    kinds = {Kind.ALLOC: _ALLOC, Kind.FREE_COMPLETED: _FREE}
    rows: list[Row] = [
        (time, kinds[Kind(kind)], size, spans[number].row if number >= 0 else -1, allocated, reserved)
        for time, kind, size, number, allocated, reserved in zip(
            curve.time_ns.tolist(),
            curve.kind.tolist(),
            curve.bytes.tolist(),
            place.tolist(),
            curve.allocated[1:].tolist(),
            curve.reserved[1:].tolist(),
            strict=True,
        )
        if kind in kinds
    ]
    marks = [(span.start_ns, _ENTER, span.row) for span in spans]
    marks += [(span.end_ns, _EXIT, span.row) for span in spans]
    marks += [(noted.start_ns, _SNAPSHOT, -1), (noted.stop_ns, _SNAPSHOT, -1)]
    for time, kind, row in marks:
        entry = int(np.searchsorted(curve.time_ns, time, side="right"))
        rows.append((time, kind, 0, row, int(curve.allocated[entry]), int(curve.reserved[entry])))
    return sorted(rows, key=lambda row: row[0])


def _phases(curve: _Curve, noted: HistoryCalls) -> list[PhaseMemoryStats]:
    found, begun = [], dict[str, list[int]]()
    for time, name, ends in noted.phases:
        if not ends:
            begun.setdefault(name, []).append(time)
        elif begun.get(name):
            low, high = curve.between(begun[name].pop(), time)
            levels = curve.allocated[low : high + 1]
            found.append(PhaseMemoryStats(name, int(levels[0]), int(levels[-1]), int(levels.max())))
    return found


def _notes(noted: HistoryCalls) -> list[str]:
    if not noted.is_full:
        return []
    peak = (
        "The peak comes from the allocator's own counter."
        if noted.counted_peak >= 0
        else (
            "The peak is that of the entries that were kept: the allocator's counter was higher before "
            "the block."
        )
    )
    room = (
        f"{noted.entries:,} entries (the limit that was set when it was turned on before the block)"
        if 0 < noted.entries < noted.max_events
        else f"{noted.max_events:,} entries (max_events)"
    )
    return [
        f"The history holds {room} and overwrote older ones, so the figures of layers count only the "
        f"entries that were kept. {peak}"
    ]
