"""The handler's time on programs of many kinds and sizes, compared with `tensorboard_trace_handler`.

Beside it, what a window's start and stop cost, and the thread that flushes its files, which
`tensorboard_trace_handler` has nothing like. All are CPU times of one thread: on a busy machine, a call of
many milliseconds is interrupted, and a call of one is not. Waiting for the disk is not in them.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from benchmarks.figures import Figure
from benchmarks.workloads import PROGRAMS, Program
from tb_memplugin import memory_trace_handler
from tb_memplugin.record.profiler.window import WindowRecorder
from tb_memplugin.store.disk_sync import DiskSync

ROUNDS = 9
WORST = 1.5
GOALS = ((False, 1.25), (True, 1.0))
"""Whether shapes are recorded, and the goal of the median ratio."""


def measure() -> list[Figure]:
    """Measure each program with and without shapes: handler, start and stop; the median and worst ratio.

    torch runs on one thread, as the handlers do.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _figures()
    finally:
        torch.set_num_threads(threads)


def _figures() -> list[Figure]:
    figures: list[Figure] = []
    for shapes, goal in GOALS:
        title = "handler, record_shapes" if shapes else "handler"
        handlers, edges = zip(*(_of(program, title, shapes=shapes) for program in PROGRAMS), strict=True)
        ratios = [figure.ratio for figure in handlers]
        figures += [
            *handlers,
            Figure(f"{title}: median ratio of {len(ratios)} programs", "", [median(ratios)], goal),
            Figure(f"{title}: worst ratio", "", [max(ratios)], WORST),
            *(edge for pair in edges if not shapes for edge in pair),
        ]
    return figures


def _of(program: Program, title: str, *, shapes: bool) -> tuple[Figure, tuple[Figure, ...]]:
    """Return the figures of one program: the handler's, and those of a window's start and stop and flush."""
    gc.collect()
    torch.manual_seed(0)
    running = program.start()
    ours: list[float] = []
    theirs: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        _timed(WindowRecorder, "start") as starts,
        _timed(WindowRecorder, "stop") as stops,
        _timed(DiskSync, "_run") as flushes,
    ):
        memory = memory_trace_handler(
            Path(folder, "memory"), "w", model=running.model, optimizer=running.optimizer
        )
        kineto = tensorboard_trace_handler(str(Path(folder, "kineto")))

        def ready(prof: profile) -> None:
            turns: list[tuple[list[float], Callable[[profile], None]]] = [(ours, memory), (theirs, kineto)]
            for times, handler in turns if len(ours) % 2 else reversed(turns):
                begin = time.thread_time()
                handler(prof)
                times.append((time.thread_time() - begin) * 1e3)

        for _ in range(ROUNDS + 1):
            _run(running.step, program.steps, ready, record_shapes=shapes)
    peer = "tensorboard_trace_handler"
    return Figure(f"{title}: {program.name}", "ms", ours[1:], WORST, theirs[1:], peer), (
        Figure(f"start of a window: {program.name}", "ms", starts[1:]),
        Figure(f"end of a window: {program.name}", "ms", stops[1:]),
        Figure(f"thread that flushes a window: {program.name}", "ms", flushes[1:]),
    )


def _run(step: Callable[[], None], steps: int, ready: Callable[[profile], None], **options: Any) -> None:
    """Run a program under the profiler: one step of warm-up, then the recorded ones."""
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        profile_memory=True,
        on_trace_ready=ready,
        **options,
    ) as prof:
        for _ in range(steps + 1):
            step()
            prof.step()


@contextmanager
def _timed(kind: type, name: str) -> Iterator[list[float]]:
    """Yield the CPU milliseconds of each call of a method, on the thread that calls it."""
    milliseconds: list[float] = []
    method = getattr(kind, name)

    def timed(self: object) -> None:
        begin = time.thread_time()
        method(self)
        milliseconds.append((time.thread_time() - begin) * 1e3)

    with patch.object(kind, name, timed):
        yield milliseconds
