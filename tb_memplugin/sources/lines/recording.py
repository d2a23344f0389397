"""One recording of lines, from start to stop: on the CPU by operators' results, elsewhere by the history."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.sources.lines.ledger import LineLedger
from tb_memplugin.sources.lines.mode import LineMode, TakenStacks, line_mode
from tb_memplugin.sources.lines.stacks import MOST_FRAMES, MOST_STACKS
from tb_memplugin.sources.lines.threads import ThreadWatch
from tb_memplugin.sources.storage_lifetimes import Block, Buffer
from tb_memplugin.sources.tracer.history import HistoryRecording
from tb_memplugin.sources.tracer.recording import StorageRecording
from tb_memplugin.trace import Kind, MemoryTrace, events, start_state

SOURCE = "LineTracer"


@dataclass(frozen=True, slots=True)
class RecordedLines:
    """What was traced.

    `total_allocated` are bytes of all allocations between start and stop, by device row; `gone_peaks` are
    traces without events, whose start state is what was alive at a device's peak, for devices whose
    peak is older than the events that are kept. `knows_threads`: stacks tell which thread they are of.
    """

    trace: MemoryTrace
    total_allocated: dict[int, int]
    gone_peaks: dict[int, MemoryTrace]
    knows_threads: bool


class StorageLines(StorageRecording):
    """Watches the storages of one type of device, on all threads, and takes stacks.

    Args:
        device_type: "cpu", say.
        max_events: entries to keep. Peaks and totals are those of all.
    """

    def __init__(self, device_type: str, max_events: int) -> None:
        super().__init__(device_type, max_events)
        self._taken = TakenStacks()
        self._threads = ThreadWatch(self._enter_thread)
        self._entered: list[LineMode] = []
        self._unmet = 0

    def begin(self) -> None:
        """Take the start state, begin to watch."""
        self._unmet = threading.active_count() - 1
        super().start({}, [])
        self._lines.begin()
        self._threads.start()

    def end(self) -> RecordedLines:
        """End it, and say what was seen."""
        self._threads.stop()
        self._lines.stack_of_now.clear()
        result = super().stop({}, [])
        for mode in self._entered:
            mode.leave()
        stacks = self._taken.stacks.texts()
        trace = replace(
            result.trace, source=SOURCE, stacks=stacks, notes=(*result.trace.notes, *self._line_notes())
        )
        gone = {
            row: _at_peak(trace, blocks)
            for row in range(len(trace.devices))
            if (blocks := self._lines.blocks_at_gone_peak(row)) is not None
            and self._lines.peaks.get(row, 0) > int(trace.live(row).max())
        }
        return RecordedLines(trace, dict(self._lines.allocated), gone, knows_threads=True)

    def _open_ledger(self) -> LineLedger:
        self._lines = LineLedger(self._max_events, self._device_type)
        return self._lines

    def _mode(self) -> LineMode:
        return line_mode(self.layers, self._lines, self._taken)

    def _enter_thread(self) -> None:
        with self._lines.lock:
            mode = self._mode()
            self._entered.append(mode)
        mode.enter()

    def _line_notes(self) -> Iterator[str]:
        stacks = self._taken.stacks
        if self._unmet:
            yield (
                f"{self._unmet:,} other threads ran when tracing began. What such a thread allocates counts "
                "from the first layer that it calls."
            )
        if stacks.left_out:
            yield (
                f"{stacks.left_out:,} allocations have no line: there were more than {MOST_STACKS:,} "
                "different call stacks."
            )
        if stacks.cut:
            yield f"{stacks.cut:,} call stacks have more than {MOST_FRAMES} frames; the outer ones are cut."


class HistoryLines(HistoryRecording):
    """Watches a device whose allocator keeps a history with Python stacks: CUDA (ROCm too) and XPU."""

    def begin(self) -> None:
        """Switch the history on.

        Raises:
            MemPluginError: the process does not use the device yet.
        """
        if not self._allocator.is_in_use():
            raise MemPluginError(
                f"No {self._device.type} device is in use yet.",
                where="LineTracer.start_tracing",
                fix="Put something on the device before tracing starts.",
            )
        super().start({}, [])

    def end(self) -> RecordedLines:
        """Read what the allocator wrote down."""
        result = super().stop({}, [])
        trace = _with_forward_lines(replace(result.trace, source=SOURCE))
        lost = tuple(self._lost(result.peak_allocated, trace))
        notes = [note for note in trace.notes if not (lost and note.startswith("The history holds"))]
        trace = replace(trace, notes=(*notes, *self._history_notes(), *lost))
        born = trace.events.kind == Kind.ALLOC
        total = {
            row: int(trace.events.bytes[born & (trace.events.device == row)].sum())
            for row in range(len(trace.devices))
        }
        return RecordedLines(trace, total, {}, knows_threads=False)

    def _history_notes(self) -> Iterator[str]:
        if not self._is_fresh:
            yield "The history was on before: what it knows of older blocks' lines is shown with the others."

    def _lost(self, counted_peak: int, trace: MemoryTrace) -> Iterator[str]:
        kept = max((int(trace.live(row).max()) for row in range(len(trace.devices))), default=0)
        if counted_peak > kept:
            yield (
                f"The allocator counted a peak of {counted_peak:,} bytes, in entries that the history "
                f"overwrote (max_events {self._max_events:,}): the lines are those of {kept:,} bytes, the "
                "highest moment of those kept, and the total counts the kept ones. Give more max_events."
            )


def _at_peak(trace: MemoryTrace, blocks: Sequence[Block | Buffer]) -> MemoryTrace:
    return MemoryTrace(
        source=trace.source,
        events=events([]),
        start=start_state(
            [block.bytes for block in blocks],
            device=[block.device for block in blocks],
            address=np.array([block.address for block in blocks], np.uint64),
            stack=[block.stack for block in blocks],
        ),
        devices=trace.devices,
        steps=trace.steps,
        stacks=trace.stacks,
        notes=trace.notes,
    )


def _with_forward_lines(trace: MemoryTrace) -> MemoryTrace:
    """What a backward allocated with no stack of its own goes by its forward call's, where torch wrote it."""
    alone = (trace.events.stack < 0) & (trace.events.forward >= 0)
    if not alone.any():
        return trace
    stack = np.where(alone, trace.events.forward, trace.events.stack).astype(np.int32)
    return replace(trace, events=replace(trace.events, stack=stack))


def recording_device(device: torch.device | None) -> torch.device:
    """Where to look: as asked, else the accelerator that this process uses, else the CPU."""
    if device is not None:
        return device
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_available() and backend.is_initialized():
            return torch.device(name)
    return torch.device("cpu")
