"""`MemoryTracer`: memory by layer while a model runs, without a profiler."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from tb_memplugin.analysis.units import size_told
from tb_memplugin.arguments import (
    Optimizers,
    at_least_one,
    checked_device,
    checked_model,
    checked_optimizers,
    refuse_absent,
)
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import speedscope
from tb_memplugin.exports.output import replacing
from tb_memplugin.exports.terminal import printable
from tb_memplugin.handler import default_worker_name
from tb_memplugin.logs import instance_logger, tell_trace_is_lost
from tb_memplugin.sources.beside_dynamo import hidden_from_dynamo
from tb_memplugin.sources.tracer.history import HistoryRecording, has_history
from tb_memplugin.sources.tracer.recording import StorageRecording
from tb_memplugin.sources.tracer.results import (
    LayerMemoryStats,
    MemoryEvent,
    PhaseMemoryStats,
    TracerResult,
)
from tb_memplugin.store.block_writer import BlockWriter
from tb_memplugin.trace import MemoryTrace

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer", "PhaseMemoryStats"]

_Switch = Callable[[Mapping[str, nn.Module], Sequence[torch.optim.Optimizer]], None]

_SUMMARY_ROWS = 20


class MemoryTracer:
    """Traces memory layer by layer, forward and backward, with two lines.

    On CUDA and XPU it reads the allocator's counters and its history. Elsewhere (the CPU) a dispatch mode
    follows every storage from birth to death. Hooks, mode and history are gone when the block ends.

    Args:
        max_events: events to keep; past that the oldest go, while peaks and layers' figures stay right
            and `dropped_events` counts those that went.
        device: "cpu", "cuda:0", a `torch.device`; None: where the model's first parameter is.
        enable_fragmentation_tracking: False leaves fragmentation at 0.
        log_level: of this tracer's own messages, as a name or number. None: as the package's.

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
        self._result: TracerResult | None = None
        self._block = -1
        self._saved = BlockWriter()

    def trace(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
    ) -> Tracing:
        """A block to trace. What an earlier block of this tracer saw is replaced when it ends.

        Args:
            model: whose layers are told apart. Held weakly: it may change or go inside the block.
            optimizer: one or several, to know their state from the start. Held weakly.

        Raises:
            TypeError: a model or optimizer of the wrong type.
            MemPluginError: on entering: this tracer traces already, or the model is compiled.
        """
        return Tracing(self._begin, self._end, self, checked_model(model), checked_optimizers(optimizer))

    @contextmanager
    def track_phase(self, name: str) -> Iterator[None]:
        """Name a stretch inside the traced block: `forward`, `validation`, anything. They may nest.

        Raises:
            MemPluginError: nothing is being traced.
        """
        recording = self._running
        if recording is None:
            raise MemPluginError(
                f"Phase {name!r} is outside of a traced block.",
                where="MemoryTracer.track_phase",
                fix="Use it inside `with tracer.trace(model):`.",
            )
        phase = recording.begin_phase(name)
        try:
            yield
        finally:
            recording.end_phase(phase)

    @property
    def result(self) -> TracerResult:
        """Everything that the last traced block saw.

        Raises:
            MemPluginError: nothing was traced yet.
        """
        if self._result is None:
            raise MemPluginError(
                "Nothing was traced yet.",
                where="MemoryTracer",
                fix="Run the model inside `with tracer.trace(model):`, and ask when the block has ended.",
            )
        return self._result

    @property
    def events(self) -> list[MemoryEvent]:
        """The newest events, oldest first: at most `max_events`."""
        return list(self.result.events())

    @property
    def dropped_events(self) -> int:
        """How many events went because newer ones came."""
        return self.result.dropped

    def trace_result(self) -> MemoryTrace:
        """The trace, for every view, export and analysis of tb_memplugin."""
        return self.result.trace

    def get_layer_stats(self) -> dict[str, LayerMemoryStats]:
        """Figures of every layer that ran, by FQN, parents before children."""
        return dict(self.result.layers)

    def get_peak_memory_per_layer(self) -> dict[str, int]:
        """The highest live bytes while each layer ran."""
        return {name: one.peak_allocated for name, one in self.result.layers.items()}

    def get_fragmentation_stats(self) -> dict[str, float]:
        """The mean fragmentation of each layer, 0 to 1; 0 on the CPU, whose allocator keeps no reserve."""
        return {name: one.avg_fragmentation for name, one in self.result.layers.items()}

    def get_phase_stats(self) -> list[PhaseMemoryStats]:
        """The phases that `track_phase` named, in the order in which they ended."""
        return list(self.result.phases)

    def print_summary(self, console: Console | None = None) -> None:
        """Print the totals and the layers with the highest peaks, through rich."""
        out, result = console or Console(), self.result
        out.print(
            f"Peak allocated {size_told(result.peak_allocated)}, "
            f"peak reserved {size_told(result.peak_reserved)}, {result.total:,} events "
            f"({result.dropped:,} dropped)",
            markup=False,
        )
        table = Table("layer", "peak allocated", "peak reserved", "allocs", "frees", "frag.", "ms")
        order = sorted(result.layers.values(), key=lambda one: (-one.peak_allocated, one.layer_name))
        for one in order[:_SUMMARY_ROWS]:
            table.add_row(
                Text(printable(one.layer_name)),
                size_told(one.peak_allocated),
                size_told(one.peak_reserved),
                f"{one.total_allocations:,}",
                f"{one.total_deallocations:,}",
                f"{one.avg_fragmentation:.1%}",
                f"{one.duration_ms:,.2f}",
            )
        out.print(table)
        if len(order) > _SUMMARY_ROWS:
            out.print(f"... and {len(order) - _SUMMARY_ROWS:,} more layers", markup=False)
        for phase in result.phases[-_SUMMARY_ROWS:]:
            out.print(
                f"phase {printable(phase.name)}: {size_told(phase.before_bytes)} -> "
                f"{size_told(phase.after_bytes)}, peak {size_told(phase.peak_bytes)}",
                markup=False,
            )
        for note in result.trace.notes:
            out.print(f"note: {printable(note)}", markup=False)

    def export_flame_graph(self, path: str | os.PathLike[str]) -> None:
        """Write what was alive at the peak as a flame graph for www.speedscope.app.

        Where events were dropped, it is the peak within those that are kept.

        Raises:
            MemPluginError: nothing was traced, or the file cannot be written.
        """
        speedscope.write(self.trace_result(), path, "MemoryTracer")

    def export_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write {events, layer_stats, summary} as JSON; bytes, seconds since the start, milliseconds.

        Raises:
            MemPluginError: nothing was traced, or the file cannot be written.
        """
        text = json.dumps(self._timeline())
        with replacing(path) as stream:
            stream.write(text.encode("ascii"))

    def save(self, logdir: str | os.PathLike[str], worker_name: str | None = None) -> None:
        """Write the trace for the Memory tab of `tensorboard --logdir <logdir>`.

        A tracer's blocks are numbered from 0: saved to the same place, each is a step there.

        Raises:
            MemPluginError: nothing was traced, or the folder cannot be written.
        """
        worker = worker_name or default_worker_name()
        self._saved.write(self.trace_result(), self._block, logdir, worker)

    def _timeline(self) -> dict[str, Any]:
        result = self.result
        return {
            "events": [asdict(event) for event in result.events()],
            "layer_stats": {name: asdict(one) for name, one in result.layers.items()},
            "summary": {
                "device": [device.name for device in result.trace.devices],
                "duration_s": (result.stop_ns - result.start_ns) / 1e9,
                "peak_allocated": result.peak_allocated,
                "peak_reserved": result.peak_reserved,
                "total_events": result.total,
                "dropped_events": result.dropped,
                "layers": len(result.layers),
                "phases": [{**asdict(one), "delta_bytes": one.delta_bytes} for one in result.phases],
                "notes": list(result.trace.notes),
            },
        }

    def _begin(self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        with self._lock:
            if self._running is not None:
                raise MemPluginError(
                    "This tracer traces already.",
                    where="MemoryTracer.trace",
                    fix="Make another MemoryTracer for a block inside, or on another thread.",
                )
            recording = self._recording(models)
            recording.start(models, optimizers)
            self._running = recording

    def _recording(self, models: Mapping[str, nn.Module]) -> StorageRecording | HistoryRecording:
        device = self._device or next((p.device for m in models.values() for p in m.parameters()), None)
        device = device or torch.device("cpu")
        if has_history(device.type):
            return HistoryRecording(device, self.max_events, with_fragmentation=self._with_fragmentation)
        fix = (
            "Leave `device` out: then the tracer follows the model."
            if self._device is not None
            else "Put the model on a device that is here, or say which one to trace with device=."
        )
        refuse_absent(device, "MemoryTracer", fix)
        return StorageRecording(device.type, self.max_events)

    def _end(self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        with self._lock:
            recording, self._running = self._running, None
            self._result = None
            self._block += 1
        if recording is None:
            return
        try:
            self._result = recording.stop(models, optimizers)
        except Exception as error:  # noqa: BLE001  # the training goes on, whatever happens to us
            tell_trace_is_lost(self._logger, error)


class Tracing:
    """The block that `MemoryTracer.trace` opens. It holds model and optimizers weakly while it is open."""

    def __init__(
        self,
        begin: _Switch,
        end: _Switch,
        tracer: MemoryTracer,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        self._begin, self._end, self._tracer = begin, end, tracer
        self._given: tuple[nn.Module, list[torch.optim.Optimizer]] | None = (model, optimizers)
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    @hidden_from_dynamo
    def __enter__(self) -> MemoryTracer:
        if self._given is None:
            raise MemPluginError(
                "This block was opened before.",
                where="MemoryTracer.trace",
                fix="Call trace() for each block.",
            )
        (model, optimizers), self._given = self._given, None
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._begin({"": model}, optimizers)
        return self._tracer

    @hidden_from_dynamo
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        model = self._model() if self._model is not None else None
        alive = [one for one in (reference() for reference in self._optimizers) if one is not None]
        self._end({"": model} if model is not None else {}, alive)
