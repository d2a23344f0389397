"""`MemoryTracer`: memory by layer while a model runs, without a profiler."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import nn

from tb_memplugin.analysis.moments import peak
from tb_memplugin.analysis.units import size_text
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import speedscope
from tb_memplugin.exports.output import replacing
from tb_memplugin.exports.terminal import printable
from tb_memplugin.logs import instance_logger
from tb_memplugin.record.arguments import (
    Optimizers,
    at_least_one,
    checked_device,
    checked_model,
    checked_optimizers,
    default_worker_name,
    referents,
    refuse_absent,
)
from tb_memplugin.record.beside_compiler import hidden_from_dynamo
from tb_memplugin.record.guard import Guard, guarded
from tb_memplugin.record.torch_private.modules import parameters_in
from tb_memplugin.record.torch_private.tensors import device_of
from tb_memplugin.record.tracer.history import HistoryRecording, has_history
from tb_memplugin.record.tracer.recording import StorageRecording
from tb_memplugin.record.tracer.results import LayerMemoryStats, MemoryEvent, PhaseMemoryStats, TracerResult
from tb_memplugin.store.writer import BlockWriter
from tb_memplugin.trace import MemoryTrace, Phase

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer", "PhaseMemoryStats"]


_SUMMARY_ROWS = 20
_LOST, _BEGIN = "The trace could not be read", "the beginning of a trace"
_NO_PHASE = "A phase of the trace has no figures"


class MemoryTracer:
    """Traces memory layer by layer, in forward and backward.

    On CUDA and XPU it reads the allocator's counters and its history. Elsewhere (the CPU) a dispatch mode
    follows every storage from its creation to its end. When the block ends, the tracer removes its hooks
    and its mode and stops the history that it started.

    Args:
        max_events: how many events to keep. Beyond that the oldest are dropped and counted in
            `dropped_events`; peaks and the figures of layers stay correct.
        device: "cpu", "cuda:0" or a `torch.device`. None: the device of the model's first parameter.
        enable_fragmentation_tracking: if False, fragmentation is reported as 0.
        log_level: the level for this tracer's own messages, as a name or number. None uses the package's
            level.

    Raises:
        TypeError: `max_events` is not a whole number.
        MemPluginError: `max_events` is below 1, or the device or the level is none that torch or `logging`
            knows.

    Example:
        >>> tracer = MemoryTracer()
        >>> with tracer.trace(model, optimizer):
        ...     model(batch).sum().backward()
        ...     optimizer.step()
        >>> tracer.print_summary()
    """

    def __init__(
        self,
        max_events: int = 100_000,
        device: str | torch.device | None = None,
        enable_fragmentation_tracking: bool = True,
        log_level: int | str | None = None,
    ) -> None:
        self.max_events = at_least_one("max_events", max_events, "MemoryTracer")
        self._device = checked_device(device, "MemoryTracer")
        self._with_fragmentation = enable_fragmentation_tracking
        self._logger = instance_logger(log_level)
        self._lock = threading.Lock()
        self._running: StorageRecording | HistoryRecording | None = None
        self._guard = Guard(_LOST, self._logger)
        self._is_lost = False
        self._result: TracerResult | None = None
        self._block = -1
        self._saved = BlockWriter()

    def trace(self, model: nn.Module, optimizer: Optimizers = None) -> Tracing:
        """Return a context manager that traces its block and, when it ends, replaces the earlier result.

        Args:
            model: the model to show by layer. Held weakly: it may change or be deleted inside the block.
            optimizer: one or several optimizers, to recognize their state from the start. Held weakly.

        Raises:
            TypeError: a model or optimizer has the wrong type.
            MemPluginError: on entering the block, if this tracer is already tracing or the model is
                compiled.
        """
        return Tracing(self, checked_model(model), checked_optimizers(optimizer))

    @contextmanager
    def track_phase(self, name: str) -> Iterator[None]:
        """Give a name (`forward`, `validation`, any text) to a part of the traced block. Phases may nest.

        Raises:
            MemPluginError: nothing is being traced.
        """
        recording = self._running
        if recording is None and not self._is_lost:
            raise MemPluginError(
                f"Phase {name!r} is outside a traced block.",
                where="MemoryTracer.track_phase",
                fix="Use it inside `with tracer.trace(model):`.",
            )
        phase = None
        try:
            phase = recording.begin_phase(name) if recording is not None else None
        except BaseException as error:
            self._guard.end("the beginning of a phase", error, loss=_NO_PHASE)
        try:
            yield
        finally:
            try:
                if recording is not None and phase is not None:
                    recording.end_phase(phase)
            except BaseException as error:
                self._guard.end("the end of a phase", error, loss=_NO_PHASE)

    @property
    def result(self) -> TracerResult:
        """Everything that was recorded in the last traced block.

        Raises:
            MemPluginError: nothing was traced yet.
        """
        if self._result is None:
            raise MemPluginError(
                "Nothing has been traced yet.",
                where="MemoryTracer",
                fix="Run the model inside `with tracer.trace(model):`, and ask for results after the block.",
            )
        return self._result

    @property
    def events(self) -> list[MemoryEvent]:
        """The latest events, at most `max_events`, oldest first."""
        return list(self.result.events())

    @property
    def dropped_events(self) -> int:
        """How many events were dropped to make room for newer ones."""
        return self.result.dropped

    def trace_result(self) -> MemoryTrace:
        """Return the trace, which every view, export and analysis of tb_memplugin accepts."""
        return self.result.trace

    def get_layer_stats(self) -> dict[str, LayerMemoryStats]:
        """Return the figures of every layer that ran, by FQN, parents before children."""
        return dict(self.result.layers)

    def get_peak_memory_per_layer(self) -> dict[str, int]:
        """Return the highest live bytes while each layer ran, by FQN."""
        return {name: layer.peak_allocated for name, layer in self.result.layers.items()}

    def get_fragmentation_stats(self) -> dict[str, float]:
        """Return each layer's mean fragmentation by FQN, 0 to 1; 0 on the CPU, which has no reserve."""
        return {name: layer.avg_fragmentation for name, layer in self.result.layers.items()}

    def get_phase_stats(self) -> list[PhaseMemoryStats]:
        """Return the phases that `track_phase` named, in the order in which they ended."""
        return list(self.result.phases)

    def print_summary(self, console: Console | None = None) -> None:
        """Print the totals and the layers with the highest peaks, through rich."""
        out, result = console or Console(), self.result
        has_reserve = any(layer.peak_reserved != layer.peak_allocated for layer in result.layers.values())
        out.print(
            f"Peak allocated {size_text(result.peak_allocated)}, "
            f"peak reserved {size_text(result.peak_reserved)}, {result.total:,} events "
            f"({result.dropped:,} dropped)",
            markup=False,
        )
        if where := _where_it_peaked(result):
            out.print(f"The peak is in {where}", markup=False)
        order = sorted(result.layers.values(), key=lambda layer: (-layer.peak_allocated, layer.layer_name))
        out.print(_layer_table(order[:_SUMMARY_ROWS], has_reserve=has_reserve))
        if len(order) > _SUMMARY_ROWS:
            out.print(f"... and {len(order) - _SUMMARY_ROWS:,} more layers", markup=False)
        if excess := max((layer.peak_excess_bytes for layer in order), default=0):
            out.print(
                f"≤: without the tracer, this peak may be lower, by {size_text(excess)} at most "
                "(each layer's peak_excess_bytes)",
                markup=False,
            )
        for phase in result.phases[-_SUMMARY_ROWS:]:
            out.print(
                f"phase {printable(phase.name)}: {size_text(phase.before_bytes)} -> "
                f"{size_text(phase.after_bytes)}, peak {size_text(phase.peak_bytes)}",
                markup=False,
            )
        for note in result.trace.notes:
            out.print(f"note: {printable(note)}", markup=False)

    def export_flame_graph(self, path: str | os.PathLike[str]) -> None:
        """Write what was alive at the peak as a flame graph for www.speedscope.app.

        If events were dropped, it shows the peak among the events that were kept.

        Raises:
            MemPluginError: nothing was traced, or the file cannot be written.
        """
        speedscope.write(self.trace_result(), path, "MemoryTracer")

    def export_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write {events, layer_stats, summary} as JSON, in bytes, seconds since the start, and milliseconds.

        Raises:
            MemPluginError: nothing was traced, or the file cannot be written.
        """
        text = json.dumps(self._timeline())
        with replacing(path) as stream:
            stream.write(text.encode("ascii"))

    def save(self, logdir: str | os.PathLike[str], worker_name: str | None = None) -> None:
        """Write the trace for the Memory tab of `tensorboard --logdir <logdir>`.

        A tracer's blocks are numbered from 0; blocks saved to the same folder appear there as steps.

        Raises:
            MemPluginError: nothing was traced, or the folder cannot be written.
        """
        worker = worker_name or default_worker_name()
        self._saved.write(self.trace_result(), self._block, logdir, worker)

    def _timeline(self) -> dict[str, Any]:
        result = self.result
        return {
            "events": [asdict(event) for event in result.events()],
            "layer_stats": {name: asdict(layer) for name, layer in result.layers.items()},
            "summary": {
                "device": [device.name for device in result.trace.devices],
                "duration_s": (result.stop_ns - result.start_ns) / 1e9,
                "peak_allocated": result.peak_allocated,
                "peak_reserved": result.peak_reserved,
                "total_events": result.total,
                "dropped_events": result.dropped,
                "layers": len(result.layers),
                "phases": [{**asdict(phase), "delta_bytes": phase.delta_bytes} for phase in result.phases],
                "notes": list(result.trace.notes),
            },
        }

    def fail(self, where: str, error: BaseException) -> None:
        """Lose the block, at the beginning or the end of which an error was raised, and log the error."""
        recording, self._running = self._running, None
        self._is_lost, self._result = where == _BEGIN, None
        self._guard.end(where, error, *([] if recording is None else [recording.abandon]))

    def _begin(self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        with self._lock:
            if self._running is not None:
                raise MemPluginError(
                    "This tracer is already tracing.",
                    where="MemoryTracer.trace",
                    fix="Use another MemoryTracer for an inner block, or on another thread.",
                )
            self._guard.log_only_next()
            recording = self._recording(models)
            recording.start(models, optimizers)
            self._running = recording

    def _recording(self, models: Mapping[str, nn.Module]) -> StorageRecording | HistoryRecording:
        device = self._device or next((device_of(p) for m in models.values() for p in parameters_in(m)), None)
        device = device or torch.device("cpu")
        if has_history(device.type):
            return HistoryRecording(
                device, self.max_events, with_fragmentation=self._with_fragmentation, guard=self._guard
            )
        fix = (
            "Leave `device` out to use the model's device."
            if self._device is not None
            else "Move the model to a device of this machine, or name the device to trace with device=."
        )
        refuse_absent(device, "MemoryTracer", fix)
        return StorageRecording(device.type, self.max_events, self._guard)

    def _end(self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        with self._lock:
            self._is_lost, self._result = False, None
            self._block += 1
            if self._running is not None:
                self._result = self._running.stop(models, optimizers)
                self._running = None


class Tracing:
    """The context manager of `MemoryTracer.trace`. While open, it holds model and optimizers weakly."""

    def __init__(
        self, tracer: MemoryTracer, model: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self._tracer = tracer
        self._arguments: tuple[nn.Module, list[torch.optim.Optimizer]] | None = (model, optimizers)
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def fail(self, where: str, error: BaseException) -> None:
        """Raise what the user has to mend; else lose the block."""
        if isinstance(error, MemPluginError) and where == _BEGIN:
            raise error
        self._tracer.fail(where, error)

    def __enter__(self) -> MemoryTracer:
        self._enter()
        return self._tracer

    @guarded(_BEGIN)
    @hidden_from_dynamo
    def _enter(self) -> None:
        if self._arguments is None:
            raise MemPluginError(
                "This block was already used.",
                where="MemoryTracer.trace",
                fix="Call trace() again for each block.",
            )
        (model, optimizers), self._arguments = self._arguments, None
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._tracer._begin({"": model}, optimizers)

    @guarded("the end of a trace")
    @hidden_from_dynamo
    def __exit__(self, *_: object) -> None:
        model = self._model() if self._model is not None else None
        self._tracer._end({"": model} if model is not None else {}, referents(self._optimizers))


def _layer_table(layers: Sequence[LayerMemoryStats], *, has_reserve: bool) -> Table:
    """Return a table of layers; the allocator's reserve only if it keeps one, so that names have room."""
    table = Table(Column("layer", overflow="fold"))
    for header in (
        "peak\nallocated",
        *(("peak\nreserved", "frag.") if has_reserve else ()),
        "allocs",
        "frees",
        "ms",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for layer in layers:
        reserve = (size_text(layer.peak_reserved), f"{layer.avg_fragmentation:.1%}") if has_reserve else ()
        table.add_row(
            Text(printable(layer.layer_name)),
            ("≤ " if layer.peak_excess_bytes else "") + size_text(layer.peak_allocated),
            *reserve,
            f"{layer.total_allocations:,}",
            f"{layer.total_deallocations:,}",
            f"{layer.duration_ms:,.2f}",
        )
    return table


def _where_it_peaked(result: TracerResult) -> str:
    """Phase, layer and operator of the peak's last allocation; "" if the trace no longer holds the peak."""
    if not result.trace.devices:
        return ""
    state = peak(result.trace)
    if state.bytes != result.peak_allocated:
        return ""
    parts = [f"phase {state.phase.key}"] if state.phase != Phase.OTHER else []
    parts += [f"layer {state.module}"] if state.module in result.layers else []
    parts += [f"operator {state.operator}"] if state.operator else []
    return printable(", ".join(parts))
