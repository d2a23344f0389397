"""The cost of `MemoryTracer`: on the CPU compared with torch's `MemTracker`, and on CUDA."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks import layer_cost
from benchmarks.figures import Figure
from benchmarks.training import make, step
from tb_memplugin import MemoryTracer

ROUNDS, STEPS = 5, 4


def measure() -> list[Figure]:
    """Measure the CPU time that each adds to a plain step; each has its own model.

    torch runs on one thread: the tracers do too, and the time of threads that wait for each other would hide
    theirs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        on_cuda = layer_cost.measure() if torch.cuda.is_available() else []
        return [*_figures(), *on_cuda]
    finally:
        torch.set_num_threads(threads)


def _figures() -> list[Figure]:
    ours: list[float] = []
    theirs: list[float] = []
    plain: list[float] = []
    for _ in range(ROUNDS + 1):
        bare, traced, tracked = _bare(), _traced(), _tracked()
        plain.append(bare)
        ours.append(traced - bare)
        theirs.append(tracked - bare)
    return [
        Figure(
            "MemoryTracer on the CPU, added to a step",
            "ms",
            ours[1:],
            1 / 3,
            theirs[1:],
            "MemTracker, added to a step",
        ),
        Figure(
            "MemoryTracer on the CPU, added to a step", "ms", ours[1:], None, plain[1:], "the step without it"
        ),
    ]


def _steps(model: nn.Module, optimizer: object) -> float:
    times = []
    for _ in range(STEPS):
        begin = time.process_time()
        step(model, optimizer)  # type: ignore[arg-type]
        times.append((time.process_time() - begin) * 1e3)
    return median(times)


def _bare() -> float:
    return _steps(*make())


def _traced() -> float:
    model, optimizer = make()
    with MemoryTracer().trace(model, optimizer):
        return _steps(model, optimizer)


def _tracked() -> float:
    model, optimizer = make()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    times = []
    with tracker:
        for _ in range(STEPS):
            begin = time.process_time()
            tracker.reset_mod_stats()
            step(model, optimizer)
            times.append((time.process_time() - begin) * 1e3)
    return median(times)
