"""When layers ran, beside an allocator's history, and the figures of layers computed from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import repeat
from operator import itemgetter

import numpy as np

from tb_memplugin.read.phases import phase_spans, stretch
from tb_memplugin.read.tables import Names, Owners, named_phases
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.tracer.layers import LayerFigures
from tb_memplugin.record.tracer.results import (
    EVENT_TYPES,
    PhaseMemoryStats,
    Row,
    TracerResult,
    fragmentation,
    layer_names,
    layer_stats,
)
from tb_memplugin.trace import Kind, MemoryTrace, Module, Phase, Spans, Step
from tb_memplugin.trace.notes import HISTORY_FULL, Note
from tb_memplugin.trace.tables import NOT_NAMED, Int64, merged

Crossing = tuple[int, int, bool, int]
"""(epoch ns, layer, whether it lies in a backward, thread ident).

The layer is a module's row where its call begins, and -1 - row where it ends. With `BY_AUTOGRAD` or a
negative ident for the thread, it is the row whose backward begins, or `NO_LAYER`: backward runs for one layer
at a time. The negative ident is that of a thread of autograd that has the layer's mark from then on.
"""

BY_AUTOGRAD = 0
"""No thread has this ident."""

NO_LAYER = -1
"""Autograd is between layers, or the backward has ended."""

_CROWDED = (
    "Another tracer ran on another thread meanwhile. The allocator's history does not record threads, so the "
    "figures of layers, {in_layers:,} allocated bytes, may contain what the other's layers allocated."
)
_THREADS = (
    "Layers ran on {threads:,} threads. The allocator's history does not record threads, so what other "
    "threads allocate while a backward runs counts to the layer whose backward it is: up to "
    "{in_backward:,} bytes."
)
_SHARED = (
    "A backward of one thread ran when another thread began its first. One thread of autograd runs both, so "
    "what one of them allocates then may count to a layer whose backward belongs to the other: up to "
    "{in_backward:,} bytes."
)
_INSIDE = (
    "Layers inside compiled or scripted modules have no figures of their own: {:,} of them. What they "
    "allocate, at most {in_layers:,} bytes, counts to the layers around them."
)


@dataclass(frozen=True, slots=True)
class HistoryCalls:
    """What was recorded in addition to an allocator's history. Times are epoch nanoseconds.

    `counted_peak` is the peak in bytes by the allocator's own counter, -1 if that is not known; `is_full`
    is True if the history, which has `entries` entries, overwrote its oldest ones; `phases` are (time,
    name, whether it ends); `unseen` counts the layers inside compiled or scripted modules,
    and `crowded` is True if another tracer ran on another thread meanwhile; `optimizer` are the starts and
    ends of optimizer steps; `requests` is how many allocations and frees the allocator counted, 0 if unknown;
    `has_marks` is whether layers mark what they allocate, and `shared` whether backward passes of several
    threads ran at the same time and were not told apart.
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
    unseen: int = 0
    crowded: bool = False
    optimizer: Sequence[tuple[int, int]] = ()
    requests: int = 0
    has_marks: bool = False
    shared: bool = False

    def threads(self) -> set[int]:
        """Return the idents of the threads that ran layers forward."""
        return {thread for *_, in_backward, thread in self.crossings if not in_backward}

    def notes(self, *, in_layers: int, in_backward: int, kept_peak: int) -> list[Note]:
        """Return what the figures of layers cannot tell.

        Args:
            in_layers: the bytes that were allocated in layers.
            in_backward: those of them that were allocated in their backward.
            kept_peak: the highest live bytes of the entries that were kept.
        """
        notes: list[Note] = []
        if self.unseen:
            notes.append(
                Note(_INSIDE.format(self.unseen, in_layers=in_layers), "layers_in_compiled", in_layers)
            )
        if self.crowded:
            notes.append(Note(_CROWDED.format(in_layers=in_layers), "other_tracer", in_layers))
        if self.shared:
            notes.append(Note(_SHARED.format(in_backward=in_backward), "shared_backward", in_backward))
        by_time = any(layer >= 0 and thread == BY_AUTOGRAD for _, layer, _, thread in self.crossings)
        if by_time and (threads := len(self.threads())) > 1:
            text = _THREADS.format(threads=threads, in_backward=in_backward)
            notes.append(Note(text, "layers_on_threads", in_backward))
        return notes + ([self._overwritten(kept_peak)] if self.is_full else [])

    def _overwritten(self, kept_peak: int) -> Note:
        peak = (
            f"The peak of {self.counted_peak:,} bytes comes from the allocator's own counter."
            if self.counted_peak >= 0
            else (
                f"The peak of {kept_peak:,} bytes is that of the entries that were kept: the allocator's "
                "counter was higher before the block."
            )
        )
        room = (
            f"{self.entries:,} entries (the limit that was set when it was turned on before the block)"
            if 0 < self.entries < self.max_events
            else f"{self.max_events:,} entries (max_events)"
        )
        return Note(
            f"The history holds {room} and overwrote older ones, so the figures of layers count only the "
            f"entries that were kept, which reach {kept_peak:,} live bytes. {peak}",
            HISTORY_FULL,
            kept_peak,
        )


_ENTRY_NS = 1_000
"""A history's clock counts microseconds, rounded down."""

_ALLOC, _FREE, _ENTER, _EXIT, _SNAPSHOT = range(len(EVENT_TYPES))
_ALLOCATED, _FREED = int(Kind.ALLOC), int(Kind.FREE_COMPLETED)


_Span = tuple[int, int, int, Phase, bool]
"""(start, end, module's row, phase, has marks). A table of them has the rows as names, and no depth."""


def result_of(history: MemoryTrace, noted: HistoryCalls) -> TracerResult:
    """Join both into a result: the trace with modules and calls, and the figures of every layer."""
    span_rows = _spans(noted)
    spans = _table(span_rows)
    device = next(
        (row for row, candidate in enumerate(history.devices) if candidate.name == noted.device), -1
    )
    layer = _layers(history, noted, spans, _table([span for span in span_rows if not span[4]]))
    trace = _with_phases(_with_calls(history, noted, spans, layer), noted, max(device, 0))
    curve = _Curve.of(trace, device, layer)
    low, high = curve.between(spans.start_ns, spans.end_ns)
    figures = [LayerFigures() for _ in noted.names.modules]
    reserved = [-1] * len(figures)
    ratios: list[list[float]] = [[] for _ in figures]
    for row, allocated, reserve, took, phase in zip(
        spans.name.tolist(),
        _highest(curve.allocated, low, high).tolist(),
        _highest(curve.reserved, low, high).tolist(),
        (spans.end_ns - spans.start_ns).tolist(),
        spans.phase.tolist(),
        strict=True,
    ):
        layer_figures = figures[row]
        layer_figures.peak = max(layer_figures.peak, allocated)
        reserved[row] = max(reserved[row], reserve)
        if phase == Phase.FORWARD:
            layer_figures.calls += 1
            layer_figures.forward_ns += took
    if noted.with_fragmentation:
        for row, first, last in zip(spans.name.tolist(), low.tolist(), high.tolist(), strict=True):
            ratios[row] += [curve.fragmentation(first), curve.fragmentation(last)]
    _count(figures, spans, curve)
    rows = _rows(curve, spans, noted)
    recorded = int(np.isin(curve.kind, (_ALLOCATED, _FREED)).sum())
    overwritten = max(0, noted.requests - recorded) if noted.is_full else 0
    kept_peak = int(curve.allocated.max())
    allocated = (curve.layer >= 0) & (curve.kind == _ALLOCATED)
    in_backward = allocated & (trace.events.phase[trace.events.device == device] == Phase.BACKWARD)
    notes = noted.notes(
        in_layers=int(curve.bytes[allocated].sum()),
        in_backward=int(curve.bytes[in_backward].sum()),
        kept_peak=kept_peak,
    )
    return TracerResult(
        trace=replace(trace, notes=(*trace.notes, *notes)),
        layers=layer_stats(
            noted.names,
            figures,
            reserved,
            [sum(of_layer) / len(of_layer) if of_layer else 0.0 for of_layer in ratios],
        ),
        phases=_phases(curve, noted),
        rows=rows[-noted.max_events :] if noted.max_events else rows,
        names=layer_names(noted.names),
        start_ns=noted.start_ns,
        stop_ns=noted.stop_ns,
        peak_allocated=max(kept_peak, noted.counted_peak if noted.is_full else -1),
        peak_reserved=int(curve.reserved.max()),
        dropped=overwritten + (max(0, len(rows) - noted.max_events) if noted.max_events else 0),
        total=overwritten + len(rows),
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    """One device's events and levels: entry e + 1 of `allocated` and `reserved` is the level after event e.

    `layer` is the row of the layer that each event belongs to, -1 for none.
    """

    time_ns: Int64
    allocated: Int64
    reserved: Int64
    kind: np.ndarray
    bytes: Int64
    layer: Int64

    @classmethod
    def of(cls, trace: MemoryTrace, device: int, layer: Int64) -> _Curve:
        if device < 0:
            nothing = np.zeros(1, np.int64)
            return cls(nothing[:0], nothing, nothing, np.empty(0, np.uint8), nothing[:0], nothing[:0])
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
            layer[here],
        )

    def between(self, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
        """Return the indices of the entries at start times and at end times."""
        low = np.searchsorted(self.time_ns, start_ns, side="left")
        return low, np.maximum(low, np.searchsorted(self.time_ns, end_ns, side="right"))

    def fragmentation(self, entry: int) -> float:
        """Return the fragmentation at an entry, 0 to 1."""
        return fragmentation(int(self.allocated[entry]), int(self.reserved[entry]))


def _spans(noted: HistoryCalls, *, by_thread: bool = False) -> list[_Span]:
    """Return the spans of layers: nested calls per thread, and one layer after another from autograd.

    Args:
        by_thread: whether each thread of autograd, one per GPU, has a row of layers of its own.
    """
    spans: list[_Span] = []
    open_calls: dict[int, list[tuple[int, int, Phase]]] = {}
    running: dict[int, tuple[int, int, bool]] = {}
    for time, layer, in_backward, thread in (*noted.crossings, (noted.stop_ns, NO_LAYER, True, BY_AUTOGRAD)):
        if thread <= BY_AUTOGRAD:
            key = thread if by_thread else BY_AUTOGRAD
            for ended in [key] if key else list(running):
                row, began, marked = running.pop(ended, (NO_LAYER, 0, False))
                if row >= 0:
                    spans.append((began, time, row, Phase.BACKWARD, marked))
            running[key] = layer, time, thread < BY_AUTOGRAD
        elif layer >= 0:
            phase = Phase.BACKWARD if in_backward else Phase.FORWARD
            open_calls.setdefault(thread, []).append((layer, time, phase))
        elif any(call[0] == -1 - layer for call in open_calls.get(thread, ())):
            while True:
                inner, began, how = open_calls[thread].pop()
                spans.append((began, time, inner, how, noted.has_marks))
                if inner == -1 - layer:
                    break
    left = [call for calls in open_calls.values() for call in calls]
    return spans + [(began, noted.stop_ns, row, phase, noted.has_marks) for row, began, phase in left]


def _table(spans: Sequence[_Span]) -> Spans:
    """Return spans sorted by their start, outer ones first."""
    columns = np.array(spans, np.int64).reshape(-1, 5)
    start, end, row, phase, _ = columns[np.lexsort((-columns[:, 1], columns[:, 0]))].T
    return Spans(start, end, row.astype(np.int32), np.zeros(len(row), np.int32), phase.astype(np.uint8))


def _highest(levels: Int64, low: Int64, high: Int64) -> Int64:
    """Return the highest of the levels from each low index up to, and with, its high index."""
    if not len(low):
        return low
    bounds = np.stack((low, high + 1), axis=1).ravel()
    highest: Int64 = np.maximum.reduceat(np.append(levels, -1), bounds)[::2]
    return highest


def _innermost(spans: Spans, time_ns: Int64) -> Int64:
    """Return the index of the last-begun span that covers each time, -1 for none."""
    innermost = np.full(len(time_ns), -1, np.int64)
    low = np.searchsorted(time_ns, spans.start_ns, side="left").tolist()
    high = np.searchsorted(time_ns, spans.end_ns, side="left").tolist()
    for number, (first, last) in enumerate(zip(low, high, strict=True)):  # an inner span comes later
        innermost[first:last] = number
    return innermost


def _layers(history: MemoryTrace, noted: HistoryCalls, spans: Spans, unmarked: Spans) -> Int64:
    """Return the row of the layer that each event belongs to, -1 for none.

    That is the layer of its mark, if it ran at that time: the mark may be another tracer's. Without a mark
    it is the last-begun layer among those that set none (`unmarked`), and with a mark of another kind among
    all. If several threads run layers, the latter can only be one in backward.
    """
    time_ns = history.events.time_ns
    backward = spans.phase == Phase.BACKWARD
    candidates = Spans(*(getattr(spans, column.name)[backward] for column in fields(spans)))
    among = spans if len(noted.threads()) < 2 else candidates
    layer = _last_begun(among, time_ns)
    if noted.has_marks:
        layer = np.where(history.events.label < 0, _last_begun(unmarked, time_ns), layer)
    marked, ran = _marked(history, noted), _table(_spans(noted, by_thread=True))
    for row in np.unique(marked[marked >= 0]).tolist():
        events, own = np.flatnonzero(marked == row), ran.name == row
        begun = np.searchsorted(ran.start_ns[own], time_ns[events] + _ENTRY_NS, side="right")
        ended = np.searchsorted(np.sort(ran.end_ns[own]), time_ns[events], side="left")
        layer[events[begun > ended]] = row
    return layer


def _last_begun(spans: Spans, time_ns: Int64) -> Int64:
    """Return the row of the last-begun layer at each time, -1 for none."""
    row: Int64 = np.append(spans.name, -1).astype(np.int64)[_innermost(spans, time_ns)]
    return row


def _marked(history: MemoryTrace, noted: HistoryCalls) -> Int64:
    """Return the row of the layer that each event's mark names, -1 for none."""
    row_of = {module.key: row for row, module in enumerate(noted.names.modules)}
    rows = [row_of.get(module.key, -1) if module.is_module else -1 for module in history.modules]
    row: Int64 = np.array([*rows, -1])[history.events.module]
    return row


def _count(figures: list[LayerFigures], spans: Spans, curve: _Curve) -> None:
    inside = curve.layer >= 0
    for number, kind, size in zip(
        curve.layer[inside].tolist(), curve.kind[inside].tolist(), curve.bytes[inside].tolist(), strict=True
    ):
        layer_figures = figures[number]
        if kind == _ALLOCATED:
            layer_figures.allocations += 1
            layer_figures.allocated_bytes += size
        elif kind == _FREED:
            layer_figures.frees += 1
    bounds = np.unique(np.concatenate((spans.start_ns, spans.end_ns)))
    innermost = _innermost(spans, bounds[:-1])
    for number, took in zip(innermost.tolist(), np.diff(bounds).tolist(), strict=True):
        if number >= 0 and spans.phase[number] == Phase.BACKWARD:
            figures[spans.name[number]].backward_ns += took


def _with_calls(trace: MemoryTrace, noted: HistoryCalls, spans: Spans, layer: Int64) -> MemoryTrace:
    """Return the trace with every layer in its table, calls, and the layer of each event."""
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
    name = np.array(rows, np.int32)[spans.name]
    first = noted.crossings[0][0] if noted.crossings else noted.stop_ns
    left_over = (_marked(trace, noted) >= 0) & (trace.events.time_ns >= first)  # on another GPU's thread
    unowned = np.where(left_over, row_of[NOT_NAMED], trace.events.module)
    owned = np.where(layer >= 0, np.array([*rows, -1], np.int32)[layer], unowned)
    calls = replace(spans, name=name, depth=owners.depth()[name].astype(np.int32))
    return replace(
        trace,
        source="MemoryTracer",
        modules=tuple(modules),
        calls=calls,
        steps=(Step(0, noted.start_ns, noted.stop_ns),),
        events=replace(trace.events, module=owned.astype(np.int32)),
    )


def _with_phases(trace: MemoryTrace, noted: HistoryCalls, device: int) -> MemoryTrace:
    """Return the trace with its phases, and with the user's own phases as annotations."""
    time_ns, in_backward = trace.events.time_ns, trace.events.phase == Phase.BACKWARD
    forward, backward = (trace.calls.phase == phase for phase in (Phase.FORWARD, Phase.BACKWARD))
    phases = phase_spans(
        (trace.calls.start_ns[forward], trace.calls.end_ns[forward]),
        (  # allocations, too: a loss has no layer
            np.concatenate((trace.calls.start_ns[backward], time_ns[in_backward])),
            np.concatenate((trace.calls.end_ns[backward], time_ns[in_backward] + _ENTRY_NS)),
        ),
        stretch(noted.optimizer),
        np.empty(0, np.int64),
    )
    names = Names()
    names.add_all(trace.annotation_names)
    annotations = merged(trace.annotations, named_phases(noted.phases, trace.events, names, device))
    return replace(trace, phases=phases, annotations=annotations, annotation_names=names.as_tuple())


def _rows(curve: _Curve, spans: Spans, noted: HistoryCalls) -> list[Row]:
    """Return the events of the timeline, sorted by time."""
    shown = np.flatnonzero((curve.kind == _ALLOCATED) | (curve.kind == _FREED))
    kind = np.where(curve.kind[shown] == _ALLOCATED, _ALLOC, _FREE)
    levels = curve.allocated[1:][shown], curve.reserved[1:][shown]
    columns = (curve.time_ns[shown], kind, curve.bytes[shown], curve.layer[shown], *levels)
    rows: list[Row] = list(zip(*(column.tolist() for column in columns), strict=True))
    for times, layers, mark in (
        (spans.start_ns, spans.name.tolist(), _ENTER),
        (spans.end_ns, spans.name.tolist(), _EXIT),
        (np.array([noted.start_ns, noted.stop_ns]), [-1, -1], _SNAPSHOT),
    ):
        entry = np.searchsorted(curve.time_ns, times, side="right")
        allocated, reserved = curve.allocated[entry].tolist(), curve.reserved[entry].tolist()
        rows += zip(times.tolist(), repeat(mark), repeat(0), layers, allocated, reserved, strict=False)
    return sorted(rows, key=itemgetter(0))


def _phases(curve: _Curve, noted: HistoryCalls) -> list[PhaseMemoryStats]:
    stats, begun = [], dict[str, list[int]]()
    for time, name, ends in noted.phases:
        if not ends:
            begun.setdefault(name, []).append(time)
        elif begun.get(name):
            low, high = map(int, curve.between(np.int64(begun[name].pop()), np.int64(time)))
            levels = curve.allocated[low : high + 1]
            stats.append(PhaseMemoryStats(name, int(levels[0]), int(levels[-1]), int(levels.max())))
    return stats
