"""The cost of `LineTracer` per training step on the CPU, compared with `MemTracker` and `tracemalloc`.

`tracemalloc`, the only tool in the standard library that reports memory by line, keeps a stack of 25 frames
for each Python object, but not for tensors.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.figures import Figure
from benchmarks.training import make, step
from tb_memplugin import LineTracer, MemoryTracer

ROUNDS, STEPS, FRAMES = 5, 6, 25

Watching = Callable[[torch.nn.Module, torch.optim.Optimizer], AbstractContextManager[Callable[[], None]]]


class Operators(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and call one operator."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure() -> list[Figure]:
    """Measure the CPU time added per step and per operator, on one thread, each with its own model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _figures()
    finally:
        torch.set_num_threads(threads)


def _figures() -> list[Figure]:
    kinds: list[Watching] = [_lines, _layers, _tracked, _tracemalloc]
    operators = _operators()
    bare: list[float] = []
    added: list[list[float]] = [[] for _ in kinds]
    for _ in range(ROUNDS + 1):
        bare.append(_step(_bare))
        for row, kind in zip(added, kinds, strict=True):
            row.append(_step(kind) - bare[-1])
    lines, layers, tracked, python = (row[1:] for row in added)
    what = f"lines on the CPU, added to a step of {operators:,} operators"
    each = [1e3 * one / operators for one in lines]
    return [
        Figure(what, "ms", lines, 1 / 3, tracked, "MemTracker (no lines)"),
        Figure(what, "ms", lines, None, layers, "MemoryTracer (no lines)"),
        Figure(what, "ms", lines, None, python, "tracemalloc (Python's objects)"),
        Figure(what, "ms", lines, None, bare[1:], "the step without it"),
        Figure("lines on the CPU, an operator", "µs", each, None, _each(layers, operators), "MemoryTracer"),
    ]


def _each(added: list[float], operators: int) -> list[float]:
    return [1e3 * one / operators for one in added]


def _operators() -> int:
    model, optimizer = make()
    with Operators() as seen:
        step(model, optimizer)
    counted: int = seen.count
    return counted


def _step(watching: Watching) -> float:
    model, optimizer = make()
    times = []
    with watching(model, optimizer) as before_step:
        for _ in range(STEPS):
            begin = time.process_time()
            before_step()
            step(model, optimizer)
            times.append((time.process_time() - begin) * 1e3)
    return median(times)


def _nothing() -> None:
    pass


@contextmanager
def _bare(*_: object) -> Iterator[Callable[[], None]]:
    yield _nothing


@contextmanager
def _lines(*_: object) -> Iterator[Callable[[], None]]:
    with LineTracer():
        yield _nothing


@contextmanager
def _layers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    with MemoryTracer().trace(model, optimizer):
        yield _nothing


@contextmanager
def _tracked(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        yield tracker.reset_mod_stats


@contextmanager
def _tracemalloc(*_: object) -> Iterator[Callable[[], None]]:
    tracemalloc.start(FRAMES)
    try:
        yield _nothing
    finally:
        tracemalloc.stop()
