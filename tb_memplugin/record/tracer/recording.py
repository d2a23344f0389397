"""A tracer's recording on devices whose allocator keeps no history, such as the CPU.

Some memory comes and goes without an operator that a dispatch mode sees: copies of the random generator's
state (checkpointing keeps one per layer), storages that Python resizes (as FSDP2 does to free gathered
parameters), what `torch.load` reads, and what printing a tensor allocates, for which torch disables modes.
While there is a listener, `torch.get_rng_state`, `UntypedStorage.resize_`,
`PyTorchFileReader.get_storage_from_record` and `torch._tensor_str._str` are patched to report; their results
do not change.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.analysis.units import counted
from tb_memplugin.errors import MemPluginError
from tb_memplugin.record import profiler_windows
from tb_memplugin.record.alive_before import alive_now, buckets_alive
from tb_memplugin.record.beside_compiler import UncompiledHere
from tb_memplugin.record.exact_cpu.counting import CountedWindow, begin_window, is_counting
from tb_memplugin.record.guard import UNOWNED, Guard, call_all, guarded
from tb_memplugin.record.modules import ModuleNames, is_compiled
from tb_memplugin.record.optimizer_hooks import OptimizerStep, StepHooks, StepStarts
from tb_memplugin.record.profiler.held_storages import HeldByOptimizer
from tb_memplugin.record.storage_lifetimes import EntryKind, Ledger
from tb_memplugin.record.storages import (
    OuterCalls,
    Sighting,
    allocated_by_torch,
    dtypes_of,
    foreign_note,
    gradients,
    held_parameters,
    model_storages,
    optimizer_storages,
    storages,
    storages_and_tensors,
)
from tb_memplugin.record.storages_alive import other_threads_may_run, storages_alive
from tb_memplugin.record.tensor_metadata import dense
from tb_memplugin.record.torch_private.modules import modules_in
from tb_memplugin.record.torch_private.tensors import PRINT, SHARE, FileReader, printing, storage_key
from tb_memplugin.record.tracer.kernels import StepsAside
from tb_memplugin.record.tracer.layers import LayerCalls, Layers
from tb_memplugin.record.tracer.mode import FLAGS, StorageMode, modes_here, storage_mode
from tb_memplugin.record.tracer.results import (
    PhaseMemoryStats,
    TracerResult,
    layer_names,
    layer_stats,
)
from tb_memplugin.record.tracer.trace import Recorded, sighting_of, trace_from_ledger
from tb_memplugin.record.weight_copies import fqns, held_copies
from tb_memplugin.trace import Category, MemoryTrace, Note, Phase
from tb_memplugin.trace.labels import ALIVE_BEFORE, BUCKET

_lock = threading.Lock()
_listeners: list[StorageRecording] = []


@dataclass(slots=True)
class _Patch:
    """A function of torch, and what takes its place while there are listeners."""

    owner: Any
    name: str
    ours: Callable[..., Any]
    original: Any = None
    is_on: bool = False
    """Whether ours is in its place, perhaps beneath the function of another program, which calls it."""
    is_inherited: bool = False

    def put_on(self) -> None:
        if not self.is_on and hasattr(self.owner, self.name):
            self.original = getattr(self.owner, self.name)
            self.is_inherited = self.name not in vars(self.owner)
            setattr(self.owner, self.name, update_wrapper(self.ours, self.original))
            self.is_on = True

    def take_off(self) -> None:
        if self.is_on and getattr(self.owner, self.name, None) is self.ours:
            if self.is_inherited:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
            self.is_on = False


def _report(memory: torch.Tensor | torch.UntypedStorage) -> None:
    for listener in tuple(_listeners):
        listener.see_memory(memory)


def _get_rng_state() -> torch.Tensor:
    state: torch.Tensor = _RANDOM.original()
    _report(state)
    return state


def _on_storage(name: str) -> _Patch:
    """Return a patch of a method that gives a storage other memory."""

    def method(storage: torch.UntypedStorage, *args: Any, **named: Any) -> Any:
        result = patch.original(storage, *args, **named)
        _report(storage)
        return result

    patch = _Patch(torch.UntypedStorage, name, method)
    return patch


def _read(reader: Any, *which: Any) -> torch.Tensor:
    read: torch.Tensor = _READ.original(reader, *which)
    _report(read.untyped_storage())  # the tensor itself has no elements
    return read


def _print(tensor: torch.Tensor, **named: Any) -> Any:
    call = partial(_PRINT.original, tensor, **named)
    for listener in tuple(_listeners):
        call = partial(listener.around, call)
    return call()


_RANDOM = _Patch(torch.random, "get_rng_state", _get_rng_state)
_STORAGE = map(_on_storage, ("resize_", *SHARE))
_READ = _Patch(FileReader, "get_storage_from_record", _read)
_PRINT = _Patch(printing, PRINT, _print)
_PATCHES = (_RANDOM, _Patch(torch, "get_rng_state", _get_rng_state), *_STORAGE, _READ, _PRINT)


def listen(listener: StorageRecording) -> None:
    """Add a listener; the first one patches torch's functions."""
    with _lock:
        if not _listeners:
            for patch in _PATCHES:
                patch.put_on()
        _listeners.append(listener)


def stop_listening(listener: StorageRecording) -> None:
    """Remove a listener; after the last, restore torch's functions unless other code has replaced them."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            for patch in _PATCHES:
                patch.take_off()


Named = tuple[torch.Tensor, Category, int, str]


class StorageRecording:
    """Records the storages of one device type until `stop`, which removes hooks, modes and weak references.

    Args:
        max_events: how many entries to keep.
    """

    names_others = True
    """Whether parameters and results that the models do not hold have their category in the start state."""

    def __init__(self, device_type: str, max_events: int, guard: Guard = UNOWNED) -> None:
        self._guard = guard
        self._device_type, self._max_events = device_type, max_events
        self._handles: list[StepHooks] = []
        self._steps_aside = StepsAside()
        self._modes: dict[int, StorageMode] = {}
        self._foreign_calls = self._missed = 0
        self._ends_beside_threads = False
        self._counting: CountedWindow | None = None
        self._step_starts = StepStarts()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.phases: deque[PhaseMemoryStats] = deque(maxlen=max_events)

    def start(self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Record the start state, add hooks, and turn on the dispatch mode.

        Raises:
            MemPluginError: a model is compiled.
        """
        _refuse_compiled(models)
        self._uncompiled, self._uncompiled_before = UncompiledHere(), FLAGS.uncompiled_calls
        ledger = self._open_ledger()
        self.layers = Layers.of(ledger, ModuleNames.of(models), self._guard)
        most = self._max_events
        self.recorded = Recorded(
            self.layers, time_ns(), marks=deque(maxlen=most), sightings=deque(maxlen=most)
        )
        self._thread = threading.get_ident()
        names = self.layers.names
        self._name(model_storages(models, names), late=False)
        self.recorded.notes += foreign_note(
            self._mine(tensor for tensor, *_ in model_storages(models, names))
        )
        for optimizer in optimizers:
            self._name(held_parameters(optimizer, names), late=False)
            self._name(gradients(optimizer, names), late=False)
            self._name(optimizer_storages(optimizer, names), late=False)
        self._has_other_threads = other_threads_may_run()
        self._add_alive(models)
        if self._device_type == "cpu" and is_counting():
            self._counting = begin_window()
        self._layer_calls = LayerCalls(self.layers, self._watch, self._unwatch)
        with self._abandoned_on_error():
            outer_calls = OuterCalls(names, self._saw_inputs)
            self._layer_calls.start(models, names, outer_calls, failed=self.layers.failed)
            self._handles = [StepHooks(self._before_step, self._after_step, self.layers.failed)]
            listen(self)
            profiler_windows.listen(self._steps_aside)
            self._main = self._mode()
            self._main.enter()
            with ledger.lock:
                self.recorded.start_ns = ledger.begin()

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Abandon the recording if the block raises."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove all that is ours, without a result."""
        self.layers.on = False
        mode = getattr(self, "_main", None)
        call_all(
            *([] if mode is None else [mode.leave]),
            *self._undo(),
            *([] if self._counting is None else [self._counting.close]),
            self.recorded.ledger.blocks.clear,
        )

    def _add_alive(self, models: Mapping[str, nn.Module]) -> None:
        """Add to the start state what else is alive."""
        if self._device_type == "cpu":
            for row, size in buckets_alive(models, self.layers.names):
                self.recorded.ledger.expect(size, Category.COMMUNICATION, BUCKET, row)
        for alive in alive_now(self.recorded.notes):
            if self._is_mine(alive.storage):
                for block in self.recorded.ledger.blocks_of([alive.storage]):
                    if block.category is Category.UNKNOWN:
                        self.recorded.searched.append(block)
                        block.label, block.tensor = alive.label or ALIVE_BEFORE, alive.tensor
                        block.category = alive.category if self.names_others else Category.UNKNOWN
        if self.names_others:
            self._name_copies()

    def _name_copies(self) -> None:
        """Name the copies of the models' weights in the start state."""
        blocks = list(self.recorded.ledger.blocks.values())
        before = [sighting_of(block) for block in blocks]
        for block, sighting in zip(blocks, held_copies(before, fqns(self.layers.names)), strict=True):
            block.category, block.module, block.label = sighting.category, sighting.module, sighting.label

    def _open_ledger(self) -> Ledger:
        return Ledger(self._max_events, self._device_type)

    def _mode(self) -> StorageMode:
        """Return a new mode for the calling thread."""
        return storage_mode(self.layers)

    def stop(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> TracerResult:
        """End the recording and return its result. May be called on another thread than `start`."""
        with self._abandoned_on_error():
            return self._stop(models, optimizers)

    def _stop(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> TracerResult:
        self.layers.on = False
        self._main.leave()
        self._unhook()
        ledger, recorded = self.recorded.ledger, self.recorded
        with ledger.lock:
            for thread in self.layers.threads.values():
                thread.stop()
            self._name(model_storages(models, self.layers.names))
            for optimizer in optimizers:
                self._name(optimizer_storages(optimizer, self.layers.names))
            self._ends_beside_threads = other_threads_may_run()
            self._add_unseen()
            self._missed = self._missed_bytes()
            ledger.write(EntryKind.SNAPSHOT, None, -1, Phase.OTHER)
            recorded.stop_ns = time_ns()
            counted = None if self._counting is None else self._counting.stop()
            recorded.notes += self._notes()
            recorded.properties.update(dtypes_of(models, {*optimizers, *self._stepped}, self.layers.names))
            trace = trace_from_ledger(recorded)
            if counted is not None:
                trace = replace(trace, counters=tuple(counted.readings(trace.device_rows("cpu")[0])))
            result = self._result(trace)
            ledger.blocks.clear()  # this also removes the weak references
        return result

    def _add_unseen(self) -> None:
        """Count what is alive at the end, and that neither an operator nor the start state has shown."""
        if self.layers.problems or self._has_other_threads or self._ends_beside_threads:
            return  # what later events or other threads made would count, too
        self.recorded.ledger.blocks_of(self._storages_alive(), late=True)

    def _missed_bytes(self) -> int:
        """Return the bytes alive now that are not counted; searched only if a note needs them."""
        if not self._has_blind_spots():
            return 0
        alive = {storage_key(storage): storage.nbytes() for storage in self._storages_alive()}
        return sum(size for key, size in alive.items() if key not in self.recorded.ledger.blocks)

    def _has_blind_spots(self) -> bool:
        return bool(
            self.layers.problems
            or self._has_other_threads
            or self._ends_beside_threads
            or self._foreign_calls
        )

    def _storages_alive(self) -> Iterator[torch.UntypedStorage]:
        alive = storages_alive(of_gradients=not other_threads_may_run())
        return (storage for storage in alive if self._is_mine(storage) and allocated_by_torch(storage))

    def _result(self, trace: MemoryTrace) -> TracerResult:
        ledger, names = self.recorded.ledger, self.layers.names
        rows = [
            (time, kind.value, block.bytes if block else 0, row, level, level)
            for time, kind, block, row, _, level, _ in ledger.entries
        ]
        return TracerResult(
            trace=trace,
            layers=layer_stats(names, self.layers.figures),
            phases=list(self.phases),
            rows=rows,
            names=layer_names(names),
            start_ns=self.recorded.start_ns,
            stop_ns=self.recorded.stop_ns,
            peak_allocated=ledger.peak,
            peak_reserved=ledger.peak,
            dropped=ledger.dropped,
            total=ledger.written,
        )

    def begin_phase(self, name: str) -> PhaseMemoryStats:
        """Begin a phase that the user named."""
        with self.recorded.ledger.lock:
            self.layers.here().settle()
            level = self.recorded.ledger.level
            phase = PhaseMemoryStats(name, level, level, level)
            self.recorded.ledger.watched.append(phase)
            self.recorded.marks.append((time_ns(), name, False))
        return phase

    def end_phase(self, phase: PhaseMemoryStats) -> None:
        """End a phase."""
        ledger = self.recorded.ledger
        with ledger.lock:
            self.layers.here().settle()
            phase.after_bytes = ledger.level
            ledger.watched[:] = [open_phase for open_phase in ledger.watched if open_phase is not phase]
            self.recorded.marks.append((time_ns(), phase.name, True))
            self.phases.append(phase)

    def _unhook(self) -> None:
        for step in self._undo():
            step()

    def _undo(self) -> list[Callable[[], object]]:
        """Return functions that remove what is ours except for modes. Each may be called twice."""
        return [
            partial(stop_listening, self),
            partial(profiler_windows.stop_listening, self._steps_aside),
            self._layer_calls.stop,
            *(handle.remove for handle in self._handles),
            self._handles.clear,
            self._uncompiled.forget,
        ]

    def around(self, call: Callable[[], Any]) -> Any:
        """Make a call that torch hides from modes, and record what it allocates."""
        mode = self._mode_here()
        return call() if mode is None else mode.make_hidden_call(call)

    @guarded("a call without an operator")
    def _mode_here(self) -> StorageMode | None:
        return next(modes_here(self.layers), None)

    @guarded("what no operator made")
    def see_memory(self, memory: torch.Tensor | torch.UntypedStorage) -> None:
        """Record what torch allocated, resized or read on this thread without an operator."""
        for mode in modes_here(self.layers):
            mode.see(memory)

    def fail(self, where: str, error: BaseException) -> None:
        """Stop tracing after an error of ours."""
        self.layers.failed(where, error)

    def _saw_inputs(self, sightings: list[Sighting], storages_seen: list[torch.UntypedStorage]) -> None:
        """Note what enters an outermost module call on this thread, or was written to by it."""
        ledger = self.recorded.ledger
        with ledger.lock:
            self.layers.here().settle()
            blocks = [ledger.blocks.get(storage_key(storage)) for storage in storages_seen]
            self.recorded.sightings.extend(zip(blocks, sightings, strict=True))

    def _watch(self) -> None:
        """Trace another thread that calls a layer until the call ends, unless autograd set a mode there."""
        ident = threading.get_ident()
        if ident == self._thread or any(modes_here(self.layers)):
            return
        self._foreign_calls += 1
        mode = self._modes[ident] = self._mode()
        mode.enter()

    def _unwatch(self) -> None:
        mode = self._modes.pop(threading.get_ident(), None)
        if mode is not None:
            mode.leave()

    def _name(self, tensors: Iterable[Named], *, late: bool = True) -> None:
        """Set the category, label and module of the tensors' storages that have none yet.

        The state of an optimizer may look like a copy of the weights: it has their sizes.
        """
        ledger = self.recorded.ledger
        with ledger.lock:
            for tensor, category, module, label in tensors:
                for storage, _, plain in storages_and_tensors(tensor):
                    if not self._is_mine(storage):
                        continue
                    [block] = ledger.blocks_of([storage], late=late)
                    is_state = category is Category.OPTIMIZER_STATE
                    if block.category is Category.UNKNOWN or (
                        is_state and block.category is Category.PARAMETER_COPY
                    ):
                        block.category, block.label, block.tensor = category, label, dense(plain)
                        block.module = module if module >= 0 else block.module

    def _mine(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors:
            for storage, _ in storages(tensor):
                if self._is_mine(storage):
                    yield storage

    def _is_mine(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == self._device_type and storage.nbytes() > 0

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.layers.on:
            self._name(gradients(optimizer, self.layers.names))
            if self.layers.results is not None:
                self.layers.results.before_step(optimizer)
            self._step_starts.begin(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.layers.on:
            self._stepped.add(optimizer)
            now, parameters = time_ns(), HeldByOptimizer(self.layers.names).stepped(optimizer)
            start = self._step_starts.end(optimizer) or self.recorded.start_ns
            self.layers.optimizer.append(OptimizerStep(start, now, parameters))
            self._name(held_parameters(optimizer, self.layers.names))  # the state may hold them, too
            self._name(optimizer_storages(optimizer, self.layers.names))

    def _notes(self) -> Iterator[Note]:
        ledger = self.recorded.ledger
        yield from (
            Note(
                f"{problem}: later events are missing, at the end at least {self._missed:,} bytes.",
                "stopped_early",
                self._missed,
            )
            for problem in self.layers.problems
        )
        unseen = self.layers.unseen
        if self._device_type != "cpu":
            yield Note(
                "Memory that kernels allocate and free within an operator is not in these numbers.",
                "kernels_not_seen",
            )
        if unseen.operators:
            yield Note(
                f"{counted(unseen.operators, 'operator')}, with results of {unseen.results:,} bytes, ran "
                "while another profiler recorded, or with a version of torch that does not report it: what "
                "their kernels allocated beside these results and freed within them is not in these numbers.",
                "kernels_not_seen",
                unseen.results,
            )
        if unseen.kept or unseen.frees:
            yield Note(
                f"Operators kept {unseen.kept:,} bytes that are in no tensor, which count only while "
                f"they ran, and freed {unseen.frees:,} bytes whose allocation was not seen.",
                "in_no_tensor",
                unseen.kept + unseen.frees,
            )
        yield from self._notes_of_the_mode()
        if ledger.dropped:
            yield Note(
                f"{ledger.dropped:,} of {ledger.written:,} events were dropped, the oldest first, "
                f"because max_events is {self._max_events:,}. Peaks and layer statistics still count all "
                f"events, but the curve of the others reaches {max(entry[5] for entry in ledger.entries):,} "
                f"of {ledger.peak:,} bytes.",
                "events_dropped",
                ledger.peak,
            )
        if ledger.late:
            yield Note(
                "Made without an operator, or on a thread that was not watched: "
                f"{counted(len(ledger.late), 'tensor')}, {sum(ledger.late):,} bytes. They count from when "
                "they were noticed, so the peak may be up to that much higher.",
                "noticed_late",
                sum(ledger.late),
            )
        if self._has_other_threads:
            yield Note(
                "Other threads were running when the block began. Gradients that only autograd held "
                "then, of models other than the traced one, are not in the start state. At the end, at least "
                f"{self._missed:,} bytes are alive that are not counted.",
                "other_threads",
                self._missed,
            )
        elif self._ends_beside_threads:
            yield Note(
                "Other threads were running when the block ended, and what they allocate is not seen: at "
                f"least {self._missed:,} bytes are alive that are not counted.",
                "other_threads",
                self._missed,
            )
        if threading.get_ident() != self._thread:
            yield Note(
                "The block ended on another thread than it began on (a generator's, for example). A "
                "dispatch mode that does nothing stays on that thread until its next operator.",
                "other_thread_at_end",
            )
        if self._foreign_calls:
            yield Note(
                f"Layers were called on other threads, {counted(self._foreign_calls, 'time')}. There, memory "
                "is seen only while a layer runs; what such a thread allocates between layers is not: "
                f"at the end, at least {self._missed:,} bytes are alive that are not counted.",
                "other_threads",
                self._missed,
            )

    def _notes_of_the_mode(self) -> Iterator[Note]:
        """Yield what the dispatch mode itself may have added to peaks, or taken from them."""
        unseen, highest = self.layers.unseen, self.recorded.ledger.peak
        if calls := FLAGS.uncompiled_calls - self._uncompiled_before:
            yield Note(
                f"{counted(calls, 'call')} of compiled functions ran uncompiled, as always under a dispatch "
                f"mode. The peak of {highest:,} bytes is that of the uncompiled program. With "
                "torch.profiler, memory_trace_handler sees compiled code.",
                "ran_uncompiled",
                highest,
            )
        if unseen.excess[0] == highest:
            yield Note(
                "The peak was reached in backward, by a result that torch makes only while a dispatch mode "
                "is on: alone, it writes over another tensor or uses another formula. Without the tracer, "
                f"the peak may be up to {unseen.excess[1]:,} bytes lower.",
                "peak_of_dispatch_mode",
                unseen.excess[1],
            )
        if unseen.higher_peak > highest:
            yield Note(
                "The backward of max(), min() or median() of a whole tensor takes more when no dispatch mode "
                f"is on. Without the tracer, the peak may be up to {unseen.higher_peak - highest:,} bytes "
                "higher.",
                "peak_of_dispatch_mode",
                unseen.higher_peak - highest,
            )


def _refuse_compiled(models: Mapping[str, nn.Module]) -> None:
    """Refuse compiled models: under a dispatch mode they run uncompiled, with other memory use."""
    for prefix, model in models.items():
        for name, module in modules_in(model, prefix):
            if is_compiled(module):
                raise MemPluginError(
                    "The model is compiled. Compiled code runs uncompiled while the tracer watches, "
                    "so its memory would not be that of the compiled model.",
                    where=f"module {name or '(root)'}",
                    fix="Trace the model before torch.compile, or use torch.profiler with "
                    "memory_trace_handler, which sees compiled code.",
                )
