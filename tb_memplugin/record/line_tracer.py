"""`LineTracer`: which source lines hold the memory at the peak, without a profiler.

This module's functions `start_tracing`, `stop_tracing` and `report_stats` use one tracer per process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import TextIO

import numpy as np
import torch

from tb_memplugin.analysis.lines import (
    UNTRACED,
    LineChoice,
    LineReport,
    LineUse,
    ThreadLines,
    line_uses,
    thread_lines,
)
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.terminal import as_json as json_of
from tb_memplugin.exports.terminal import as_text
from tb_memplugin.logs import instance_logger
from tb_memplugin.record.arguments import at_least_one, checked_device, default_worker_name, refuse_absent
from tb_memplugin.record.beside_compiler import hidden_from_dynamo
from tb_memplugin.record.guard import Guard, guarded
from tb_memplugin.record.lines import HistoryLines, RecordedLines, StorageLines, recording_device
from tb_memplugin.record.tracer.history import has_history
from tb_memplugin.store.writer import BlockWriter
from tb_memplugin.trace import MemoryTrace

__all__ = [
    "LineReport",
    "LineTracer",
    "LineUse",
    "ThreadLines",
    "report_stats",
    "start_tracing",
    "stop_tracing",
    "switch_allocator",
]

_LOST, _START = "The trace could not be read", "LineTracer.start_tracing"


class LineTracer:
    """Traces which Python lines allocate, and names those that hold memory at the true peak.

    On the CPU a dispatch mode follows every storage, on every thread; on CUDA and XPU the allocator's own
    history is read. When tracing stops, the tracer removes its mode and stops the history that it started.

    Args:
        max_events: how many events to keep for the tab. On the CPU the peak, its lines and the totals
            cover all events, also those that are not kept.
        device: "cpu", "cuda:0" or a `torch.device`. None: the accelerator that is in use, else the CPU.
        log_level: the level for this tracer's own messages, as a name or number. None uses the package's
            level.

    Raises:
        TypeError: `max_events` is not a whole number.
        MemPluginError: `max_events` is below 1, or the device or the level is none that torch or `logging`
            knows.

    Example:
        >>> tracer = LineTracer()
        >>> tracer.start_tracing()
        >>> model(batch)
        >>> tracer.stop_tracing()
        >>> tracer.report_stats()
    """

    def __init__(
        self,
        max_events: int = 100_000,
        device: str | torch.device | None = None,
        log_level: int | str | None = None,
    ) -> None:
        self.max_events = at_least_one("max_events", max_events, "LineTracer")
        self._device = checked_device(device, "LineTracer")
        self._logger = instance_logger(log_level)
        self._lock = threading.Lock()
        self._guard = Guard(_LOST, self._logger)
        self._running: StorageLines | HistoryLines | None = None
        self._recorded: RecordedLines | None = None
        self._stretch = -1
        self._saved = BlockWriter()

    def fail(self, where: str, error: BaseException) -> None:
        """Raise what the user has to mend; else lose what was recorded, and log the error."""
        if isinstance(error, MemPluginError) and where == _START:
            raise error
        recording, self._running = self._running, None
        self._guard.end(where, error, *([] if recording is None else [recording.abandon]))

    @guarded(_START)
    @hidden_from_dynamo
    def start_tracing(self) -> None:
        """Start tracing. Memory that is alive now counts as `untraced`; the earlier result is dropped.

        Raises:
            MemPluginError: this tracer is already tracing, or the device does not exist or is not in use.
        """
        with self._lock:
            if self._running is not None:
                raise MemPluginError(
                    "This LineTracer is already tracing.",
                    where="LineTracer.start_tracing",
                    fix="Call stop_tracing() first, or use another LineTracer for an inner block.",
                )
            self._guard.log_only_next()
            self._recorded = None
            recording = self._recording()
            recording.begin()
            self._running = recording
            self._stretch += 1

    @guarded("LineTracer.stop_tracing")
    @hidden_from_dynamo
    def stop_tracing(self) -> None:
        """Stop tracing. A second call does nothing."""
        with self._lock:
            if self._running is not None:
                self._recorded = self._running.end()
                self._running = None

    def __enter__(self) -> LineTracer:
        self.start_tracing()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_tracing()

    def report(
        self,
        *,
        library_code: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        device: str | None = None,
    ) -> LineReport:
        """Return how much memory each line holds at the peak.

        Args:
            library_code: name the innermost Python line even if it is in an installed package. If False,
                name the innermost line of the user's code.
            include: shell patterns of files (`*/model.py`) whose lines are preferred to all others.
            exclude: shell patterns of files whose lines are never named.
            device: a device name such as "cuda:1". None: the device with the highest peak.

        Raises:
            MemPluginError: nothing was traced, or nothing on that device.
        """
        recorded, choice = self._stopped(), LineChoice(library_code, _patterns(include), _patterns(exclude))
        trace = recorded.trace
        peak_trace, row, event = self._peak(recorded, device)
        rows = peak_trace.allocations.alive_at(event, row)
        lines = line_uses(peak_trace, rows, choice)
        return LineReport(
            device=trace.devices[row].name,
            max_bytes=sum(use.bytes for use in lines),
            total_allocated_bytes=recorded.total_allocated.get(row, 0),
            untraced_bytes=sum(use.bytes for use in lines if use.location == UNTRACED),
            lines=lines,
            threads=thread_lines(peak_trace, rows, choice) if recorded.knows_threads else (),
            notes=trace.notes,
        )

    def report_stats(
        self,
        file: TextIO | None = None,
        *,
        top: int = 20,
        as_json: bool = False,
        by_thread: bool = False,
        library_code: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        device: str | None = None,
    ) -> None:
        """Write the report.

        Args:
            file: the file to write to. None: standard output.
            top: how many lines to show; the rest are summed in one row. JSON contains all lines.
            as_json: write JSON with exact bytes instead of a table.
            by_thread: add a table for each thread. JSON always contains the threads.
            library_code, include, exclude, device: see `report`.

        Raises:
            MemPluginError: nothing was traced, or nothing on that device.
        """
        report = self.report(library_code=library_code, include=include, exclude=exclude, device=device)
        out = file or sys.stdout
        out.write(json_of(report) + "\n" if as_json else as_text(report, top, by_thread=by_thread))

    def trace_result(self) -> MemoryTrace:
        """Return the trace with a stack for every allocation, for every view, export and analysis.

        Raises:
            MemPluginError: nothing was traced.
        """
        return self._stopped().trace

    def save(self, logdir: str | os.PathLike[str], worker_name: str | None = None) -> None:
        """Write the trace for the Memory tab of `tensorboard --logdir <logdir>`; its Stacks view shows lines.

        The traced stretches of a tracer are numbered from 0 and appear as steps in the same folder.

        Raises:
            MemPluginError: nothing was traced, or the folder cannot be written.
        """
        worker = worker_name or default_worker_name()
        self._saved.write(self.trace_result(), self._stretch, logdir, worker)

    def _peak(self, recorded: RecordedLines, device: str | None) -> tuple[MemoryTrace, int, int]:
        """Return the trace with a device's peak, the device's row, and the index of the event at the peak."""
        trace, dropped_peaks = recorded.trace, recorded.dropped_peaks
        if not trace.devices:
            raise MemPluginError(
                "No device was used while tracing.",
                where="LineTracer",
                fix="Trace code that allocates memory.",
            )
        levels = [dropped_peaks.get(row, trace).live(row) for row in range(len(trace.devices))]
        highest = max(range(len(levels)), key=lambda row: int(levels[row].max()))
        row = highest if device is None else trace.device_row(device)
        return dropped_peaks.get(row, trace), row, int(np.argmax(levels[row])) - 1

    def _recording(self) -> StorageLines | HistoryLines:
        device = recording_device(self._device)
        if has_history(device.type):
            return HistoryLines(device, self.max_events, guard=self._guard)
        refuse_absent(
            device,
            "LineTracer",
            "Leave `device` out to use the current accelerator, or the CPU if there is none.",
        )
        return StorageLines(device.type, self.max_events, self._guard)

    def _stopped(self) -> RecordedLines:
        if self._running is not None:
            raise MemPluginError(
                "Lines are still being traced.", where="LineTracer", fix="Call stop_tracing() first."
            )
        if self._recorded is None:
            raise MemPluginError(
                "Nothing has been traced yet.",
                where="LineTracer",
                fix="Call start_tracing() before the code to trace, and stop_tracing() after it.",
            )
        return self._recorded


def _patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


_TRACER = LineTracer()


def switch_allocator() -> None:
    """Do nothing. Existing scripts may keep the call: live memory is found when tracing starts."""


start_tracing, stop_tracing, report_stats = _TRACER.start_tracing, _TRACER.stop_tracing, _TRACER.report_stats
