"""The time that MemoryMonitor, MemoryTracer, `run` and a recorded window add to a training step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.on_gpu.programs import SMALL, Program, Size, clean
from tb_memplugin import MemoryMonitor, MemoryTracer, memory_trace_handler
from tb_memplugin.launch.recorder import ProgramRecorder
from tb_memplugin.launch.start import Settings

GPT_2 = Size(images=0, pixels=0, width=768, blocks=12, tokens=1024, vocabulary=50_257, batch=4)
SIZES = {"batch 4": GPT_2, "batch 32": replace(GPT_2, batch=32)}
"""A fast GPU waits for the processor with the first."""
PROGRAM = Program("transformer", "AMP", "Adam")
PAIRS, WARM_UP, STEPS, SAMPLES = 10, 2, 8, 2000

Around = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Enters a tool and returns what to call after each step."""


def table(device: str) -> Iterator[str]:
    """Yield rows with the milliseconds of a step without and with a tool, measured in turns, and the goal."""
    for name, size in SIZES.items() if device == "cuda" else {"small": SMALL}.items():
        clean(device)
        step, model, optimizer = PROGRAM.step(device, size)
        yield f"GPT-2's size (12 blocks of 768, {name} x {size.tokens}, {PROGRAM.precision}):"
        yield ""
        yield f"| what | step without, ms | step with, ms | added (95 % interval of {PAIRS} pairs) | goal |"
        yield "|---|---|---|---|---|"
        with tempfile.TemporaryDirectory() as folder:
            for what, (around, goal) in _tools(folder, model, optimizer).items():
                yield _row(what, step, around, device, goal)
            yield ""
            yield "| a window of one profiled step | ms |"
            yield "|---|---|"
            for kind, snapshot in (("plain", False), ("`snapshot=True`", True)):
                handler = memory_trace_handler(
                    folder, kind, model=model, optimizer=optimizer, snapshot=snapshot
                )
                for what, milliseconds in _window(step, handler, device).items():
                    yield f"| {what}, {kind} | {milliseconds:,.1f} |"
        yield ""
        del step, model, optimizer


def _tools(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Around, str]]:
    @contextmanager
    def monitor() -> Iterator[Callable[[], object]]:
        with MemoryMonitor(tempfile.mkdtemp(dir=folder)) as running:
            yield running.step

    @contextmanager
    def tracer() -> Iterator[Callable[[], object]]:
        with MemoryTracer(max_events=1_000_000).trace(model, optimizer):
            yield _nothing

    @contextmanager
    def program() -> Iterator[Callable[[], object]]:
        recorder = ProgramRecorder(Settings(tempfile.mkdtemp(dir=folder), "run", owner=0, steps=(FAR,)))
        recorder.begin()
        try:
            yield _nothing
        finally:
            recorder.end()

    return {
        "`MemoryMonitor`, every step": (monitor, "1 %"),
        "`MemoryTracer`, layer mode": (tracer, "5 %"),
        "`tb-memplugin run`, steps that it does not record": (program, "1 %"),
    }


FAR = range(10**6, 10**6 + 1)
"""Steps that no run here reaches."""


def _nothing() -> None:
    pass


def _row(what: str, step: Callable[[], None], around: Around, device: str, goal: str) -> str:
    """Measure pairs of blocks of steps in changing order; the interval is a bootstrap over the pairs."""
    alone, with_it = np.empty(PAIRS), np.empty(PAIRS)
    for pair in range(-1, PAIRS):  # the first is warm-up
        for ours in (True, False) if pair % 2 else (False, True):
            with around() if ours else nullcontext(_nothing) as after:
                (with_it if ours else alone)[pair] = _milliseconds(step, after, device)
    ratios, random = with_it / alone, np.random.default_rng(0)
    medians = [np.median(ratios[random.integers(PAIRS, size=PAIRS)]) for _ in range(SAMPLES)]
    low, added, high = (100 * (ratio - 1) for ratio in np.percentile(medians, (2.5, 50, 97.5)))
    times = f"{np.median(alone):.2f} | {np.median(with_it):.2f}"
    return f"| {what} | {times} | {added:+.1f} % ({low:+.1f} to {high:+.1f}) | {goal} |"


def _milliseconds(step: Callable[[], None], after: Callable[[], object], device: str) -> float:
    """Return the milliseconds of a step in a block whose steps do not wait for the GPU."""
    for _ in range(WARM_UP):
        step()
        after()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
        after()
    _wait(device)
    return (time.perf_counter() - begin) * 1e3 / STEPS


def _window(step: Callable[[], None], handler: Callable[[Any], None], device: str) -> dict[str, float]:
    """Return the milliseconds of a window's parts: its start (the start state), step, end and handler."""
    took: list[float] = []

    def timed(prof: Any) -> None:
        begin = time.perf_counter()
        handler(prof)
        took.append((time.perf_counter() - begin) * 1e3)

    marks = [time.perf_counter()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, on_trace_ready=timed):
        marks.append(time.perf_counter())
        step()
        _wait(device)
        marks.append(time.perf_counter())
    whole = [(b - a) * 1e3 for a, b in zip(marks, [*marks[1:], time.perf_counter()], strict=True)]
    return {
        "profiler's start and ours": whole[0],
        "the step": whole[1],
        "profiler's stop and ours": whole[2] - sum(took),
        "the handler": sum(took),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
