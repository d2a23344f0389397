"""Record a whole program: its models, chosen steps in full, and figures of all steps of its optimizers."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import util
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerAction

from tb_memplugin.callbacks.recorder import StepRecorder, Training
from tb_memplugin.launch.start import Settings
from tb_memplugin.record.arguments import referents
from tb_memplugin.record.guard import Failed, Guard, call_all, guarded
from tb_memplugin.record.history.allocators import allocators
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.monitor import MemoryMonitor
from tb_memplugin.record.oom import OomRecorder, record_on_oom
from tb_memplugin.record.optimizer_hooks import StepHooks
from tb_memplugin.record.storages_alive import instances_of
from tb_memplugin.record.torch_private.modules import (
    children_of,
    is_any_constructed,
    items_of,
    modules_in,
    parameters_of,
)

FIRST_STEPS = range(2, 5)
"""The steps of an optimizer to record: it has its state by then, and three show what grows."""

FIRST_CALLS = range(2)
"""The calls of a model to record in a program that trains nothing: there may be only one."""

MORE_STEPS = 2
"""How many steps one SIGUSR1 records."""

MOST_STEPS_OF_OTHERS = 100
"""After so many steps of another optimizer, and none of the one that counts steps, that one counts."""

FIGURES_OVERHEAD = 0.005
"""The share of the time that figures of the steps may take."""

_STEP = "an optimizer's step"
_FIGURES = "the start of the figures of all steps"
_LOST = "The memory of this program is not recorded"


class ProgramRecorder:
    """Records a program until it ends. A step ends when the first optimizer that stepped has stepped.

    What happens between two steps counts to the later one. Step 0 ends with the first step of the optimizer,
    so it has no figures. Recorded in full, it begins when the first module with parameters is called.

    If that module is called while the program has no optimizer, each such call is a step, until the last step
    to record in full has ended, or until an optimizer steps.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = Guard(_LOST)
        self._steps = _WantedSteps(settings.steps)
        self._log_level = None if os.environ.get("TB_MEMPLUGIN_LOG_LEVEL") else "WARNING"
        self._recorder = StepRecorder(
            self._steps,
            folder=settings.folder,
            with_stack=settings.stacks,
            record_shapes=settings.shapes,
            snapshot=settings.snapshot,
            log_level=self._log_level,
            log_to=settings.log_to,
        )
        self._wants_figures = settings.every_step
        self._monitor: MemoryMonitor | None = None
        self._oom: OomRecorder | None = None
        self._stepping: weakref.WeakKeyDictionary[torch.optim.Optimizer, None] = weakref.WeakKeyDictionary()
        self._counting: weakref.ref[torch.optim.Optimizer] | None = None
        self._steps_of_others = 0
        self._calls = OutermostCalls(self._called, self._returned)
        self._has_begun = False
        self._step = self._first = 0
        self._hooks: StepHooks | None = None
        self._at_exit: util.Finalize | None = None
        self._forks_safely = False

    @guarded("the start of the program")
    def begin(self) -> None:
        """Begin to wait for the first step. May be called on any thread."""
        self._hooks = StepHooks(None, self._stepped, lambda _, error: self.fail(_STEP, error))
        self._calls.start(self.fail)
        if allocators():
            self._oom = record_on_oom(self._settings.folder)
            self._oom.program = lambda: (self._models_now(), self._optimizers())
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._asked)
        # Unlike atexit, this runs at the end of multiprocessing's processes, too.
        self._at_exit = util.Finalize(None, self.end, exitpriority=0)

    @guarded("the end of the program")
    def end(self) -> int:
        """Write what is open and stop. Return how many steps were counted. Safe to call twice."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            monitor, oom = self._monitor, self._oom
            closing = [each.close for each in (monitor, oom) if each is not None]
            call_all(hooks.remove, self._calls.stop, self._recorder.end_training, *closing, self._forget)
        return self._step

    def _forget(self) -> None:
        """Take back what the process would call of this recorder."""
        if self._at_exit is not None:
            self._at_exit.cancel()
        is_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGUSR1")
        if is_main and signal.getsignal(signal.SIGUSR1) == self._asked:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def fail(self, where: str, error: BaseException) -> None:
        """Log an error. At the start or the end it stops all, else it costs a step or the figures."""
        if where == _STEP:
            self._recorder.fail(where, error)  # else the open window would have two steps in one
        elif where == _FIGURES:
            self._guard.end(where, error, loss="The figures of all steps are not recorded")
        else:
            self._guard.end(where, error, self.end)

    @guarded(_STEP)
    def _called(self) -> None:
        """Before a module's call: a step of a program that trains nothing begins, or step 0 of another."""
        trains = is_any_constructed()
        if trains:
            self._calls.stop()
        if self._step and trains:  # only now: what was recorded is of before
            self._recorder.end_training(raised=True)
            return
        if self._step == 0:
            self._steps.count_calls(not trains)
            self._has_begun = trains and self._steps.wants(0)
            if self._has_begun or not trains:
                self._recorder.begin_training(Training(self._folder, self._models, self._optimizers), 0)
        self._recorder.begin_step(self._step)

    @guarded(_STEP)
    def _returned(self) -> None:
        """After a module's call in a program without an optimizer: end a step."""
        self._step += 1
        self._recorder.end_step()
        if not self._steps.wants_any_from(self._step):
            self._calls.stop()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End a step if this optimizer counts them. `StepHooks` guards it."""
        counting = None if self._counting is None else self._counting()
        if counting is not optimizer:
            self._stepping[optimizer] = None
            self._steps_of_others += 1
            if counting is not None and self._steps_of_others < MOST_STEPS_OF_OTHERS:
                return
            self._count(optimizer)
        self._steps_of_others = 0
        ended, self._step = self._step, self._step + 1
        if self._monitor is not None:
            self._monitor.step(ended)
        elif self._wants_figures:
            self._wants_figures = False
            self._begin_figures()
        self._recorder.next_step(self._step)

    @guarded(_FIGURES)
    def _begin_figures(self) -> None:
        """Begin to record the figures of all steps."""
        self._monitor = MemoryMonitor(
            self._settings.folder,
            log_level=self._log_level,
            log_to=self._settings.log_to,
            max_overhead=FIGURES_OVERHEAD,
        )

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        """Count steps by this optimizer from now on."""
        self._calls.stop()
        self._steps.count_calls(False)
        if not self._has_begun:
            self._first = self._step
            self._recorder.begin_training(Training(self._folder, self._models, self._optimizers), self._step)
        self._has_begun = False
        self._counting = weakref.ref(optimizer)

    def _folder(self) -> str:
        return self._settings.folder

    def _models(self) -> Mapping[str, nn.Module]:
        """Return the models. It is called when the first window opens."""
        if hasattr(os, "register_at_fork") and not self._forks_safely:
            self._forks_safely = True
            os.register_at_fork(after_in_child=_end_without_destructors)
        return self._models_now()

    def _models_now(self) -> Mapping[str, nn.Module]:
        return models_of(self._stepping) if self._stepping else models_alive()

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return tuple(self._stepping)  # some may not step in the windows

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        """Record the next steps in full, because a signal asks for it."""
        self._steps.more(self._step - self._first + 1, MORE_STEPS)
        if self._steps.of_calls:
            self._calls.start(self.fail)


class _WantedSteps:
    """The steps to record in full, to which a signal may add some. It is called as a profiler's schedule.

    Steps are counted from the first of the optimizer that counts them.

    Args:
        steps: their numbers, None for the default, which depends on what a step is.
    """

    def __init__(self, steps: tuple[range, ...] | None) -> None:
        self._is_default = steps is None
        self._ranges = list(steps or ())
        self.count_calls(False)

    def count_calls(self, of_calls: bool) -> None:
        """Say whether a step is a call of a model, or one of an optimizer."""
        self.of_calls = of_calls
        if self._is_default:
            self._ranges = [FIRST_CALLS if of_calls else FIRST_STEPS]

    def wants(self, step: int) -> bool:
        return self(step) is ProfilerAction.RECORD

    def wants_any_from(self, step: int) -> bool:
        return any(step < steps.stop for steps in self._ranges)

    def more(self, first: int, count: int) -> None:
        self._ranges.append(range(first, first + count))

    def __call__(self, step: int) -> ProfilerAction:
        for steps in self._ranges:  # without a generator: every step calls this
            if step in steps:
                return ProfilerAction.RECORD
        return ProfilerAction.NONE


def _end_without_destructors() -> None:
    """Let a forked process end, when its Python has ended, without the destructors of C++.

    The profiler of torch has a thread in the parent. Its destructor waits for it in the child, too, which has
    no such thread: after a window, forks that end by `sys.exit` hang or abort. Only glibc can call `_exit`
    with the status of the process; what C has not written yet is written before.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc["_exit"], None)
        libc["__cxa_atexit"](libc.fflush, None, None)


def models_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, nn.Module]:
    """Return the outermost modules that hold parameters of optimizers, by name.

    A single module has the name "", several have those of their classes; of several of one class, each has
    that of its global variable in the main program, if it has one. It is one pass over the program's objects,
    and no object is changed.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    return _by_name([module for module in _outermost() if not trained.isdisjoint(_parameters(module))])


def models_alive() -> dict[str, nn.Module]:
    """Return the outermost modules with parameters of the whole program, named as by `models_of`."""
    return _by_name([module for module in _outermost() if _has_parameters(module)])


def _outermost() -> list[nn.Module]:
    """Return the modules of the program that are in no other module."""
    modules: list[nn.Module] = instances_of(nn.Module)
    inner = {id(child) for module in modules for child in children_of(module).values()}
    return [module for module in modules if id(module) not in inner]


def _by_name(outermost: Sequence[nn.Module]) -> dict[str, nn.Module]:
    if len(outermost) == 1:
        return {"": outermost[0]}
    classes = Counter(type(module).__name__ for module in outermost)
    program = reversed([*vars(sys.modules["__main__"]).items()])  # of several names, the first
    variables = {id(value): name for name, value in program if type(name) is str}
    models: dict[str, nn.Module] = {}
    for module in outermost:
        name = type(module).__name__
        if classes[name] > 1:
            name = variables.get(id(module), name)
        models[name if name not in models else f"{name}_{len(models)}"] = module
    return models


def _parameters(module: nn.Module) -> Iterator[int]:
    """Yield the ids of all parameters in a module and the modules in it. No method of theirs is called."""
    for _, inner in modules_in(module):
        for _, parameter in items_of(parameters_of(inner)):
            if parameter is not None:
                yield id(parameter)


def _has_parameters(module: nn.Module) -> bool:
    return next(_parameters(module), None) is not None


class OutermostCalls:
    """Tells the calls of modules with parameters that are within no other module's call.

    They are the steps of a program that trains nothing.

    Only those of the thread that makes the first one are told. A call is also told of to functions that begin
    to watch modules as it begins.

    Args:
        begins: is called before each call.
        ends: is called after it, also when it raised.
    """

    def __init__(self, begins: Callable[[], object], ends: Callable[[], object]) -> None:
        self._begins, self._ends = begins, ends
        self._calls = ModuleCalls()
        self._outermost: dict[int, weakref.ref[nn.Module]] = {}
        self._thread: int | None = None
        self._depth = 0

    def start(self, failed: Failed) -> None:
        """Begin to tell. `failed` is called if telling raises, which stops it.

        After `stop`, only calls of modules that were outermost before are told: it may be within such a call.
        """
        self._depth = 0
        modules = referents(self._outermost.values())
        for module in modules:
            self._calls.watch(module, self._entered, self._left, failed)
        if not modules:
            self._calls.watch_all(self._entered, self._left, failed)

    def stop(self) -> None:
        """Stop telling. Safe to call within the functions that are told, and twice."""
        self._calls.stop()

    def _entered(self, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            return
        if not self._depth:
            if not _has_parameters(module):
                return
            self._thread, self._depth = thread, 1
            self._outermost[id(module)] = weakref.ref(module)
            self._begins()
        else:
            self._depth += 1

    def _left(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if self._depth and self._thread == threading.get_ident():
            self._depth -= 1
            if not self._depth:
                self._ends()
