"""`memory_trace_handler`: the `on_trace_ready` callback that records memory from torch.profiler."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex

import torch
from torch import nn
from torch.profiler import ProfilerAction

from tb_memplugin.errors import MemPluginError, NotRecordedError, is_of_signal
from tb_memplugin.logs import instance_logger, say_where
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.record.arguments import (
    Optimizers,
    checked_optimizers,
    default_worker_name,
    referents,
    with_inner,
)
from tb_memplugin.record.exact_cpu import count_if_possible
from tb_memplugin.record.guard import Guard, guarded
from tb_memplugin.record.history.allocators import allocators
from tb_memplugin.record.history.merge import merge_snapshot
from tb_memplugin.record.history.recording import HistoryWindowRecorder, window_recorder
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.tree_columns import as_profiled
from tb_memplugin.record.profiler.window import LOST, WindowRecorder, watch
from tb_memplugin.record.profiler_windows import raise_interrupt
from tb_memplugin.record.trackers import LogTo, TrackerLog, chosen
from tb_memplugin.store import files
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Kind, MemoryTrace, Note

Handler = Callable[[torch.profiler.profile], None]


def memory_trace_handler(
    dir_name: str | os.PathLike[str],
    worker_name: str | None = None,
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizers = None,
    snapshot: bool = False,
    start: Literal["all", "given"] = "all",
    exact_cpu: bool = False,
    durable: bool = False,
    log_to: LogTo = None,
    log_level: int | str | None = None,
) -> Handler:
    """Return a handler for `torch.profiler.profile(on_trace_ready=…)` that records memory for the Memory tab.

    Create it before the profiled window starts, and pass `profile_memory=True` to the profiler. It needs
    neither stacks nor shapes; with the profiler's `with_stack=True` every allocation keeps its Python
    stack, and an allocation in backward also keeps the stack of its forward call. The handler does not
    change what the training computes, leaves the profile usable for other handlers, and never ends the
    training: what fails in it is undone and logged once, and later windows are recorded. Copies of a handler
    are that handler; an unpickled one records the same, without the model and the optimizer.

    Args:
        dir_name: the run's folder, below TensorBoard's logdir: a local path, or a URL that fsspec opens.
        worker_name: a name that is unique per process. Default: `rank<N>` under torchrun, else
            `<host>_<pid>`.
        model: a module, or a dict of named modules, whose memory is shown by layer. Held weakly. If None,
            names come from Python stacks, where the profile records them.
        optimizer: one or several optimizers, in a list or a dict by name, to recognize their state and
            gradients. Held weakly, together with the optimizers that they wrap. Optimizers that step during
            the window are found without being passed.
        snapshot: also record the allocator's history during the profiled window, on CUDA, ROCm and XPU.
            It adds stacks, requested sizes, streams, pools and segments to the same trace. A history that
            is already on stays on.
        start: what is alive when a window begins: "all" that Python and autograd can reach, found by a search
            through the program's objects, once a window, or only what is "given" by `model` and `optimizer`.
        exact_cpu: also count the calls of the CPU's allocator, from now on and on all threads, with a small C
            library that is compiled once (Linux). It makes the CPU's bytes exact. What is alive already is
            counted as far as Python can reach it; to miss nothing, set TB_MEMPLUGIN_EXACT_CPU=1 before
            tb_memplugin is imported, and import it before the first tensor.
        durable: wait at the end of each window until the disk has it (docs/design/store.md), not only begin.
        log_to: "wandb", "mlflow" or "trackio", or several: its run, which the program has begun, gets
            the peaks of recorded steps and a report of each window (docs/trackers.md).
        log_level: the level for this handler's own messages, a name or number. None: the package's level.

    Raises:
        TypeError: a model, an optimizer or the worker's name has the wrong type.
        ValueError: `start` is neither "all" nor "given".
        MemPluginError: the log level or the tracker does not exist, or the tracker is not installed.

    Example:
        >>> handler = memory_trace_handler("runs/a", model=model, optimizer=optimizer)
        >>> with torch.profiler.profile(profile_memory=True, on_trace_ready=handler) as prof:
        ...     train(prof)
    """
    if isinstance(dir_name, torch.profiler.profile):  # the training has run: an error would end it
        instance_logger(log_level).warning(
            "Nothing was recorded: the profiler was given memory_trace_handler itself. Call it: "
            "on_trace_ready=memory_trace_handler(DIR)."
        )
        return combine_handlers()
    if start not in ("all", "given"):
        raise ValueError(f'start is {start!r}; give "all" or "given"')
    if worker_name is not None and not isinstance(worker_name, str | SupportsIndex):
        raise TypeError(
            f"worker_name is a {type(worker_name).__name__}; give text. A torch.nn.Module is given as model="
        )
    settings = _Settings(
        os.fsdecode(dir_name),
        None if worker_name is None else str(worker_name),
        snapshot=snapshot,
        finds_all=start == "all",
        exact_cpu=exact_cpu,
        durable=durable,
        log_to=chosen(log_to),
        log_level=log_level,
    )
    return _MemoryTraceHandler(settings, _models(model), with_inner(checked_optimizers(optimizer)))


def combine_handlers(*handlers: Handler) -> Handler:
    """Combine several handlers into one `on_trace_ready` that calls each with the profile, in order.

    If one raises, the others are still called, and then the first error is raised.

    Raises:
        TypeError: one of them cannot be called.
    """
    for handler in handlers:
        if not callable(handler):
            raise TypeError(f"combine_handlers takes functions; this is a {type(handler).__name__}")
    return _CombinedHandlers(handlers)


@dataclass(frozen=True)
class _CombinedHandlers:
    """The callable behind `combine_handlers`."""

    handlers: tuple[Handler, ...]

    def __call__(self, prof: torch.profiler.profile) -> None:
        errors = []
        for handler in self.handlers:
            try:
                handler(prof)
            except Exception as error:
                errors.append(error)
            except BaseException:
                _leave(prof)
                raise
        if errors:
            _leave(prof)
            raise errors[0]


def _leave(prof: torch.profiler.profile) -> None:
    """Say that no window is open, as is true here: an error now leaves out what else torch does in `step`.

    Without this, torch would end the window once more when the program leaves the profile, and crash.
    """
    if isinstance(prof, torch.profiler.profile):
        prof.current_action = ProfilerAction.NONE


@dataclass(frozen=True)
class _Settings:
    """The arguments of a handler that can be pickled."""

    dir_name: str
    worker_name: str | None
    snapshot: bool = False
    finds_all: bool = True
    exact_cpu: bool = False
    durable: bool = False
    log_to: tuple[str, ...] = ()
    log_level: int | str | None = None


class _MemoryTraceHandler:
    """The callable behind `memory_trace_handler`.

    Args:
        lacks: what a handler had that this one was unpickled from, "" for nothing.
    """

    def __init__(
        self,
        settings: _Settings,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        lacks: str = "",
    ) -> None:
        self._settings, self._lacks = settings, lacks
        self._logger = instance_logger(settings.log_level)
        self._guard = Guard(LOST, self._logger)
        self._trackers = TrackerLog(settings.log_to, self._guard)
        self._writer: RunWriter | None = None
        self._windows = 0
        self._is_announced = False
        self._recorder: WindowRecorder | None = None
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._begin()

    @guarded("memory_trace_handler")
    def _begin(self) -> None:
        """Begin to record windows. If that fails, it is tried again at the end of the next one."""
        models = {
            name: model for name, reference in self._models.items() if (model := reference()) is not None
        }
        self._dir_name = files.absolute(self._settings.dir_name)
        if self._settings.exact_cpu:
            count_if_possible(self._logger)
        histories = allocators() if self._settings.snapshot else ()
        if self._settings.snapshot and not histories:
            self._guard.warn(
                "snapshot=True has no effect here: no CUDA or XPU device with torch's own caching "
                "allocator was found. Everything else is recorded.\n  fix: remove snapshot=True here, "
                "or run on a machine with such a device."
            )
        optimizers, finds_all = referents(self._optimizers), self._settings.finds_all
        recorder = window_recorder(models, optimizers, histories, finds_all=finds_all, guard=self._guard)
        watch(recorder, self)
        self._recorder = recorder

    def __copy__(self) -> _MemoryTraceHandler:
        return self

    def __deepcopy__(self, _: object) -> _MemoryTraceHandler:
        """Return the handler itself: two would write the same windows, each into a folder of its own."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _MemoryTraceHandler, (self._settings, {}, (), self._held_weakly() or self._lacks)

    def _held_weakly(self) -> str:
        return " and ".join(
            [*["the model"] * bool(self._models), *["the optimizer"] * bool(self._optimizers)]
        )

    def fail(self, where: str, error: BaseException) -> None:
        """Drop the window of which something failed."""
        self._guard.end(where, error, self._drop)

    def _drop(self) -> None:
        if self._recorder is not None:
            self._recorder.take()
        if isinstance(self._recorder, HistoryWindowRecorder):
            self._recorder.take_snapshots()

    @guarded("on_trace_ready", before_end=lambda _, prof: _leave(prof))
    def __call__(self, prof: torch.profiler.profile) -> None:
        try:
            raise_interrupt()
            self._write(prof)
        except NotRecordedError as error:
            if not self._windows or not getattr(prof, "profile_memory", False):
                raise
            self._logger.debug("%s", error)  # the loop ended just as the schedule began a window

    def _write(self, prof: torch.profiler.profile) -> None:
        if self._recorder is None:
            self._begin()
            return
        window = self._recorder.take()
        if window is None and self._recorder.is_lost:
            self._guard.warn_waiting()
            return
        if window is None:
            raise MemPluginError(
                "The handler did not see the start of this window, so nothing was written.",
                where="memory_trace_handler",
                fix="Create the handler before the profiler starts, and call it once per window.",
            )
        histories = self._histories(self._recorder)
        try:
            trace = self._merged(trace_from_profile(prof, window, self._windows), histories)
        except NotRecordedError:
            if not getattr(prof, "profile_memory", False) or not any(
                len(history.events) for history in histories
            ):
                raise
            trace = _unseen(histories)
        self._windows += 1
        if self._lacks:
            without = (
                f"The handler was unpickled without {self._lacks} that it had, so modules have no names. "
                "Create one with model= and optimizer= in the process that trains."
            )
            trace = replace(trace, notes=(*trace.notes, Note(without, "unpickled")))
        if self._writer is None:
            worker = self._settings.worker_name or default_worker_name()
            durable = self._settings.durable
            # A method of the guard: one of the handler would keep that alive.
            self._writer = RunWriter(self._dir_name, worker, self._guard.end_flush, durable=durable)
        self._writer.write(self._with_holders(trace, self._recorder))
        for problem in window.problems:
            self._guard.warn(problem)
        for open_problem, kind in window.open_problems.items():
            self._guard.warn(open_problem, once=kind)
        try:
            self._written(trace, self._recorder)
        except BaseException as error:
            self._guard.end("after a window", error, loss="This window is recorded, but what followed failed")

    def _with_holders(self, trace: MemoryTrace, recorder: WindowRecorder) -> MemoryTrace:
        try:
            return recorder.with_holders(trace)
        except Exception as error:
            loss = "This window is recorded, but not what holds the memory that outlives it"
            self._guard.end("after a window", error, loss=loss)
            return trace

    def _written(self, trace: MemoryTrace, recorder: WindowRecorder) -> None:
        recorder.remember(trace)
        self._trackers.window(trace, self._settings.worker_name or default_worker_name())
        if not self._is_announced:
            self._is_announced = True
            say_where(self._dir_name, "memory", self._logger)

    def _histories(self, recorder: WindowRecorder) -> list[MemoryTrace]:
        """Return the traces of the allocators' histories that can be read."""
        traces = []
        if isinstance(recorder, HistoryWindowRecorder):
            for device_type, snapshot in recorder.take_snapshots():
                try:
                    name = f"the allocator's history of {device_type}"
                    traces.append(as_profiled(trace_from_snapshot(snapshot, name, device_type)))
                except Exception as error:  # the profile is worth writing without it
                    self._cannot_read(error)
        return traces

    def _merged(self, trace: MemoryTrace, histories: Sequence[MemoryTrace]) -> MemoryTrace:
        """Return the trace merged with the allocators' histories; unchanged where merging fails."""
        for history in histories:
            try:
                trace = merge_snapshot(trace, history)
            except Exception as error:  # see _histories
                self._cannot_read(error)
        return trace

    def _cannot_read(self, error: Exception) -> None:
        if is_of_signal(error):
            raise error
        self._logger.debug("joining the allocator's history failed", exc_info=error)
        self._guard.warn(
            f"The allocator's history could not be read ({type(error).__name__}: {error}). The window is "
            "written without it."
        )


def _unseen(histories: Sequence[MemoryTrace]) -> MemoryTrace:
    """Return the longest of the histories of a window in which the profiler saw no allocation."""
    trace = max(histories, key=lambda history: len(history.events))
    size = int(trace.events.bytes[trace.events.kind == Kind.ALLOC].sum())
    note = Note(
        "The profiler saw no allocation, because it sees only the thread that starts it and autograd's. This "
        f"is the allocator's history alone: its {size:,} allocated bytes have no operators of the profile.",
        "history_alone",
        size,
    )
    return replace(trace, notes=(note, *trace.notes))


def _models(model: nn.Module | Mapping[str, nn.Module] | None) -> Mapping[str, nn.Module]:
    if model is None:
        return {}
    named = (
        {str(name): module for name, module in model.items()} if isinstance(model, Mapping) else {"": model}
    )
    for name, module in named.items():
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"model{name and f' {name!r}'} is a {type(module).__name__}; give a torch.nn.Module or a "
                "dict of them"
            )
    return named
