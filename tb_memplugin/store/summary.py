"""Make the summary of a captured step: everything that the tab shows before it opens a side file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from tb_memplugin.analysis.account import Account, accounts
from tb_memplugin.analysis.curves import category_columns
from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.modules import module_table
from tb_memplugin.analysis.moments import largest_rows, moment, tensor_name
from tb_memplugin.analysis.oom import failed_requests
from tb_memplugin.analysis.pool_names import NOT_KNOWN
from tb_memplugin.analysis.source_lines import leading_frame, line_key
from tb_memplugin.analysis.steps import StepStats, stats_of_step, step_stats
from tb_memplugin.proto import recording_pb2
from tb_memplugin.store.blob import SCHEMA_VERSION
from tb_memplugin.store.paths import readable
from tb_memplugin.store.whole_devices import packed_whole
from tb_memplugin.trace import STACKING_ORDER, Category, MemoryTrace, Note, OutOfMemory, Phase, Spans
from tb_memplugin.trace.labels import DUMP_OF
from tb_memplugin.trace.notes import STEP_NOT_ENDED, SUMMARY_SHORTENED
from tb_memplugin.trace.tables import CERTAIN, Int64, differences

CURVE_COLUMNS = 200
LARGEST, LONGEST_CALLS = 30, 300
"""How many of the largest allocations, and of the longest phases and calls, a summary has."""

LONGEST_LINE = 500
"""The most characters of a source line in the metadata, which TensorBoard sends with every list of steps."""

_NOTE = "This summary has only the step's figures. The breakdown of the bytes is in the window's side file."


@dataclass(frozen=True, slots=True)
class Window:
    """Who recorded a window, its number, and the name of its side file (without folders)."""

    worker: str
    writer_id: str
    number: int
    side_file: str


def epoch_ns(trace: MemoryTrace) -> int:
    """Return the window's start in epoch nanoseconds, from which summaries and the HTTP API count time."""
    first = trace.steps[0].start_ns
    return min(first, int(trace.events.time_ns[0])) if len(trace.events) else first


def step_span(trace: MemoryTrace, row: int) -> tuple[int, int]:
    """Return a step's start and end in epoch nanoseconds, so that it contains its events and no others."""
    step, time_ns = trace.steps[row], trace.events.time_ns
    first, end = trace.step_events(row)
    start_ns, end_ns = step.start_ns, step.end_ns
    if end > first:
        start_ns = min(start_ns, int(time_ns[first]))
        end_ns = max(end_ns, int(time_ns[end - 1]))
    if end < len(time_ns):  # steps may overlap, as those of ranks whose traces were merged
        end_ns = min(end_ns, int(time_ns[end]) - 1)
    return start_ns, max(end_ns, start_ns + 1)


@lru_cache(maxsize=4)
def _fingerprint(names: tuple[str, ...]) -> str:
    """Return a hash of modules' names, with repeated layers as one; "" for no names."""
    text = "\n".join(sorted(set(folds(names).values())))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16] if names else ""


class WindowSummaries:
    """Makes the summaries of a window's steps; shared values are computed once.

    Args:
        only: the row of the only step that is asked for, or None.
    """

    def __init__(self, trace: MemoryTrace, window: Window, only: int | None = None) -> None:
        self._trace, self._window = trace, window
        self._epoch = epoch_ns(trace)
        names = (module.key for module in trace.modules if module.is_module and module.key)
        self._fingerprint = _fingerprint(tuple(names))
        self._is_cut = any(note.code == STEP_NOT_ENDED for note in trace.notes)
        self._stats = [
            dict(enumerate(step_stats(trace, device)))
            if only is None
            else {only: stats_of_step(trace, device, only)}
            for device in range(len(trace.devices))
        ]

    def metadata(self, row: int) -> recording_pb2.StepMetadata:
        """Return the metadata that is stored with a step's tag."""
        trace = self._trace
        return recording_pb2.StepMetadata(
            version=SCHEMA_VERSION,
            worker=readable(self._window.worker),
            writer_id=self._window.writer_id,
            window=self._window.number,
            step=trace.steps[row].number,
            epoch_ns=self._epoch,
            side_file=self._window.side_file,
            model_fingerprint=self._fingerprint,
            dump_of=readable(trace.properties.get(DUMP_OF, "")),
            not_ended=row == len(trace.steps) - 1 and self._is_cut,
            devices=[
                recording_pb2.DeviceStats(
                    device=readable(device.name),
                    capacity_bytes=device.capacity,
                    stats=self._stats_of(self._stats[number][row]),
                    failed_requests=self._failed(row, number),
                )
                for number, device in enumerate(trace.devices)
            ],
        )

    def _failed(self, row: int, device: int) -> recording_pb2.FailedRequests:
        trace, (first, end) = self._trace, self._trace.step_events(row)
        failed = [oom for oom in self._failed_on[device] if first <= oom.event < end]
        if not failed:
            return recording_pb2.FailedRequests()
        frame = leading_frame(trace.stack(int(trace.events.stack[failed[-1].event])))
        return recording_pb2.FailedRequests(
            count=len(failed),
            requested_bytes=failed[-1].requested_bytes,
            line="" if frame is None else readable(line_key(frame))[:LONGEST_LINE],
        )

    @cached_property
    def _failed_on(self) -> list[list[OutOfMemory]]:
        return [
            [self._trace.ooms[number] for number in failed_requests(self._trace, device)]
            for device in range(len(self._trace.devices))
        ]

    def summary(self, row: int) -> recording_pb2.StepSummary:
        """Return the summary of a step, given by its row in the trace's steps."""
        trace = self._trace
        return recording_pb2.StepSummary(
            metadata=self.metadata(row),
            source=readable(trace.source),
            properties={readable(key): readable(value) for key, value in trace.properties.items()},
            notes=map(_note, trace.notes),
            modules=self._modules,
            devices=[self._device(row, device) for device in range(len(trace.devices))],
            phases=self._spans(trace.phases, row),
            calls=self._spans(trace.calls, row),
        )

    def outline(self, row: int, metadata: recording_pb2.StepMetadata) -> recording_pb2.StepSummary:
        """Return the summary of a step without a breakdown: all its bytes are in one part, "not known".

        That is what the event file has, so that no training waits for a full summary, which takes about a
        millisecond. It is marked as folded, so that readers compute the full one from the side file.
        """
        summary = recording_pb2.StepSummary()
        summary.CopyFrom(self._no_breakdown)
        summary.metadata.CopyFrom(metadata)
        for number, device in enumerate(summary.devices):
            stats, peak, curve, table = (
                metadata.devices[number].stats,
                device.peak,
                device.curve,
                device.modules,
            )
            size, count = stats.peak_bytes, int(self._blocks_at_peaks[number][row])
            device.stats.CopyFrom(stats)
            peak.event, peak.time_ns, peak.bytes = stats.peak_event, stats.peak_time_ns, size
            for parts in (peak.by_category, peak.by_operator, peak.by_phase):
                parts.bytes.append(size)
                parts.counts.append(count)
            curve.t0_ns, curve.t1_ns = stats.step_start_ns, stats.step_end_ns
            curve.peak_event, curve.peak_time_ns = stats.peak_event, stats.peak_time_ns
            curve.low.append(int(self._lowest[number][row]))
            curve.high.append(size)
            curve.stacks.append(size)
            if stats.HasField("peak_reserved_bytes"):
                curve.reserved.append(stats.peak_reserved_bytes)
            unknown = [0] * len(Category)
            unknown[Category.UNKNOWN] = size
            table.own.extend(unknown)
            table.own_count.append(count)
            table.allocations.append(stats.allocations)
            table.allocated_bytes.append(stats.allocated_bytes)
        return summary

    @cached_property
    def _no_breakdown(self) -> recording_pb2.StepSummary:
        """What the outlines of all steps share."""
        trace = self._trace
        return recording_pb2.StepSummary(
            source=readable(trace.source),
            properties={readable(key): readable(value) for key, value in trace.properties.items()},
            notes=[recording_pb2.Note(text=_NOTE, code=SUMMARY_SHORTENED)],
            folded=True,
            devices=[
                recording_pb2.DeviceSummary(
                    name=readable(device.name),
                    capacity_bytes=device.capacity,
                    product=readable(device.product),
                    peak=recording_pb2.Peak(
                        phase=Phase.OTHER,
                        by_category=recording_pb2.Parts(keys=[Category.UNKNOWN.key]),
                        by_operator=recording_pb2.Parts(keys=[NOT_KNOWN]),
                        by_phase=recording_pb2.Parts(keys=[NOT_KNOWN]),
                    ),
                    curve=recording_pb2.Curve(columns=1, categories=[Category.UNKNOWN]),
                    modules=recording_pb2.ModuleTable(
                        modules=[-1],
                        parents=[-1],
                        peak_inside=[-1],
                        calls=[0],
                        forward_ns=[0],
                        backward_ns=[0],
                    ),
                    accounts=self._accounts[row],
                    whole_devices=packed_whole(trace, row),
                )
                for row, device in enumerate(trace.devices)
            ],
        )

    @cached_property
    def _blocks_at_peaks(self) -> list[Int64]:
        stats = [list(steps.values()) for steps in self._stats]
        return [_blocks_at_peaks(self._trace, device, steps) for device, steps in enumerate(stats)]

    @cached_property
    def _lowest(self) -> list[Int64]:
        return [_lowest(self._trace, device) for device in range(len(self._trace.devices))]

    def _device(self, row: int, device: int) -> recording_pb2.DeviceSummary:
        stats, info = self._stats[device][row], self._trace.devices[device]
        return recording_pb2.DeviceSummary(
            name=readable(info.name),
            capacity_bytes=info.capacity,
            product=readable(info.product),
            stats=self._stats_of(stats),
            peak=self._peak(device, stats),
            curve=self._curve(row, device),
            modules=self._table(device, row, stats.peak_event),
            accounts=self._accounts[device],
            whole_devices=packed_whole(self._trace, device),
        )

    @cached_property
    def _accounts(self) -> list[list[recording_pb2.Account]]:
        return [
            [_account(account) for account in accounts(self._trace, device)]
            for device in range(len(self._trace.devices))
        ]

    def _stats_of(self, stats: StepStats) -> recording_pb2.StepStats:
        return recording_pb2.StepStats(
            peak_bytes=stats.peak_bytes,
            peak_event=stats.peak_event,
            peak_time_ns=stats.peak_time_ns - self._epoch,
            start_bytes=stats.start_bytes,
            entry_bytes=stats.entry_bytes,
            end_bytes=stats.end_bytes,
            window_peak_bytes=stats.window_peak_bytes,
            peak_reserved_bytes=stats.peak_reserved_bytes,
            step_start_ns=stats.start_ns - self._epoch,
            step_end_ns=stats.end_ns - self._epoch,
            allocated_bytes=stats.allocated_bytes,
            allocations=stats.allocations,
            stayed_bytes=stats.stayed_bytes,
            stayed=stats.stayed,
        )

    def _peak(self, device: int, stats: StepStats) -> recording_pb2.Peak:
        state = moment(self._trace, device, stats.peak_event, largest=0)
        return recording_pb2.Peak(
            event=state.event,
            time_ns=stats.peak_time_ns - self._epoch,
            bytes=state.bytes,
            phase=state.phase,
            operator=_or_none(state.operator),
            module=_or_none(state.module),
            by_category=_parts(state.parts("category")),
            by_operator=_parts(state.parts("operator")),
            by_phase=_parts(state.parts("phase")),
            largest=self._largest(device, stats.peak_event),
        )

    def _largest(self, device: int, event: int) -> recording_pb2.Allocations:
        trace, blocks = self._trace, self._trace.allocations
        rows = largest_rows(trace, blocks.alive_at(event, device), LARGEST)
        confidences = blocks.module_confidence[rows]
        return recording_pb2.Allocations(
            bytes=blocks.bytes[rows].tolist(),
            addresses=blocks.address[rows].tolist(),
            categories=blocks.category[rows].tolist(),
            phases=blocks.phase[rows].tolist(),
            modules=blocks.module[rows].tolist(),
            operators=[
                readable(trace.operators[row]) if row >= 0 else "" for row in blocks.operator[rows].tolist()
            ],
            names=[readable(trace.labels[row]) if row >= 0 else "" for row in blocks.label[rows].tolist()],
            born_ns=self._times(blocks.born[rows]),
            freed_ns=self._times(blocks.freed[rows]),
            reasons=blocks.reason[rows].tolist(),
            module_confidences=confidences.tolist() if (confidences != CERTAIN).any() else [],
            tensors=[readable(tensor_name(trace, row) or "") for row in rows.tolist()],
        )

    def _times(self, events: Int64) -> list[int]:
        """Return when events happened, from the epoch; -1 for those before and after the window."""
        time_ns, is_known = self._trace.events.time_ns, (events >= 0) & (events < len(self._trace.events))
        times = np.full(len(events), -1, np.int64)
        times[is_known] = time_ns[events[is_known]] - self._epoch
        return [*map(int, times)]

    def _table(self, device: int, row: int, event: int) -> recording_pb2.ModuleTable:
        blocks = self._trace.allocations
        table = module_table(self._trace, device, row, event)
        # Counts by row of the modules; row -1 (bytes without a known owner) comes last.
        owner = blocks.module[blocks.alive_at(event, device)]
        counts = np.bincount(owner[owner >= 0], minlength=len(self._trace.modules))
        counts = np.append(counts, np.count_nonzero(owner < 0))
        return recording_pb2.ModuleTable(
            modules=table.rows.tolist(),
            parents=table.parent.tolist(),
            own=table.own.ravel().tolist(),
            own_count=counts[table.rows].tolist(),
            peak_inside=table.peak_inside.tolist(),
            calls=table.calls.tolist(),
            allocations=table.allocations.tolist(),
            allocated_bytes=table.allocated_bytes.tolist(),
            forward_ns=table.forward_ns.tolist(),
            backward_ns=table.backward_ns.tolist(),
        )

    def _curve(self, row: int, device: int) -> recording_pb2.Curve:
        drawn = category_columns(self._trace, device, *step_span(self._trace, row), CURVE_COLUMNS)
        used = [category for category in STACKING_ORDER if drawn.stacks[category].any()]
        return recording_pb2.Curve(
            t0_ns=drawn.t0_ns - self._epoch,
            t1_ns=drawn.t1_ns - self._epoch,
            columns=CURVE_COLUMNS,
            low=_differences(drawn.low),
            high=_differences(drawn.high),
            reserved=None if drawn.reserved is None else _differences(drawn.reserved),
            categories=used,
            stacks=differences(drawn.stacks[used]).ravel().tolist(),
            peak_event=drawn.peak_event,
            peak_time_ns=drawn.peak_time_ns - self._epoch,
            peak_column=drawn.peak_column,
        )

    @cached_property
    def _modules(self) -> recording_pb2.Modules:
        modules = self._trace.modules
        classes = {
            name: row + 1
            for row, name in enumerate(dict.fromkeys(m.class_name for m in modules if m.class_name))
        }
        return recording_pb2.Modules(
            keys=[readable(module.key) for module in modules],
            classes=[classes.get(module.class_name, 0) for module in modules],
            class_names=map(readable, classes),
        )

    def _spans(self, spans: Spans, row: int) -> recording_pb2.Spans:
        """Return the longest spans that overlap a step, without those too short to be visible."""
        start_ns, end_ns = step_span(self._trace, row)
        length = spans.end_ns - spans.start_ns
        long_enough = length >= (end_ns - start_ns) // 500
        visible = (spans.end_ns > start_ns) & (spans.start_ns < end_ns) & long_enough
        rows = np.flatnonzero(visible)
        rows = np.sort(rows[np.argsort(-length[rows], kind="stable")[:LONGEST_CALLS]])
        return recording_pb2.Spans(
            starts=_differences(spans.start_ns[rows] - self._epoch),
            lengths=length[rows].tolist(),
            names=spans.name[rows].tolist(),
            depths=spans.depth[rows].tolist(),
            phases=spans.phase[rows].tolist(),
        )


def _account(account: Account) -> recording_pb2.Account:
    return recording_pb2.Account(
        moment=account.moment,
        counted_bytes=account.counted,
        counter=account.counter,
        allocator_bytes=account.allocator,
        at_least=account.at_least,
        causes=[cause for cause, _ in account.causes],
        cause_bytes=[size for _, size in account.causes],
    )


def _parts(parts: Sequence[Part]) -> recording_pb2.Parts:
    return recording_pb2.Parts(
        keys=[readable(part.key) for part in parts],
        bytes=[part.bytes for part in parts],
        counts=[part.count for part in parts],
    )


def _differences(series: np.ndarray) -> list[int]:
    steps: list[int] = differences(series).tolist()
    return steps


def _or_none(text: str | None) -> str | None:
    return None if text is None else readable(text)


def _note(note: Note) -> recording_pb2.Note:
    return recording_pb2.Note(
        warning=note.level == "warning",
        text=readable(note),
        code=note.code,
        bytes=note.bytes,
        device=readable(note.device),
    )


def _blocks_at_peaks(trace: MemoryTrace, device: int, stats: Sequence[StepStats]) -> Int64:
    """Return how many blocks of a device are live at each step's peak: int64, shape (steps,)."""
    blocks, peaks = trace.allocations, np.array([step.peak_event for step in stats], np.int64)
    here = blocks.device == device
    freed = np.sort(blocks.freed[here])
    return np.searchsorted(blocks.born[here], peaks, "right") - np.searchsorted(freed, peaks, "right")


def _lowest(trace: MemoryTrace, device: int) -> Int64:
    """Return the lowest live bytes of a device in each step, including its start: int64, shape (steps,)."""
    bounds = np.array([trace.step_events(row) for row in range(len(trace.steps))], np.int64)
    bounds[:, 1] += 1
    level = np.append(trace.live(device), np.iinfo(np.int64).max)
    lowest: Int64 = np.minimum.reduceat(level, bounds.ravel())[::2]
    return lowest
