"""Observation of one iteration: storages through the tracer, cached memory through allocator counters."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.guard import UNOWNED, Guard, call_all
from tb_memplugin.record.iterations.weights import IterationRecording, NewGradients
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.modules import is_compiled
from tb_memplugin.record.steps.counters import Counters, Reading
from tb_memplugin.record.steps.devices import counters_of
from tb_memplugin.record.torch_private.dispatch import current_mode, without_torch_functions
from tb_memplugin.record.torch_private.modules import buffers_in, modules_in, parameters_in
from tb_memplugin.record.torch_private.tensors import device_of
from tb_memplugin.record.tracer.mode import StorageMode
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import ROOT

_MOST_NAMES = 3
_MOST_EVENTS = 1_000_000

Optimizers = Sequence[torch.optim.Optimizer]
CountersOf = Callable[[Sequence[str]], Sequence[Counters]]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a watch saw.

    Attributes:
        devices: the watched devices, as torch spells them.
        readings: the allocator's counters of each device, empty if there are none (the CPU).
        trace: the lifetimes of the storages, None if they were not tracked.
        gradients: bytes of the last gradient of each weight that backward created.
        notes: sentences about what is not exact.
    """

    devices: tuple[str, ...]
    readings: tuple[Reading, ...]
    trace: MemoryTrace | None
    gradients: dict[str, int]
    notes: tuple[str, ...]


class IterationWatch:
    """Watches an iteration from `begin` to `end` or `cancel`, which remove all its hooks.

    Args:
        counters: returns the counters of devices; None means those of torch's allocators.
    """

    def __init__(self, counters: CountersOf | None = None, guard: Guard = UNOWNED) -> None:
        self._guard = guard
        self._counters_of = counters or _torch_counters
        self._counters: list[Counters] = []
        self._recording: IterationRecording | None = None
        self._calls = ModuleCalls()
        self._devices: tuple[str, ...] = ()
        self._gradients: NewGradients | None = None
        self._notes: list[str] = []

    def begin(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Begin to watch."""
        self._devices = devices_of(model)
        kind = torch.device(self._devices[0]).type
        try:
            if kind != "cpu" or self._counters_of is not _torch_counters:
                self._count()
            if compiled := compiled_modules(model):
                self._notes.append(
                    f"The model is compiled ({_some(compiled)}). Following every storage would make "
                    "compiled code run uncompiled, so feature maps and intermediate gradients are not "
                    "measured."
                )
                return
            recording = self._recording = IterationRecording(kind, _MOST_EVENTS, self._guard)
            recording.start({"": model}, optimizers)
            _WATCHING.add(self)
            self._gradients = recording.layers.results = NewGradients(model, recording, self._guard)
            if not isinstance(model, torch.jit.ScriptModule):  # which does not accept Python hooks
                self._calls.watch(model, self._noting_inputs(), lambda *_: None, self._guard.end)
        except BaseException:
            self.cancel()
            raise

    def end(self, model: nn.Module | None, optimizers: Optimizers) -> Observation:
        """End the watch and return what it saw."""
        gradients: dict[str, int] = {}
        try:
            readings = tuple(counter.read() for counter in self._counters)
            if self._gradients is not None:
                self._gradients.settle()
                gradients = self._gradients.bytes
            for step in self._undo():
                step()
            recording, models = self._recording, {} if model is None else {"": model}
            trace = recording.stop(models, optimizers).trace if recording is not None else None
            self._recording = None
        except BaseException:
            self.cancel()
            raise
        notes = (*self._notes, *(trace.notes if trace is not None else ()))
        return Observation(self._devices, readings, trace, gradients, notes)

    def cancel(self) -> None:
        """End the watch and discard what it saw."""
        recording, self._recording = self._recording, None
        call_all(*self._undo(), *([] if recording is None else [recording.abandon]))

    def leave_fork(self) -> None:
        """Stop watching in a forked process (a data loader's worker), where nobody reads the result."""
        if self._recording is not None:
            self._recording.layers.on = False
        while isinstance(top := current_mode(), StorageMode):
            top.leave()

    def _undo(self) -> list[Callable[[], object]]:
        """Return functions that remove all but the recording. Each may be called twice."""
        counters = [counter.close for counter in self._counters]
        discard = partial(_WATCHING.discard, self)
        return [discard, self._calls.stop, self._forget_gradients, *counters, self._counters.clear]

    def _forget_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.forget()
            self._gradients = None

    def _count(self) -> None:
        """Open the counters of the devices and reset their peaks."""
        try:
            self._counters = list(self._counters_of(self._devices))
            for counter in self._counters:
                counter.read()
        except MemPluginError as error:
            self._counters.clear()
            self._notes.append(f"The cached memory is not known. {error.what}")

    def _noting_inputs(self) -> Callable[..., None]:
        recording = self._recording

        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            if recording is not None:
                with without_torch_functions():
                    recording.record_inputs((args, kwargs))

        return note


def devices_of(model: nn.Module) -> tuple[str, ...]:
    """Return a model's devices of the same type as its first parameter or buffer; ("cpu",) if it has none."""
    tensors = parameters_in(model) + buffers_in(model)
    devices = dict.fromkeys(device for device in map(device_of, tensors) if device.type != "meta")
    kind = next(iter(devices)).type if devices else "cpu"
    return ("cpu",) if kind == "cpu" else tuple(str(device) for device in devices if device.type == kind)


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of compiled modules."""
    return [name or ROOT for name, module in modules_in(model) if is_compiled(module)]


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def _torch_counters(devices: Sequence[str]) -> Sequence[Counters]:
    return counters_of(devices, reset_peaks=True)


_WATCHING: weakref.WeakSet[IterationWatch] = weakref.WeakSet()


def _forked() -> None:
    for watch in list(_WATCHING):
        watch.leave_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
