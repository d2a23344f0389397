"""One recording of a tracer on devices whose allocator keeps a history: CUDA (ROCm too) and XPU.

Memory comes from the history: the allocator's own record, requested bytes, exact times. Hooks only note
when layers are entered and left; which of them a backward runs for, hooks on the autograd nodes of the
layers' results tell. Nothing is asked of the device while the model runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.sources.history.recording import (
    SWITCH,
    Allocator,
    HistorySwitch,
    allocators,
    reaches,
    since,
)
from tb_memplugin.sources.history.window import ModuleMarks
from tb_memplugin.sources.modules import ModuleNames, ModuleRecorder
from tb_memplugin.sources.passing_hooks import PassingHook
from tb_memplugin.sources.profiler.dtypes import dtypes_of
from tb_memplugin.sources.snapshot.trace import trace_from_snapshot
from tb_memplugin.sources.tracer.calls import Crossing, HistoryCalls, result_of
from tb_memplugin.sources.tracer.results import NamedPhase, TracerResult
from tb_memplugin.trace import Phase

Levels = Callable[[], tuple[int, int]]
"""Requested bytes live now, and their highest since the process began; -1 where they are not counted."""


def has_history(device_type: str) -> bool:
    """Whether a device's allocator keeps a history here."""
    return any(one.device_type == device_type for one in allocators())


class HistoryRecording:
    """Watches one device until `stop`. Hooks are gone then, and the history is as it was found.

    Args:
        device: "cuda:0", say; without a number: the current one.
        max_events: entries that the history keeps; older ones are overwritten.
        with_fragmentation: False leaves it at 0.
        allocator, levels, switch: where they come from if not from torch.
    """

    def __init__(
        self,
        device: torch.device,
        max_events: int,
        *,
        with_fragmentation: bool = True,
        allocator: Allocator | None = None,
        levels: Levels | None = None,
        switch: HistorySwitch = SWITCH,
    ) -> None:
        self._allocator = allocator or next(one for one in allocators() if one.device_type == device.type)
        self._device, self._max_events = device, max_events
        self._with_fragmentation, self._switch = with_fragmentation, switch
        self._levels = levels or self._counters
        self._marks = ModuleMarks()
        self._phases: deque[tuple[int, str, bool]] = deque(maxlen=max_events)

    def start(self, models: Mapping[str, nn.Module], _: Sequence[torch.optim.Optimizer]) -> None:
        """Switch the history on, put hooks on. Optimizers are told by the stacks in the history.

        Raises:
            MemPluginError: the process does not use the device yet.
        """
        if not self._allocator.is_in_use():
            raise MemPluginError(
                f"No {self._device.type} device is in use yet.",
                where="MemoryTracer.trace",
                fix="Put the model on the device before the traced block.",
            )
        self._number = self._device.index if ":" in str(self._device) else self._allocator.current_device()
        self._names = ModuleNames.of(models)
        self._is_fresh = self._switch.on(self._allocator, max_entries=self._max_events)
        self._start_ns = time_ns()
        self._peak_before = self._levels()[1]
        self._hooks = LayerClock(self._max_events)
        try:
            self._marks.start(self._allocator, models)
            self._hooks.start(models, self._names)
        except BaseException:
            self._unhook()
            self._switch.off(self._allocator)
            raise

    def stop(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> TracerResult:
        """End it, and read what the allocator wrote down."""
        stop_ns = time_ns()
        self._unhook()
        try:
            peak = self._levels()[1]
            taken = self._allocator.snapshot()
        finally:
            self._switch.off(self._allocator)
        trace = trace_from_snapshot(
            taken if self._is_fresh else since(taken, self._start_ns), "MemoryTracer", self._device.type
        )
        dtypes = dtypes_of(models, optimizers, self._names)
        trace = replace(trace, properties={**trace.properties, **dtypes})
        entries = max((len(one) for one in taken.get("device_traces", ())), default=0)
        is_full = entries >= self._max_events or not (
            self._is_fresh or reaches(taken, self._start_ns, self._number)
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
            ),
        )

    def begin_phase(self, name: str) -> NamedPhase:
        """A phase with the user's name begins."""
        self._phases.append((time_ns(), name, False))
        return NamedPhase(name)

    def end_phase(self, phase: NamedPhase) -> None:
        """It ends."""
        self._phases.append((time_ns(), phase.name, True))

    def _unhook(self) -> None:
        self._hooks.stop()
        self._marks.stop()

    def _counters(self) -> tuple[int, int]:
        stats = getattr(torch, self._device.type).memory_stats(self._number)
        return stats.get("requested_bytes.all.current", -1), stats.get("requested_bytes.all.peak", -1)


class LayerClock(ModuleRecorder):
    """Notes when layers begin and end, forward and backward, on every thread.

    In backward a layer begins when autograd reaches the node behind its result, and ends when it reaches
    the node of another layer's result, or the one behind its own input.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.crossings: deque[Crossing] = deque(maxlen=most)
        self._here = threading.local()
        self._nodes: deque[Any] = deque(maxlen=most)
        self._on = True

    def stop(self) -> None:
        """Take all hooks off, those on autograd nodes that still exist too."""
        self._on = False
        super().stop()
        for handle in self._nodes:
            handle.remove()
        self._nodes.clear()

    def _stack(self) -> list[int]:
        stack: list[int] | None = getattr(self._here, "stack", None)
        if stack is None:
            stack = self._here.stack = []
        return stack

    def _hook(self, module: nn.Module, row: int) -> None:
        compiling = torch.compiler.is_compiling

        def enter(_: nn.Module, given: Any) -> None:
            if self._on and not compiling():
                stack = self._stack()
                self._at_node(given, stack[-1] if stack else -1)
                stack.append(row)
                self._note(row, ends=False)

        def leave(_: nn.Module, __: Any, out: Any) -> None:
            if self._on and not compiling():
                stack = self._stack()
                while stack and stack.pop() != row:
                    pass
                self._note(row, ends=True)
                self._at_node(out, row)

        self._handles.append(module.register_forward_pre_hook(PassingHook(enter)))
        self._handles.append(module.register_forward_hook(PassingHook(leave), always_call=True))

    def _note(self, row: int, *, ends: bool) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        phase = Phase.BACKWARD if in_backward else Phase.FORWARD
        self.crossings.append((time_ns(), row, ends, phase, threading.get_ident(), False))

    def _at_node(self, tensors: Any, row: int) -> None:
        """When autograd reaches the nodes behind tensors, the backward of a layer (-1: of none) begins."""
        for tensor in _tensors(tensors):
            node = tensor.grad_fn
            if node is not None:
                self._nodes.append(node.register_prehook(self._reached(row, node._sequence_nr())))

    def _reached(self, row: int, sequence: int) -> Callable[[Any], None]:
        def reached(_: Any) -> None:
            # The first to ask for a node is the innermost layer that made it; it is called first.
            task = torch._C._current_graph_task_id()
            if not self._on or getattr(self._here, "node", None) == (task, sequence):
                return
            if getattr(self._here, "task", None) != task:
                self._here.task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._done)
            self._here.node = task, sequence
            self.crossings.append((time_ns(), row, False, Phase.BACKWARD, threading.get_ident(), True))

        return reached

    def _done(self) -> None:
        """A backward is over."""
        if self._on:
            self.crossings.append((time_ns(), -1, False, Phase.BACKWARD, 0, True))


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for one in given:
            yield from _tensors(one)
    elif isinstance(given, Mapping):
        for one in given.values():
            yield from _tensors(one)
