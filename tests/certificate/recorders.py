"""Our recorders, as a user puts each around some steps; what is promised of each, compared with what.

A base is the same program without a recorder of ours: alone, or in a plain torch profile, as the recorder
itself is used in one.
"""

from __future__ import annotations

import gc
import io
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import (
    IterationReport,
    LineTracer,
    MemoryMonitor,
    MemoryTracer,
    memory_trace_handler,
    record_on_oom,
)
from tb_memplugin.errors import MemPluginError
from tb_memplugin.launch.recorder import ProgramRecorder
from tb_memplugin.launch.start import Settings

Models = Mapping[str, nn.Module]
Optimizers = list[torch.optim.Optimizer]

EVERYTHING = frozenset(
    {
        "operators",  # the operators, in order, by thread
        "allocations",  # sizes of allocations and frees on the CPU, in order, by thread
        "gpu",  # all counters of the GPU's allocator: numbers and bytes of blocks and segments, and peaks
        "bits",  # losses, weights, gradients, optimizer states and random states
        "objects",  # models, optimizers and what the program created meanwhile, afterwards
        "meanwhile",  # the models' own dictionaries in the window
        "process",  # torch's functions, classes, tables; threads, callbacks, hooks of Python; what is alive
        "dynamo",  # graphs, breaks and compiled frames
        "output",  # errors, warnings and what the program printed
    }
)
UNDER_A_MODE = EVERYTHING - {"operators", "allocations", "gpu", "dynamo"}
"""Under a dispatch mode torch itself runs other operators in places, and no compiled code: docs/tracer.md."""


@dataclass
class Window:
    """A recorded window of a program, open."""

    profile: profile | None = None
    step: Callable[[], object] = lambda: None
    refused: str = ""


Open = Callable[[ExitStack, Models, Optimizers], Window]


@dataclass(frozen=True)
class Recorder:
    """One way to record.

    Attributes:
        name: as in the table.
        open: enters what records into the stack, and returns the window.
        base: the name of the recorder to compare with; "" for a base.
        promised: what must be the same as with the base, of `EVERYTHING`.
        profiled: whether the window is in a torch profile.
        stacks: whether that profile records stacks.
        in_trainers: whether it is a callback: it runs in the programs that have a Trainer.
    """

    name: str
    open: Open
    base: str = ""
    promised: frozenset[str] = field(default=EVERYTHING)
    profiled: bool = False
    stacks: bool = False
    in_trainers: bool = False


def _alone(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
    return Window()


def _profiled(with_stack: bool = False, handler: Callable[[Models, Optimizers], Any] | None = None) -> Open:
    def enter(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
        ready = handler(models, optimizers) if handler else None
        running = profile(
            activities=[ProfilerActivity.CPU],  # what runs on a GPU has no order
            profile_memory=True,
            with_stack=with_stack,
            on_trace_ready=ready,
        )
        return Window(profile=stack.enter_context(running))

    return enter


def _handler_with_model(models: Models, optimizers: Optimizers) -> Any:
    return memory_trace_handler("runs", "w", model=models, optimizer=optimizers)


def _handler_alone(models: Models, optimizers: Optimizers) -> Any:
    return memory_trace_handler("runs", "w")


def _tracer(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
    tracing = MemoryTracer().trace(next(iter(models.values())), optimizers)
    try:
        stack.enter_context(tracing)
    except MemPluginError as error:
        return Window(refused=error.what)
    return Window()


def _lines(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
    stack.enter_context(LineTracer())
    return Window()


def _iterations(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
    console = Console(file=io.StringIO())
    report = IterationReport(next(iter(models.values())), optimizer=optimizers, console=console)
    return Window(step=stack.enter_context(report).record_stats)


def _monitor(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
    return Window(step=stack.enter_context(MemoryMonitor("runs")).step)


def _program(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
    recorder = ProgramRecorder(Settings("runs", "program", owner=0, steps=()))
    recorder.begin()
    stack.callback(recorder.end)
    return Window()


def _oom(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
    stack.enter_context(record_on_oom("runs"))
    return Window()


_RECORDERS = (
    Recorder("alone", _alone),
    Recorder("profile", _profiled(), profiled=True),
    Recorder("profile with stacks", _profiled(with_stack=True), profiled=True),
    Recorder("handler", _profiled(handler=_handler_with_model), "profile", profiled=True),
    Recorder("handler without model", _profiled(handler=_handler_alone), "profile", profiled=True),
    Recorder(
        "handler with stacks",
        _profiled(True, _handler_with_model),
        "profile with stacks",
        profiled=True,
        stacks=True,
    ),
    Recorder("MemoryTracer", _tracer, "alone", UNDER_A_MODE),
    Recorder("LineTracer", _lines, "alone", UNDER_A_MODE),
    Recorder("IterationReport", _iterations, "alone", UNDER_A_MODE),
    Recorder("MemoryMonitor", _monitor, "alone"),
    Recorder("record_on_oom", _oom, "alone"),
    Recorder("run, outside its steps", _program, "alone"),
    Recorder("callback", _alone, "alone", in_trainers=True),
)


@contextmanager
def our_messages() -> Iterator[list[str]]:
    """Collect what tb_memplugin logs in the block, instead of printing it."""
    messages: list[str] = []
    logger, handler = logging.getLogger("tb_memplugin"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _intrusive(intrude: Callable[[ExitStack, nn.Module], object]) -> Open:
    def enter(stack: ExitStack, models: Models, optimizers: Optimizers) -> Window:
        intrude(stack, next(iter(models.values())))
        return Window()

    return enter


def _sleeps(stack: ExitStack, model: nn.Module) -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def _patches(stack: ExitStack, model: nn.Module) -> None:
    nn.Module.train = partialmethod(nn.Module.train)  # type: ignore[assignment]


def _touches(stack: ExitStack, model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)


_KEPT: list[torch.Tensor] = []

NOTHING = "nothing"
"""The recorder that does nothing: it shows whether a program is the same twice."""

INTRUSIVE: dict[str, Callable[[ExitStack, nn.Module], object]] = {
    NOTHING: lambda stack, model: None,
    "adds a hook to a module": lambda stack, model: model.register_forward_hook(print),
    "allocates a tensor": lambda stack, model: torch.empty(1024),
    "keeps a tensor alive": lambda stack, model: _KEPT.append(torch.empty(1024)),
    "leaves a thread": _sleeps,
    "leaves a gc callback": lambda stack, model: gc.callbacks.append(lambda phase, counts: None),
    "patches torch": _patches,
    "fills a table of torch": lambda stack, model: nn.modules.module.register_module_forward_hook(_ignore),
    "moves the random state": lambda stack, model: torch.manual_seed(1),
    "warns": lambda stack, model: warnings.warn("a recorder warns", stacklevel=1),
    "touches a gradient": _touches,
    "fails": lambda stack, model: 1 // 0,
}
"""Recorders that do what none of ours may: to test the harness."""


def _ignore(*_: object) -> None:
    pass


RECORDERS = {recorder.name: recorder for recorder in _RECORDERS}
"""Those of the certificate, bases included."""

ALL_RECORDERS = RECORDERS | {
    name: Recorder(name, _intrusive(intrude), "alone") for name, intrude in INTRUSIVE.items()
}
