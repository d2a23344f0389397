"""A tracer's recording on devices whose allocator keeps a history: CUDA, ROCm and XPU.

Memory comes from the allocator's own history, with requested bytes and exact times. Module hooks only record
when layers are entered and left, and hooks on the autograd nodes of the layers' results record for which
layer backward runs. Nothing is read from the device while the model runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from threading import get_ident
from time import time_ns

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tb_memplugin.errors import MemPluginError
from tb_memplugin.read.categories import WORKSPACE_BYTES
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.record.guard import UNOWNED, Guard, call_all
from tb_memplugin.record.history.allocators import (
    SWITCH,
    Allocator,
    HistorySwitch,
    allocators,
    reaches,
    since,
)
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.optimizer_hooks import StepHooks, StepStarts
from tb_memplugin.record.storages import dtypes_of
from tb_memplugin.record.torch_private.modules import parameters_in
from tb_memplugin.record.tracer.history_calls import HistoryCalls, result_of
from tb_memplugin.record.tracer.layer_clock import LayerClock
from tb_memplugin.record.tracer.results import PhaseMemoryStats, TracerResult
from tb_memplugin.trace import Category, MemoryTrace, Reason

Levels = Callable[[], tuple[int, int]]
"""A function that returns the live requested bytes and their peak in this process, -1 if not counted."""


_OPEN: dict[HistoryRecording, int] = {}
"""The recordings that have started and not stopped, and the threads that started them."""


def has_history(device_type: str) -> bool:
    """Whether the allocator of a device type keeps a history on this machine."""
    return any(allocator.device_type == device_type for allocator in allocators())


class HistoryRecording:
    """Records one device until `stop`, which removes the hooks and turns the history off if it was off.

    Args:
        device: a device such as "cuda:0"; without an index, the current one.
        max_events: how many entries the history keeps; older ones are overwritten.
        with_fragmentation: if False, fragmentation is reported as 0.
        allocator, levels, switch: used instead of those of torch.
    """

    STARTS_BY = "MemoryTracer.trace"
    NOT_IN_USE_FIX = "Put the model on the device before the traced block."
    """What a user calls to start, and what to do before: the error of a device that is not in use says it."""

    def __init__(
        self,
        device: torch.device,
        max_events: int,
        *,
        with_fragmentation: bool = True,
        allocator: Allocator | None = None,
        levels: Levels | None = None,
        switch: HistorySwitch = SWITCH,
        guard: Guard = UNOWNED,
    ) -> None:
        self._guard = guard
        self._allocator = allocator or next(
            candidate for candidate in allocators() if candidate.device_type == device.type
        )
        self._device, self._max_events = device, max_events
        self._with_fragmentation, self._switch = with_fragmentation, switch
        self._levels = levels or self._counters
        self._phases: deque[tuple[int, str, bool]] = deque(maxlen=max_events)
        self._steps: deque[tuple[int, int]] = deque(maxlen=max_events)
        self._step_starts = StepStarts()
        self._crowded = self._is_on = False
        self._hooks = LayerClock(max_events, self._allocator)
        self._step_hooks: StepHooks | None = None

    def start(self, models: Mapping[str, nn.Module], _: Sequence[torch.optim.Optimizer]) -> None:
        """Turn on the history and add hooks. Optimizers are not needed: stacks in the history show them.

        Raises:
            MemPluginError: the process does not use the device yet.
        """
        if not self._allocator.is_in_use():
            raise MemPluginError(
                f"No {self._device.type} device is in use yet.",
                where=self.STARTS_BY,
                fix=self.NOT_IN_USE_FIX,
            )
        self._number = self._device.index if ":" in str(self._device) else self._allocator.current_device()
        self._names = ModuleNames.of(models)
        self._is_fresh = self._switch.on(self._allocator, max_entries=self._max_events)
        self._is_on = True
        self._start_ns = time_ns()
        self._peak_before, self._requests_before = self._levels()[1], self._requests()
        try:
            self._step_hooks = StepHooks(self._before_step, self._after_step, self._guard.end)
            self._hooks.start(models, self._names, failed=self._guard.end)
        except BaseException:
            self.abandon()
            raise
        self._join()

    def stop(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> TracerResult:
        """End the recording and return its result from the allocator's history."""
        stop_ns = time_ns()
        _OPEN.pop(self, None)
        try:
            self._hooks.stop()
            if self._step_hooks is not None:
                self._step_hooks.remove()
            peak, requests = self._levels()[1], self._requests() - self._requests_before
            snapshot = self._allocator.snapshot()
        finally:
            self.abandon()
        trace = trace_from_snapshot(
            snapshot if self._is_fresh else since(snapshot, self._start_ns), "MemoryTracer", self._device.type
        )
        trace = _with_workspaces(trace, models.values())
        dtypes = dtypes_of(models, optimizers, self._names)
        trace = replace(trace, properties={**trace.properties, **dtypes})
        entries = max((len(device_trace) for device_trace in snapshot.get("device_traces", ())), default=0)
        is_full = entries >= self._max_events or not (
            self._is_fresh or reaches(snapshot, self._start_ns, self._number)
        )
        return result_of(
            trace,
            HistoryCalls(
                names=self._names,
                device=f"{self._device.type}:{self._number}",
                crossings=list(self._hooks.crossings),
                phases=list(self._phases),
                start_ns=self._start_ns,
                stop_ns=stop_ns,
                counted_peak=peak if peak > self._peak_before else -1,
                is_full=is_full,
                entries=entries,
                max_events=self._max_events,
                with_fragmentation=self._with_fragmentation,
                unseen=self._hooks.unseen,
                crowded=self._crowded,
                optimizer=list(self._steps),
                requests=requests,
                has_marks=self._hooks.has_marks,
                shared=self._hooks.shared,
            ),
        )

    def abandon(self) -> None:
        """Remove all that is ours, without a result. Does nothing if nothing is left."""
        _OPEN.pop(self, None)
        hooks = [] if self._step_hooks is None else [self._step_hooks.remove]
        call_all(self._hooks.stop, *hooks, self._turn_off)

    def _turn_off(self) -> None:
        if self._is_on:
            self._is_on = False
            self._switch.off(self._allocator)

    def begin_phase(self, name: str) -> PhaseMemoryStats:
        """Begin a phase that the user named."""
        self._phases.append((time_ns(), name, False))
        return PhaseMemoryStats(name)

    def end_phase(self, phase: PhaseMemoryStats) -> None:
        """End a phase."""
        self._phases.append((time_ns(), phase.name, True))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._step_starts.begin(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_on:
            self._steps.append((self._step_starts.end(optimizer) or self._start_ns, time_ns()))

    def _join(self) -> None:
        """Remember that this recording is open, and mark it and those that are open on other threads."""
        here = get_ident()
        for other, thread in list(_OPEN.items()):
            if thread != here:
                self._crowded = other._crowded = True
        _OPEN[self] = here

    def _requests(self) -> int:
        """Return how many allocations and frees the process's allocator has counted, 0 if it does not."""
        if self._levels != self._counters:
            return 0
        stats = getattr(torch, self._device.type).memory_stats(self._number)
        return int(stats.get("allocation.all.allocated", 0) + stats.get("allocation.all.freed", 0))

    def _counters(self) -> tuple[int, int]:
        stats = getattr(torch, self._device.type).memory_stats(self._number)
        return stats.get("requested_bytes.all.current", -1), stats.get("requested_bytes.all.peak", -1)


def _with_workspaces(trace: MemoryTrace, models: Iterable[nn.Module]) -> MemoryTrace:
    """Return the trace with cuBLAS's workspaces apart from the gradients, which backward also leaves behind.

    A block of their size is a gradient only if a parameter has that size.
    """
    parameters = (parameter for model in models for parameter in filterfalse(is_lazy, parameters_in(model)))
    sizes = WORKSPACE_BYTES - {parameter.nbytes for parameter in parameters}
    category, reason = trace.events.category.copy(), trace.events.reason.copy()
    workspace = (category == Category.GRADIENT) & np.isin(trace.events.bytes, list(sizes))
    category[workspace], reason[workspace] = Category.WORKSPACE, Reason.SIZE
    return replace(trace, events=replace(trace.events, category=category, reason=reason))
