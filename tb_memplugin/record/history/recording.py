"""Record windows with the allocators' own history, and restore its earlier state.

Allocations in it are marked with module names.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from time import time_ns
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.beside_compiler import not_compiled_alone
from tb_memplugin.record.guard import UNOWNED, Failed, Guard, call_all, guarded
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.modules import clean_name, is_compiled
from tb_memplugin.record.profiler.window import WindowRecorder
from tb_memplugin.record.torch_private.allocators import (
    BINDINGS,
    HISTORY_ENABLED,
    LAZY_CALL,
    MARK,
    OBSERVE_FAILURES,
    RECORD_HISTORY,
    SET_MARK,
    SNAPSHOT,
)
from tb_memplugin.record.torch_private.modules import modules_in
from tb_memplugin.trace import Note
from tb_memplugin.trace.tables import MODULE_MARK

Snapshot = dict[str, Any]
Observer = Callable[[int, int, int, int], None]
"""A function called with the device's number, the requested bytes, the process's limit in bytes, and the
device's free bytes."""


@dataclass(frozen=True, slots=True)
class Allocator:
    """The functions of one device type's caching allocator. They may raise any exception of torch.

    Attributes:
        device_type: "cuda" (also for ROCm) or "xpu".
        record: turns the history on or off; see `torch.cuda.memory._record_memory_history`.
        snapshot: returns the dict of `torch.cuda.memory._snapshot()`, for all devices of the type.
        is_recording: whether the history is on.
        is_in_use: whether the process has a context on a device of the type.
        when_in_use: calls a function now, or once the process gets such a context.
        current_device: returns the number of this thread's device.
        set_mark, mark: set and return the text on the allocations of this thread (`user_metadata`); None if
            torch does not support it.
        observe: calls a function whenever an allocation fails, before the error is raised. torch cannot
            remove an observer. None if torch does not support it.
    """

    device_type: str
    record: Callable[..., None]
    snapshot: Callable[[], Snapshot]
    is_recording: Callable[[], bool]
    is_in_use: Callable[[], bool]
    when_in_use: Callable[[Callable[[], None]], None]
    current_device: Callable[[], int]
    set_mark: Callable[[str], None] | None = None
    mark: Callable[[], str] | None = None
    observe: Callable[[Observer], None] | None = None


def allocators() -> tuple[Allocator, ...]:
    """Return the allocators on this machine that keep a history; none without CUDA, ROCm or XPU.

    `cudaMallocAsync` and pluggable allocators keep no history.
    """
    backends = ((name, getattr(torch, name, None)) for name in ("cuda", "xpu"))
    return tuple(
        _allocator(name, backend)
        for name, backend in backends
        if backend is not None
        and hasattr(backend.memory, RECORD_HISTORY)
        and hasattr(backend.memory, SNAPSHOT)
        and backend.is_available()
        and getattr(backend.memory, "get_allocator_backend", _native)() == _native()
    )


def _native() -> str:
    """Return torch's name for its own caching allocator."""
    return "native"


def _allocator(name: str, backend: ModuleType) -> Allocator:
    memory, snapshot = backend.memory, getattr(backend.memory, SNAPSHOT)
    call_later = getattr(backend, LAZY_CALL, _at_once)
    return Allocator(
        device_type=name,
        record=getattr(memory, RECORD_HISTORY),
        snapshot=snapshot,
        is_recording=getattr(BINDINGS, HISTORY_ENABLED[name], lambda: _has_entries(snapshot())),
        is_in_use=backend.is_initialized,
        when_in_use=lambda call: call() if backend.is_initialized() else call_later(call),
        current_device=backend.current_device,
        set_mark=getattr(memory, SET_MARK, None),
        mark=getattr(memory, MARK, None),
        observe=getattr(BINDINGS, OBSERVE_FAILURES[name], None),
    )


def _at_once(call: Callable[[], None]) -> None:
    call()


def _has_entries(snapshot: Snapshot) -> bool:
    """Whether a snapshot has entries, which shows on XPU that the history is on."""
    return any(snapshot.get("device_traces", ()))


@dataclass(slots=True)
class _Use:
    """The use of one device type's history: how many recorders use it, and whether it was on before them."""

    users: int = 0
    was_on: bool = False


@dataclass(slots=True)
class HistorySwitch:
    """Turns a history on for its first user and off after the last one.

    A history that was already on is left on: turning it off would clear it, and torch does not reveal the
    settings with which it was turned on, so it could not be restored.
    """

    _uses: dict[str, _Use] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def on(self, allocator: Allocator, *, max_entries: int, stacks: str = "python") -> bool:
        """Begin to use an allocator's history.

        Args:
            max_entries: the largest number of entries to keep per device; older ones are overwritten.
            stacks: "python", or "all" to include C++ frames, with which a snapshot takes minutes.

        Returns:
            Whether the history was off before; if so, it contains nothing from before this call.
        """
        with self._lock:
            use = self._uses.setdefault(allocator.device_type, _Use())
            was_on = use.users > 0 or allocator.is_recording()
            if not was_on:
                allocator.record(**_settings(allocator, max_entries, stacks))
            if not use.users:
                use.was_on = was_on
            use.users += 1
            return not was_on

    def off(self, allocator: Allocator) -> None:
        """End a use that `on` began."""
        with self._lock:
            use = self._uses[allocator.device_type]
            use.users -= 1
            if not use.users and not use.was_on:
                allocator.record(enabled=None)


def _settings(allocator: Allocator, max_entries: int, stacks: str) -> dict[str, Any]:
    """Return the arguments for `_record_memory_history` that this version of torch supports."""
    wanted = {
        "enabled": "all",
        "context": "alloc",  # a free's stack costs as much as an alloc's and is not shown
        "stacks": stacks,
        "max_entries": max_entries,
        "global_record_annotations": True,  # otherwise only those of the thread that turned it on
    }
    parameters = signature(allocator.record).parameters
    return {name: value for name, value in wanted.items() if name in parameters}


SWITCH = HistorySwitch()
"""The switch of this process: a history is per process."""


def since(snapshot: Snapshot, start_ns: int) -> Snapshot:
    """Return a snapshot without entries and annotations before a time (epoch nanoseconds).

    The blocks alive at that time are still known from the final state and the later entries.
    """
    start_us = start_ns / 1_000
    return {
        **snapshot,
        "device_traces": [
            trace[bisect_left(trace, start_us, key=_time_us) :] for trace in snapshot.get("device_traces", ())
        ],
        "external_annotations": [
            annotation
            for annotation in snapshot.get("external_annotations", ())
            if _time_us(annotation) >= start_us
        ],
    }


def reaches(snapshot: Snapshot, start_ns: int, device: int) -> bool:
    """Whether a device's entries begin before a time (epoch nanoseconds), so that no later one is lost."""
    traces = snapshot.get("device_traces", ())
    entries = traces[device] if device < len(traces) else ()
    return not entries or _time_us(entries[0]) <= start_ns / 1_000


def _time_us(entry: dict[str, Any]) -> int:
    return int(entry.get("time_us", 0))


logger = logging.getLogger("tb_memplugin")

MOST_ENTRIES = 1_000_000
"""The largest number of history entries per device in one window; there are 2.5 per allocation."""


class HistoryWindowRecorder(WindowRecorder):
    """Records windows as `WindowRecorder` does, and also the allocators' histories.

    Args:
        models, optimizers: as for `WindowRecorder`.
        guard: as for `WindowRecorder`.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        allocators: Sequence[Allocator],
        switch: HistorySwitch = SWITCH,
        *,
        finds_all: bool = True,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(models, optimizers, finds_all=finds_all, guard=guard)
        self._allocators = tuple(allocators)
        self._switch = switch
        self._using: list[tuple[Allocator, bool]] = []
        self._marks = ModuleMarks()
        self._began_ns = 0
        self._snapshots: list[tuple[str, Snapshot]] = []

    @guarded("the start of a window")
    def start(self) -> None:
        """Turn the histories on, then begin the window, so that its first event is in them."""
        self._snapshots = []
        self._end_histories()
        self._began_ns = time_ns()
        problems = [problem for allocator in self._allocators if (problem := self._begin(allocator))]
        super().start()
        if self._window is not None:
            self._window.problems += problems

    @guarded("the end of a window")
    def stop(self) -> None:
        """End the window, then take snapshots of the histories."""
        self._marks.stop()
        super().stop()
        for allocator, is_fresh in self._using:
            try:
                snapshot = allocator.snapshot()
                self._snapshots.append(
                    (allocator.device_type, snapshot if is_fresh else since(snapshot, self._began_ns))
                )
            except Exception as error:
                self._note(f"taking the history of {allocator.device_type}", error)
        self._end_histories()

    def take_snapshots(self) -> list[tuple[str, Snapshot]]:
        """Return the finished window's histories as (device type, snapshot), and forget them."""
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    def _begin(self, allocator: Allocator) -> Note | None:
        """Turn one history on. Return the reason if that was not possible."""
        if not allocator.is_in_use():
            return Note(
                f"No {allocator.device_type} device was in use when this window began, so its allocator's "
                "history was not recorded. Put the model on the device before the profiler starts.",
                "no_history",
            )
        try:
            self._using.append((allocator, self._switch.on(allocator, max_entries=MOST_ENTRIES)))
            self._marks.start(allocator, self._alive_models(), self.fail)
        except Exception as error:
            logger.debug("switching the allocator's history on failed", exc_info=error)
            return Note(
                f"The allocator's history of {allocator.device_type} could not be recorded "
                f"({type(error).__name__}: {error}).",
                "no_history",
            )
        return None

    def _end_histories(self) -> None:
        self._marks.stop()
        while self._using:
            allocator, _ = self._using.pop()
            try:
                self._switch.off(allocator)
            except Exception as error:
                self._note(f"switching the history of {allocator.device_type} off", error)

    def fail(self, where: str, error: BaseException) -> None:
        """End the window and its histories because of an error."""
        self._snapshots = []
        call_all(self._marks.stop, self._end_histories, partial(super().fail, where, error))


def window_recorder(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    allocators: Sequence[Allocator] = (),
    *,
    finds_all: bool = True,
    guard: Guard | None = None,
) -> WindowRecorder:
    """Return a recorder of windows, which also records the histories of the given allocators."""
    if not allocators:
        return WindowRecorder(models, optimizers, finds_all=finds_all, guard=guard)
    return HistoryWindowRecorder(models, optimizers, allocators, finds_all=finds_all, guard=guard)


class ModuleMarks:
    """Marks the allocations of each thread with the running module, from `start` to `stop`.

    Marks are per thread (torch: `user_metadata` is thread_local), so allocations of the autograd thread have
    none; the profile names their owner. Modules inside a compiled module are not watched.
    """

    def __init__(self) -> None:
        self._calls = ModuleCalls()
        self._before: dict[tuple[int, str], tuple[Callable[[str], None], list[str]]] = {}

    def start(
        self, allocator: Allocator, models: Mapping[str, nn.Module], failed: Failed = UNOWNED.end
    ) -> None:
        """Watch every module that runs as Python code; do nothing if marks are not supported.

        `failed` is called when setting a mark raised, which stops the watch.
        """
        if allocator.set_mark is None or allocator.mark is None:
            return
        visited: set[int] = set()
        for prefix, model in models.items():
            closed: list[str] = []
            for name, module in modules_in(model, prefix):
                if id(module) in visited or any(name.startswith(above) for above in closed):
                    continue
                visited.add(id(module))
                if is_compiled(module):
                    closed.append(f"{name}." if name else "")
                if not isinstance(module, torch.jit.ScriptModule):
                    self._watch(module, MODULE_MARK + clean_name(name), allocator, failed)

    def stop(self) -> None:
        """Stop watching and restore this thread's mark. Safe to call twice.

        Another thread that is inside a module at this moment keeps its mark: only that thread can change it.
        """
        self._calls.stop()
        for (thread, _), (set_mark, before) in self._before.items():
            if before and thread == threading.get_ident():
                set_mark(before[0])
        self._before.clear()

    def _watch(self, module: nn.Module, mark: str, allocator: Allocator, failed: Failed) -> None:
        set_mark, current = allocator.set_mark, allocator.mark
        assert set_mark is not None
        assert current is not None
        marks, kind = self._before, allocator.device_type

        def entered(*_: object) -> None:
            stack = marks.setdefault((threading.get_ident(), kind), (set_mark, []))[1]
            stack.append(current())
            set_mark(mark)

        def left(*_: object) -> None:
            stack = marks.get((threading.get_ident(), kind), (set_mark, []))[1]
            if stack:
                set_mark(stack.pop())

        self._calls.watch(module, not_compiled_alone(entered), not_compiled_alone(left), failed)
