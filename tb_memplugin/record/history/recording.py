"""Record windows with the allocators' own history, and restore its earlier state.

Allocations in it are marked with module names.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import time_ns

import torch
from torch import nn

from tb_memplugin.record.beside_compiler import not_compiled_alone
from tb_memplugin.record.guard import UNOWNED, Failed, Guard, call_all, guarded
from tb_memplugin.record.history.allocators import SWITCH, Allocator, HistorySwitch, Snapshot, since
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.modules import clean_name, is_compiled
from tb_memplugin.record.profiler.window import WindowRecorder
from tb_memplugin.record.torch_private.modules import modules_in
from tb_memplugin.trace import Note
from tb_memplugin.trace.tables import MODULE_MARK

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
