"""The cost of the handler in the training loop, outside and inside profiled steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.figures import Figure
from benchmarks.training import make, step
from benchmarks.workloads import PROGRAMS, Program, Running
from tb_memplugin import memory_trace_handler
from tb_memplugin.trace.tables import Int64

ROUNDS, STEPS = 7, 30
PAIRS, SAMPLES = 30, 2000
OUTSIDE = {"MLP, 1 step": 40, "DQN, 3 steps": 15, "transformer of 6 blocks, 10 steps": 5}
"""Programs whose steps outside windows are measured, and the steps of a block: a tenth of a second or so."""


def measure() -> list[Figure]:
    """Measure steps with and without our handler; the profiler is on in both.

    Outside windows torch runs on one thread: threads that wait for each other would hide small costs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [_outside(program) for program in PROGRAMS if program.name in OUTSIDE]
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        return [*figures, _recorded(Path(folder))]


def _outside(program: Program) -> Figure:
    """Measure pairs of blocks of steps of the same program, with and without a handler, in changing order.

    The interval is a bootstrap over the pairs, so what a machine does to both blocks of a pair cancels.
    """
    running, steps = program.start(), OUTSIDE[program.name]
    with_us, without = np.empty((PAIRS, steps)), np.empty((PAIRS, steps))
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(-1, PAIRS):  # the first is warm-up
            for ours in (True, False) if pair % 2 else (False, True):
                times = _block(running, steps, Path(folder) if ours else None)
                (with_us if ours else without)[pair] = times
    random = np.random.default_rng(0)
    samples = [_ratio(with_us, without, random.integers(PAIRS, size=PAIRS)) for _ in range(SAMPLES)]
    low, high = np.percentile(samples, (2.5, 97.5))
    return Figure(
        f"step outside windows: {program.name.split(',')[0]}",
        "ms",
        np.median(with_us, axis=1).tolist(),
        1.0,
        np.median(without, axis=1).tolist(),
        "the profiler alone",
        interval=(float(low), float(high)),
    )


def _ratio(with_us: np.ndarray, without: np.ndarray, pairs: Int64) -> float:
    return float(np.median(with_us[pairs]) / np.median(without[pairs]))


def _block(running: Running, steps: int, folder: Path | None) -> list[float]:
    """Return the milliseconds of steps while the profiler waits, with a handler if there is a folder."""
    handler: Callable[[profile], None] = _nothing
    if folder is not None:
        handler = memory_trace_handler(folder, "w", model=running.model, optimizer=running.optimizer)
    waiting = schedule(wait=steps + 2, warmup=1, active=1, repeat=1)
    times = []
    with profile(
        activities=[ProfilerActivity.CPU], schedule=waiting, profile_memory=True, on_trace_ready=handler
    ) as prof:
        for _ in range(steps):
            begin = time.perf_counter()
            running.step()
            prof.step()
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def _recorded(folder: Path) -> Figure:
    with_us: list[float] = []
    without: list[float] = []
    for number in range(ROUNDS + 1):
        for times, ours in (
            ((with_us, True), (without, False)) if number % 2 else ((without, False), (with_us, True))
        ):
            times.append(_median_step(folder, ours=ours))
    return Figure(
        "step while the profiler records", "ms", with_us[1:], None, without[1:], "the profiler alone"
    )


def _median_step(folder: Path, *, ours: bool) -> float:
    model, optimizer = make()
    handler: Callable[[profile], None] = (
        memory_trace_handler(folder, "w", model=model, optimizer=optimizer) if ours else _nothing
    )
    times = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS + 2, repeat=1),
        profile_memory=True,
        on_trace_ready=handler,
    ) as prof:
        for _ in range(STEPS):
            begin = time.perf_counter()
            step(model, optimizer)
            times.append((time.perf_counter() - begin) * 1e3)
            prof.step()
    return sorted(times)[len(times) // 2]


def _nothing(_: profile) -> None:
    """A handler that does nothing."""
