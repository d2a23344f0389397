"""Record what a profile itself does not contain, while the profiler runs.

At a window's start: which storages are alive. During the window: when modules are entered and left, which
storages are gradients and optimizer state, and when storages of the start state are freed. Between windows
there are no hooks and no weak references to storages.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import chain
from time import thread_time_ns, time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.errors import is_of_signal
from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.record.alive_before import CarriedBlocks, alive_now, bucket_sizes, buckets_alive
from tb_memplugin.record.arguments import referents
from tb_memplugin.record.exact_cpu.counting import CountedCalls, CountedWindow, begin_window, is_counting
from tb_memplugin.record.guard import Guard, guarded, kind_of
from tb_memplugin.record.modules import ModuleNames, ModuleRecorder, Newcomers
from tb_memplugin.record.optimizer_hooks import OptimizerStep, StepHooks, StepStarts
from tb_memplugin.record.profiler.held_storages import (
    HeldByModels,
    HeldByOptimizer,
    Sightings,
    unique_sightings,
)
from tb_memplugin.record.profiler_windows import can_listen, listen
from tb_memplugin.record.storages import (
    Freed,
    OuterCalls,
    Purpose,
    Sighting,
    StorageReference,
    allocated_by_torch,
    foreign_note,
    gradients,
    held_parameters,
    memory_of,
    model_storages,
    optimizer_parameters,
    optimizer_storages,
    sight,
)
from tb_memplugin.record.storages_alive import OtherThreads, other_threads_may_run, storages_alive
from tb_memplugin.record.tensor_metadata import metadata_of
from tb_memplugin.record.tensors_inside import tensors_in
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.torch_private.tensors import storage_address, storage_key
from tb_memplugin.record.whole_device.card import DEFAULT_POOL, Levels, allocator_levels, pool_of
from tb_memplugin.record.whole_device.window import WholeReading, read_whole
from tb_memplugin.record.why_alive import with_holders
from tb_memplugin.trace import Category, Counter, MemoryTrace, Note
from tb_memplugin.trace.labels import ALIVE_BEFORE

logger = logging.getLogger("tb_memplugin")

Segment = dict[str, Any]
"""A segment as `torch.cuda.memory_snapshot()` lists it."""


LOST = "The memory of this window is not recorded"
"""What an error costs."""

LONGEST_SEARCH_NS = 1_000_000_000
"""If the search for what is alive takes longer, later windows do without: training waits for it."""

LONGEST_REPEATED_NS = LONGEST_SEARCH_NS // 4
"""The same for the search for what holds the blocks that outlive a window."""


class StartStorage(StorageReference):
    """A storage of the start state: `row` of `Window.start`."""

    __slots__ = ("row",)
    row: int


@dataclass(slots=True)
class Window:
    """The record of one window. Times are epoch nanoseconds.

    Attributes:
        start_ns, stop_ns: when the window began and ended.
        thread: `threading.get_ident()` of the thread that started the profiler.
        names: the models' modules.
        start: the storages alive at the start.
        searched: (device name, address) of those of them that neither a model nor an optimizer told.
        frees: when storages of the start state were freed.
        moved: (row in `start`, address at the end) of storages of the start state that were resized to 0,
            and perhaps filled at another address.
        crossings: see `ModuleRecorder.log`.
        sightings: storages with a known purpose, seen at optimizer steps and at the window's end.
        optimizer_steps: every optimizer step that returned.
        knows_optimizers: whether the state of optimizers was looked for.
        blocks: the blocks that the device allocators list as alive at the start, as
            (device name, address, bytes). Empty for allocators that cannot list them, such as the CPU's where
            its calls are not counted.
        levels_at_start, levels_at_stop: the counters of the device allocators.
        whole_at_start, whole_at_stop: what filled the whole devices, None if that could not be read.
        private_pools: those of CUDA's allocator at the start.
        counted: the calls of the CPU's allocator, None where they are not counted.
        buckets: (module row, bytes) of the buckets of `DistributedDataParallel`: all where blocks are listed,
            else those alive at the start.
        alive_at_end: by address, the bytes of all storages that Python has at the end; 0 of those that are
            not of torch's CPU allocator. Searched where other threads allocate or free, unseen by profilers:
            Python's, which may have ended, and those of communication where several processes train on CPUs.
        notes: what is said of the start state, without a warning.
        problems: what could not be recorded, with the bytes that this concerns.
        open_problems: the same where only the whole trace tells the bytes, each with the kind of the error
            that caused it (`kind_of`), "" for none.
        results: by thread ident, the bytes that outer calls of modules returned there, without those on
            `thread`.
        is_second: whether it began while another window was open.
        foreign: (device name, address) of inputs in memory that another process or library allocated.
        in_problems: (device name, address) of storages from before the window that a problem counts.
    """

    start_ns: int
    thread: int
    names: ModuleNames
    start: list[Sighting] = field(default_factory=list)
    searched: set[tuple[str, int]] = field(default_factory=set)
    frees: Freed[StartStorage] = field(default_factory=lambda: defaultdict(time_ns))
    moved: list[tuple[int, int]] = field(default_factory=list)
    crossings: list[tuple[int, int, int, int]] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)
    optimizer_steps: list[OptimizerStep] = field(default_factory=list)
    knows_optimizers: bool = False
    blocks: list[tuple[str, int, int]] = field(default_factory=list)
    counted: CountedCalls | None = None
    levels_at_start: Levels = field(default_factory=dict)
    levels_at_stop: Levels = field(default_factory=dict)
    whole_at_start: WholeReading | None = None
    whole_at_stop: WholeReading | None = None
    private_pools: set[tuple[int, int]] = field(default_factory=set)
    buckets: list[tuple[int, int]] = field(default_factory=list)
    alive_at_end: dict[int, int] | None = None
    stop_ns: int = 0
    has_models: bool = False
    notes: list[Note] = field(default_factory=list)
    problems: list[Note] = field(default_factory=list)
    open_problems: dict[str, str] = field(default_factory=dict)
    results: dict[int, int] = field(default_factory=dict)
    is_second: bool = False
    foreign: set[tuple[str, int]] = field(default_factory=set)
    in_problems: set[tuple[str, int]] = field(default_factory=set)


class WindowRecorder:
    """Records windows for one handler. Holds models and optimizers weakly.

    Args:
        models: name -> module; a single unnamed model has the name "".
        optimizers: the optimizers whose state should be identified. Others that step during a window
            and own parameters of the models are found without being passed.
        finds_all: whether a window's start state has everything that Python can reach, or only what the
            models and optimizers hold.
        guard: ends the errors of this recorder. The window in which one is raised is not recorded.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        finds_all: bool = True,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard or Guard(LOST)
        self._is_lost = False
        self._finds_all, self._carried = finds_all, CarriedBlocks()
        self._search_ns = self._search_bytes = self._holders_ns = 0
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._optimizer_count = len(optimizers)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = [
            weakref.ref(optimizer) for optimizer in optimizers
        ]
        self._modules = ModuleRecorder(scripted=True)
        self._handles: list[Any] = []
        self._start_storages: dict[int, StartStorage] = {}
        self._window: Window | None = None
        self._counting: CountedWindow | None = None
        self._held: HeldByModels | None = None
        self._optimizers_held: dict[int, tuple[weakref.ref[torch.optim.Optimizer], HeldByOptimizer]] = {}
        self._sightings: list[list[Sightings]] = []
        self._step_starts = StepStarts()
        self._round: set[int] = set()
        self._before: set[tuple[str, int]] = set()  # (device name, address) of the start state
        self._entered: dict[int, set[tuple[str, int]]] = {}  # by thread, of what its outer call was given

    @property
    def is_lost(self) -> bool:
        """Whether the last window was dropped because of an error, which waits in the guard."""
        return self._is_lost

    @guarded("the start of a window")
    def start(self) -> None:
        """Begin a window: record the start state and add hooks."""
        self._release()
        self._is_lost = False
        models, before = self._alive_models(), self._window
        self._window = window = Window(time_ns(), threading.get_ident(), ModuleNames())
        self._other_threads = OtherThreads()
        window.is_second = before is not None and not before.stop_ns
        window.names = ModuleNames.of(models)
        window.has_models = bool(models)
        self._missing(models)
        with collector_at_rest():  # it would look at all that is made here
            self._take_start(models)
        outer_calls = OuterCalls(window.names, self._saw_inputs)
        self._modules.start(models, window.names, outer_calls, self._outer_result, self.fail)
        window.crossings = self._modules.log
        self._handles.append(StepHooks(self._before_step, self._after_step, self.fail))
        self._handles += Newcomers(self._modules, self._cannot_name).handles
        window.levels_at_start = allocator_levels()
        segments = allocator_segments()
        window.private_pools = {pool_of(segment) for segment in segments} - {DEFAULT_POOL}
        window.whole_at_start = self._read_whole(segments, children=False)
        window.blocks = blocks_in(segments)
        if is_counting():
            self._counting = begin_window()
            window.blocks += self._counting.blocks()
        if not window.blocks and self._finds_all:
            window.buckets = buckets_alive(models, window.names)
        self._drop_freed(window)
        if not reports_to_profiler():
            window.problems.append(
                Note(
                    f"The CUDA allocator {torch.cuda.get_allocator_backend()!r} reports nothing to "
                    "torch.profiler: the curve of a CUDA device has only the parameters, buffers, gradients "
                    "and optimizer state from the window's start. Use torch's own allocator (without "
                    "backend: in PYTORCH_ALLOC_CONF), or MemoryTracer or MemoryMonitor. Its own counter is "
                    f"at {_counted_on_cuda(window):,} bytes when this window begins.",
                    "allocator_not_reporting",
                    _counted_on_cuda(window),
                )
            )

    def _drop_freed(self, window: Window) -> None:
        """Count nothing for what was freed since it was found: the profiler has not begun yet."""
        while window.frees:
            row = window.frees.popitem()[0].row
            window.start[row] = replace(window.start[row], bytes=0, category=Category.UNKNOWN)
            self._start_storages.pop(row, None)

    @guarded("the end of a window")
    def stop(self) -> None:
        """End the window: remove all hooks and record what is alive."""
        window = self._window
        if window is not None and window.stop_ns:  # it waits to be written
            return
        if window is not None and self._counting is not None:
            window.counted = self._counting.stop()
        if window is not None:
            window.levels_at_stop = allocator_levels()
            segments = allocator_segments(window.private_pools) if window.private_pools else []
            window.whole_at_stop = self._read_whole(segments, children=True)
        self._unhook()
        if window is not None:
            window.stop_ns = time_ns()
            try:
                self._take_end(window)
            except Exception as error:
                self._note("the end of a window", error)
        self._release()

    def _read_whole(self, segments: Sequence[Segment], *, children: bool) -> WholeReading | None:
        try:
            return read_whole(children=children, segments=segments)
        except Exception as error:
            self._note("what fills the whole device", error)
            return None

    def fail(self, where: str, error: BaseException) -> None:
        """End the window because of an error, without a record of it.

        The error is logged when the window would have been written. Handlers that are no longer used hear of
        windows until they are collected as garbage, and have nothing to say.
        """
        self._window, self._is_lost = None, True
        self._guard.end(where, error, *self._undo(), later=True)

    def take(self) -> Window | None:
        """Return the finished window and forget it; None if none was finished since the last call."""
        window, self._window = self._window, None
        return window if window is not None and window.stop_ns else None

    def _unhook(self) -> None:
        self._modules.stop()
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def _release(self) -> None:
        for step in self._undo():
            step()

    def _undo(self) -> list[Callable[[], object]]:
        """Return functions that remove what there is during a window. Each may be called twice."""
        handles = [handle.remove for handle in self._handles]
        return [self._modules.stop, *handles, self._handles.clear, self._end_counting, self._forget]

    def _end_counting(self) -> None:
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.close()

    def _forget(self) -> None:
        self._held = None
        for kept in (self._optimizers_held, self._sightings, self._start_storages):
            kept.clear()
        self._step_starts = StepStarts()
        self._round.clear()
        self._before.clear()
        self._entered.clear()

    def _alive_models(self) -> dict[str, nn.Module]:
        models = {name: reference() for name, reference in self._models.items()}
        return {name: model for name, model in models.items() if model is not None}

    def _missing(self, models: Mapping[str, nn.Module]) -> None:
        assert self._window is not None
        gone = len(self._models) - len(models)
        if gone:
            self._window.open_problems[
                f"{gone} model(s) given to memory_trace_handler no longer exist, so their modules have "
                "no names here. Keep a reference to the model, or create a new handler for the new "
                "one."
            ] = ""

    def _take_start(self, models: Mapping[str, nn.Module]) -> None:
        assert self._window is not None
        window = self._window
        kept: list[torch.UntypedStorage] = []
        tensors = list(model_storages(models, window.names))
        self._held = HeldByModels(models, window.names)
        self._held.look()  # what is there now is the start state
        for optimizer in referents(self._optimizers):
            tensors += _of_optimizer(optimizer, window.names)
            window.knows_optimizers = True
            holdings = self._held_by(optimizer, window)
            holdings.look(optimizer)
            holdings.look_at_state(optimizer)
        window.start = sight(tensors, keep=kept)
        if not is_counting():  # else the account has these bytes
            window.notes += foreign_note(kept)
        if self._finds_all and self._search_ns <= LONGEST_SEARCH_NS:
            began, count = thread_time_ns(), len(window.start)
            try:
                self._add_alive(window, kept)
            except Exception as error:
                self._note("the search for what is alive", error)
            self._search_ns = thread_time_ns() - began
            self._search_bytes = sum(sighting.bytes for sighting in window.start[count:])
        elif self._finds_all:
            window.problems.append(
                Note(
                    "Of what was alive before this window, only what model and optimizer hold is counted: "
                    f"the search for the rest took {self._search_ns / 1e9:.1f} s in the window before, and "
                    f"had {self._search_bytes:,} bytes.",
                    "search_left_out",
                    self._search_bytes,
                )
            )
        for row, (sighting, storage) in enumerate(zip(window.start, kept, strict=True)):
            if sighting.device in ("cpu", "shared"):
                reference = self._start_storages[row] = StartStorage(storage, window.frees.__getitem__)
                reference.row = row

    def _add_alive(self, window: Window, kept: list[torch.UntypedStorage]) -> None:
        """Add to the start state what else is alive: `kept` gets its storages."""
        keys = {(sighting.device, sighting.address) for sighting in window.start}
        rows = {module.key: row for row, module in enumerate(window.names.modules)}
        for alive in alive_now(window.notes, map(storage_key, kept)):
            storage, key = alive.storage, (alive.device, storage_address(alive.storage))
            if key in keys:
                continue
            keys.add(key)
            before = self._carried.get(storage)
            category, label, module = alive.category, alive.label or ALIVE_BEFORE, -1
            if before is not None:
                category, label = before.category, before.label or label
                module = rows.get(before.module, -1)
            window.searched.add(key)
            tensor = alive.tensor and metadata_of(alive.tensor)
            window.start.append(
                Sighting(time_ns(), *key, storage.nbytes(), category, module, label, tensor=tensor)
            )
            kept.append(storage)
        unreached = sum(size for key, size in self._carried.unreached.items() if key not in keys)
        if unreached and not is_counting():
            window.notes.append(
                Note(
                    f"Up to {unreached:,} bytes that earlier windows allocated are not counted: they were "
                    "alive at the end, but neither Python nor autograd has them. They were freed since, or "
                    "only C++ code holds them. Pass exact_cpu=True to know.",
                    "unreached",
                    unreached,
                )
            )

    def with_holders(self, trace: MemoryTrace) -> MemoryTrace:
        """Return the trace with what holds the blocks that outlive it, unless that took long once before."""
        if not self._finds_all or self._holders_ns > LONGEST_REPEATED_NS:
            return trace
        began = thread_time_ns()
        try:
            return with_holders(trace)
        finally:
            self._holders_ns = thread_time_ns() - began

    def remember(self, trace: MemoryTrace) -> None:
        """Keep what a window's blocks were that are still alive, for the next window. Holds them weakly."""
        if self._finds_all:
            self._carried = CarriedBlocks.of(trace, self._carried)

    def _take_end(self, window: Window) -> None:
        if self._held is not None:
            self._held.look()  # names what was put in since the last step
        models = self._alive_models()
        if window.blocks:  # torch tells the sizes of rebuilt buckets in the forward after that
            window.buckets = bucket_sizes(models, window.names)
        tensors = list(model_storages(models, window.names))
        for optimizer in referents(self._optimizers):
            tensors += _of_optimizer(optimizer, window.names)
        self._sightings.append([sight(tensors)])
        if self._other_threads_allocate(window):
            window.alive_at_end = _bytes_alive()
        alive = (
            (row, storage)
            for row, reference in self._start_storages.items()
            if (storage := reference()) is not None
        )
        addresses = [(row, storage_address(storage)) for row, storage in alive]
        window.moved = [(row, address) for row, address in addresses if address != window.start[row].address]
        window.sightings = list(chain.from_iterable(map(unique_sightings, self._sightings)))

    def _other_threads_allocate(self, window: Window) -> bool:
        """Whether threads may have allocated or freed on the CPU, unseen, and all bytes are asked for."""
        on_cpu = any(
            sighting.device == "cpu" and sighting.category is Category.PARAMETER for sighting in window.start
        )
        if on_cpu and torch.distributed.is_available() and torch.distributed.is_initialized():
            return True
        searches = self._finds_all and self._search_ns <= LONGEST_SEARCH_NS
        return searches and window.counted is None and self._other_threads.have_run()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling() or (window := self._window) is None:
            return
        self._step_starts.begin(optimizer)
        holdings, in_models = self._held_by(optimizer, window), []
        if self._held is not None and (not self._round or id(optimizer) in self._round):
            self._round.clear()
            in_models = self._held.look()
        self._round.add(id(optimizer))
        self._add_optimizer(optimizer, window)
        self._sightings.append(holdings.look(optimizer) + in_models)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling() or (window := self._window) is None:
            return
        began, ended = self._step_starts.end(optimizer), time_ns()
        holdings = self._held_by(optimizer, window)
        if began is not None:
            window.optimizer_steps.append(OptimizerStep(began, ended, holdings.stepped(optimizer)))
        self._sightings.append(holdings.look_at_state(optimizer))

    def _saw_inputs(self, sightings: list[Sighting], storages: list[torch.UntypedStorage]) -> None:
        if self._window is not None:
            self._sightings.append([sightings])
            self._window.foreign.update(
                (sighting.device, sighting.address)
                for sighting, storage in zip(sightings, storages, strict=True)
                if storage.is_shared() or not allocated_by_torch(storage)
            )
            if (thread := threading.get_ident()) != self._window.thread:
                self._entered.setdefault(thread, set()).update(
                    (sighting.device, sighting.address) for sighting in sightings
                )

    def _outer_result(self, result: Any) -> None:
        """Count what a module returned on another thread, which the profiler may not see."""
        if (window := self._window) is None or torch.compiler.is_dynamo_compiling():
            return
        thread = threading.get_ident()
        self._before = self._before or {(sighting.device, sighting.address) for sighting in window.start}
        before = self._before | self._entered.pop(thread, set())
        with without_torch_functions():
            sightings = sight((tensor, Category.UNKNOWN, -1, "") for tensor in tensors_in(result))
        size = sum(
            sighting.bytes for sighting in sightings if (sighting.device, sighting.address) not in before
        )
        window.results[thread] = window.results.get(thread, 0) + size

    def _held_by(self, optimizer: torch.optim.Optimizer, window: Window) -> HeldByOptimizer:
        entry = self._optimizers_held.get(id(optimizer))
        if entry is None or entry[0]() is not optimizer:  # new; perhaps with the id of one that is gone
            entry = weakref.ref(optimizer), HeldByOptimizer(window.names)
            self._optimizers_held[id(optimizer)] = entry
            self._round.clear()  # what it is for may be new, too
        return entry[1]

    def _add_optimizer(self, optimizer: torch.optim.Optimizer, window: Window) -> None:
        """Take in an optimizer that steps but was not given, for example one that replaces the given one."""
        if any(reference() is optimizer for reference in self._optimizers):
            return
        owned = any(row >= 0 for _, row, _ in optimizer_parameters(optimizer, window.names))
        if window.has_models and not owned:
            return
        self._optimizers = [reference for reference in self._optimizers if reference() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        window.knows_optimizers = True
        listed = {device for device, _, _ in window.blocks}  # these are in the curve
        started = {(sighting.device, sighting.address) for sighting in window.start}
        before = [
            sighting
            for sighting in sight(optimizer_storages(optimizer, window.names))
            if sighting.device not in listed and (sighting.device, sighting.address) not in started
        ]
        size = sum(sighting.bytes for sighting in before)
        if not size:
            return
        if self._optimizer_count:
            window.problems.append(
                Note(
                    f"{type(optimizer).__name__} made a step, but it is not the optimizer given to "
                    f"memory_trace_handler. Its state is recorded from here on; {size:,} bytes of it from "
                    "before this window are not in the curve.",
                    "optimizer_not_given",
                    size,
                )
            )
        elif window.has_models:
            window.in_problems.update((sighting.device, sighting.address) for sighting in before)
            has_failed = any(window.open_problems.values())  # the search that would have found them
            (window.notes if has_failed else window.problems).append(
                Note(
                    f"{type(optimizer).__name__} was not given to memory_trace_handler. The {size:,} "
                    "bytes of its state from before this window are not in the curve of this window, but "
                    "are in later ones. Pass optimizer=... to include them in the first window.",
                    "optimizer_not_given",
                    size,
                )
            )

    def _cannot_name(self, where: str, error: BaseException) -> None:
        """Note that something put into a model has no name. The window goes on without."""
        if isinstance(error, Exception):
            self._note(where, error)
        else:
            self.fail(where, error)

    def _note(self, moment: str, error: Exception) -> None:
        """Note what a window lacks, because of an error that leaves the rest of it right."""
        if is_of_signal(error):
            raise error
        logger.debug("recording failed at %s", moment, exc_info=error)
        if self._window is not None:
            problem = f"Recording at {moment} failed ({type(error).__name__}: {error})."
            self._window.open_problems[problem] = kind_of(error)


def _of_optimizer(optimizer: torch.optim.Optimizer, names: ModuleNames) -> Iterator[Purpose]:
    yield from held_parameters(optimizer, names)
    yield from gradients(optimizer, names)
    yield from optimizer_storages(optimizer, names)


def _counted_on_cuda(window: Window) -> int:
    levels = window.levels_at_start.items()
    return sum(
        level.current
        for (name, counter), level in levels
        if name.startswith("cuda") and counter is Counter.ALLOCATED
    )


def _bytes_alive() -> dict[int, int]:
    """Return the storages that Python has: see `Window.alive_at_end`."""
    sizes: dict[int, int] = {}
    for storage in storages_alive(of_gradients=not other_threads_may_run()):
        address = storage_address(storage)
        is_torchs = memory_of(storage) == "cpu" and allocated_by_torch(storage)
        sizes[address] = max(sizes.get(address, 0), storage.nbytes() if is_torchs else 0)
    return sizes


def reports_to_profiler() -> bool:
    """Whether profiles have what is allocated on CUDA. Allocators other than torch's own do not report it."""
    return not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() == "native"


def allocator_segments(pools: Iterable[tuple[int, int]] = ()) -> list[Segment]:
    """Return the segments of CUDA's caching allocator; none of other allocators.

    Args:
        pools: only those of these pools, as far as torch can tell them apart; () for all.
    """
    if not torch.cuda.is_initialized() or not reports_to_profiler():
        return []
    parameters = signature(torch.cuda.memory_snapshot).parameters
    light = {"include_traces": False} if "include_traces" in parameters else {}
    if not pools:
        return list(torch.cuda.memory_snapshot(**light))
    if "mempool_id" not in parameters:
        return []
    return [segment for pool in pools for segment in torch.cuda.memory_snapshot(mempool_id=pool, **light)]


def blocks_in(segments: Iterable[Segment]) -> list[tuple[str, int, int]]:
    """Return the allocated blocks of segments: (device name, address, rounded bytes).

    The profiler counts the same rounded sizes, so they sum to its counter at that moment.
    """
    return [
        (f"cuda:{segment['device']}", block["address"], block["size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def watch(recorder: WindowRecorder, handler: object | None = None) -> None:
    """Call `recorder.start` and `.stop` around every profiler window, as long as the recorder exists.

    Those of profiles that have another handler in place of `handler` are left out.
    """
    if can_listen():
        listen(recorder, handler)
        return
    logger.warning(
        "torch %s does not report when a profiler starts, so no memory will be recorded.\n  fix: "
        "use a torch between 2.6 and 2.13, or a newer tb_memplugin.",
        torch.__version__,
    )
