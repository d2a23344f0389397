"""The time that MemoryMonitor, MemoryTracer, `run` and a recorded window add to a training step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.on_gpu.programs import SMALL, Program, Size, clean
from tb_memplugin import MemoryMonitor, MemoryTracer, memory_trace_handler
from tb_memplugin.launch.recorder import ProgramRecorder
from tb_memplugin.launch.settings import Settings

GPT_2 = Size(images=0, pixels=0, width=768, blocks=12, tokens=1024, vocabulary=50_257, batch=4)
PROGRAM = Program("transformer", "AMP", "Adam")
ROUNDS, STEPS = 5, 20


def table(device: str) -> Iterator[str]:
    """Yield rows with the milliseconds of a step without and with a tool, measured in turns, and the goal."""
    clean(device)
    size = GPT_2 if device == "cuda" else SMALL
    step, model, optimizer = PROGRAM.step(device, size)
    for _ in range(3):
        step()
    yield f"GPT-2's size (12 blocks of 768, batch {size.batch} x {size.tokens}, {PROGRAM.precision}):"
    yield ""
    yield "| what | step without, ms | step with, ms | added | goal |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        with MemoryMonitor(folder, "rank0") as monitor:
            watched = _monitored(step, monitor)
            yield _row("`MemoryMonitor`, every step", step, watched, nullcontext, device, "1 %")
        layers = lambda: MemoryTracer(max_events=1_000_000).trace(model, optimizer)  # noqa: E731
        yield _row("`MemoryTracer`, layer mode", step, step, layers, device, "5 %")
        yield _row(
            "`tb-memplugin run`, steps that it does not record", step, step, _run(folder), device, "1 %"
        )
        yield ""
        yield "| a window of one profiled step | ms |"
        yield "|---|---|"
        for name, snapshot in (("plain", False), ("`snapshot=True`", True)):
            handler = memory_trace_handler(folder, name, model=model, optimizer=optimizer, snapshot=snapshot)
            for what, milliseconds in _window(step, handler, device).items():
                yield f"| {what}, {name} | {milliseconds:,.1f} |"


def _run(folder: str) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def recording() -> Iterator[None]:
        recorder = ProgramRecorder(Settings(folder, "run", owner=0, steps=()))
        recorder.begin()
        try:
            yield
        finally:
            recorder.end()

    return recording


def _monitored(step: Callable[[], None], monitor: MemoryMonitor) -> Callable[[], None]:
    def watched() -> None:
        step()
        monitor.step()

    return watched


def _row(
    what: str,
    bare: Callable[[], None],
    watched: Callable[[], None],
    around: Callable[[], AbstractContextManager[Any]],
    device: str,
    goal: str,
) -> str:
    without, with_it = [], []
    for _ in range(ROUNDS):
        without.append(_milliseconds(bare, device))
        with around():
            with_it.append(_milliseconds(watched, device))
    added = 100 * median(b / a - 1 for a, b in zip(without, with_it, strict=True))
    return f"| {what} | {median(without):.2f} | {median(with_it):.2f} | {added:+.2f} % | {goal} |"


def _milliseconds(step: Callable[[], None], device: str) -> float:
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        _wait(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return median(times)


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
