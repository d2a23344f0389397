"""Watch one iteration, through the tracer and the allocators' counters, and compute its memory figures."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.guard import UNOWNED, Guard, call_all
from tb_memplugin.record.iterations.weights import IterationRecording, NewGradients, WeightMemory, weights_of
from tb_memplugin.record.modules import is_compiled
from tb_memplugin.record.steps.counters import Counters, Reading, counters_of
from tb_memplugin.record.torch_private.dispatch import current_mode
from tb_memplugin.record.torch_private.modules import buffers_in, modules_in, parameters_in
from tb_memplugin.record.torch_private.tensors import device_of
from tb_memplugin.record.tracer.mode import StorageMode
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import ROOT, Bool, Int64

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
        return [discard, self._forget_gradients, *counters, self._counters.clear]

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


WEIGHTS, WEIGHT_GRADIENTS = "weights", "weight gradients"
FEATURE_MAPS, INTERMEDIATE_GRADIENTS = "feature maps", "intermediate gradients"

PARTS = (
    WEIGHTS,
    "buffers",
    "optimizer state",
    WEIGHT_GRADIENTS,
    FEATURE_MAPS,
    INTERMEDIATE_GRADIENTS,
    "inputs",
    "temporaries",
    "other",
)
"""The parts into which live memory at the peak is divided."""

_PART_OF = {
    Category.PARAMETER: WEIGHTS,
    Category.BUFFER: "buffers",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.GRADIENT: WEIGHT_GRADIENTS,
    Category.ACTIVATION: FEATURE_MAPS,
    Category.RECOMPUTED: FEATURE_MAPS,
    Category.AUTOGRAD_DETAIL: INTERMEDIATE_GRADIENTS,
    Category.INPUT: "inputs",
    Category.TEMPORARY: "temporaries",
}


@dataclass(frozen=True, slots=True)
class TracedMemory:
    """The figures of tracking every storage through an iteration, in bytes.

    Attributes:
        peak_bytes: highest live bytes of distinct storages on devices of the model's type.
        end_bytes: live bytes at the end.
        feature_map_bytes: highest live bytes of activations, also those recomputed in backward; without
            parameters, buffers and inputs.
        intermediate_gradient_bytes: highest live bytes of what backward allocated, without the gradients of
            weights.
        at_peak: the peak by `PARTS`; they sum to `peak_bytes`.
    """

    peak_bytes: int
    end_bytes: int
    feature_map_bytes: int
    intermediate_gradient_bytes: int
    at_peak: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class IterationMemory:
    """The memory of one iteration. None means not known; `notes` say why.

    Attributes:
        step: number of the iteration since the report was created, from 1.
        epoch, iteration: from 1; the iteration number restarts with each epoch.
        devices: the devices whose memory is reported.
        has_cache: whether their allocator keeps a cache. If not (on the CPU), cached equals allocated.
        peak_cached_bytes, cached_bytes: what the allocator held, at most and at the end.
        peak_allocated_bytes, allocated_bytes: what was in use, at most and at the end, by the allocator's
            counters; on the CPU the live bytes of storages.
        weights: the weights, in the model's order.
        traced: the figures of tracking the storages.
        seconds: duration of the iteration, from the moment at which watching began.
        notes: sentences about what is not exact.
        cached_is_exact, allocated_is_exact: whether these peaks are exact. If torch cannot reset the
            allocator's peaks, they are lower bounds.
    """

    step: int
    epoch: int
    iteration: int
    devices: tuple[str, ...]
    has_cache: bool
    peak_cached_bytes: int | None
    cached_bytes: int | None
    peak_allocated_bytes: int | None
    allocated_bytes: int | None
    weights: tuple[WeightMemory, ...]
    traced: TracedMemory | None
    seconds: float
    notes: tuple[str, ...] = field(default=())
    cached_is_exact: bool = True
    allocated_is_exact: bool = True

    @property
    def weight_bytes(self) -> int:
        """The bytes of the distinct storages of all weights."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients of all weights."""
        return sum(weight.gradient_bytes for weight in self.weights)

    @property
    def feature_map_bytes(self) -> int | None:
        """The highest live bytes of feature maps; see `TracedMemory`."""
        return self.traced.feature_map_bytes if self.traced is not None else None

    @property
    def intermediate_gradient_bytes(self) -> int | None:
        """The highest live bytes of gradients of activations; see `TracedMemory`."""
        return self.traced.intermediate_gradient_bytes if self.traced is not None else None

    @property
    def untraced_peak_bytes(self) -> int | None:
        """The allocator's peak minus the peak of storages: rounding, workspaces, buffers.

        The two peaks need not be at the same moment.
        """
        if self.traced is None or self.peak_allocated_bytes is None:
            return None
        return self.peak_allocated_bytes - self.traced.peak_bytes


def iteration_memory(
    model: nn.Module | None,
    observation: Observation,
    *,
    step: int,
    epoch: int,
    iteration: int,
    seconds: float,
) -> IterationMemory:
    """Return the figures of an iteration from what its watch saw. `model` is None if it no longer exists."""
    traced = traced_memory(observation.trace) if observation.trace is not None else None
    notes = list(observation.notes)
    if model is None:
        notes.append("The model no longer exists, so its weights are not reported.")
    peak_cached = cached = peak = now = None
    if observation.readings:
        peak_cached = sum(reading.peak_reserved for reading in observation.readings)
        cached = sum(reading.reserved for reading in observation.readings)
        peak = sum(reading.peak for reading in observation.readings)
        now = sum(reading.allocated for reading in observation.readings)
        notes += _inexact(observation)
    elif traced is not None and observation.devices == ("cpu",):
        peak_cached = peak = traced.peak_bytes
        cached = now = traced.end_bytes
    return IterationMemory(
        step=step,
        epoch=epoch,
        iteration=iteration,
        devices=observation.devices,
        has_cache=bool(observation.readings),
        peak_cached_bytes=peak_cached,
        cached_bytes=cached,
        peak_allocated_bytes=peak,
        allocated_bytes=now,
        weights=weights_of(model, observation.gradients) if model is not None else (),
        traced=traced,
        seconds=seconds,
        notes=tuple(notes),
        cached_is_exact=all(reading.reserved_exact for reading in observation.readings),
        allocated_is_exact=all(reading.exact for reading in observation.readings),
    )


def _inexact(observation: Observation) -> list[str]:
    if all(reading.exact and reading.reserved_exact for reading in observation.readings):
        return []
    return [
        "This version of torch cannot reset the allocator's peak counters of "
        f"{', '.join(observation.devices)}. Values marked ≥ are lower bounds: the iteration may have cached "
        "or allocated more."
    ]


def traced_memory(trace: MemoryTrace) -> TracedMemory:
    """Return the figures of an iteration from its trace, without a Python loop over events."""
    parts = _parts(trace)
    everything = np.ones(len(parts), bool)
    live = _live(trace, everything)
    peak = int(np.argmax(live)) - 1
    blocks = trace.allocations
    alive = (blocks.born <= peak) & (blocks.freed > peak)
    sizes = np.zeros(len(PARTS), np.int64)
    np.add.at(sizes, parts[alive], blocks.bytes[alive])
    return TracedMemory(
        peak_bytes=int(live[peak + 1]),
        end_bytes=int(live[-1]),
        feature_map_bytes=_highest(trace, parts == PARTS.index(FEATURE_MAPS)),
        intermediate_gradient_bytes=_highest(trace, parts == PARTS.index(INTERMEDIATE_GRADIENTS)),
        at_peak=dict(zip(PARTS, sizes.tolist(), strict=True)),
    )


def _parts(trace: MemoryTrace) -> npt.NDArray[np.intp]:
    """Return the index in `PARTS` of every block. Gradients of no weight count as intermediate gradients."""
    of = [PARTS.index(_PART_OF.get(category, "other")) for category in Category]
    blocks = trace.allocations
    parts = np.array(of, np.intp)[blocks.category]
    unnamed = (blocks.category == Category.GRADIENT) & (blocks.label < 0)
    parts[unnamed | _losses_own(trace)] = PARTS.index(INTERMEDIATE_GRADIENTS)
    return parts


def _losses_own(trace: MemoryTrace) -> Bool:
    """Return the mask of tensors of ones that `loss.backward()` creates as the gradient of the loss.

    `torch.autograd._make_grads` creates them with `ones_like`, right before the first block of backward.
    """
    blocks = trace.allocations
    makes_ones = np.array([name == "aten::ones_like" for name in trace.operators] + [False], bool)
    candidates = makes_ones[blocks.operator] & (blocks.born >= 0) & (blocks.phase != Phase.BACKWARD)
    rest = np.flatnonzero((blocks.born >= 0) & ~candidates)
    following = np.searchsorted(blocks.born[rest], blocks.born[candidates], side="right")
    phase = np.append(blocks.phase[rest], Phase.OTHER)[following]
    mine: Bool = candidates.copy()
    mine[candidates] = phase == Phase.BACKWARD
    return mine


def _live(trace: MemoryTrace, chosen: Bool) -> Int64:
    """Return the live bytes of some blocks: int64, shape (events + 1,); entry e + 1 is after event e."""
    blocks = trace.allocations
    change = np.zeros(len(trace.events) + 2, np.int64)
    np.add.at(change, blocks.born[chosen] + 1, blocks.bytes[chosen])
    np.add.at(change, blocks.freed[chosen] + 1, -blocks.bytes[chosen])
    return np.cumsum(change)[:-1]


def _highest(trace: MemoryTrace, chosen: Bool) -> int:
    return int(_live(trace, chosen).max())
