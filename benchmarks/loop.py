"""The cost of the handler in the training loop, outside and inside profiled steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.figures import Figure
from benchmarks.training import make, step
from tb_memplugin import memory_trace_handler

ROUNDS, STEPS = 7, 30


def measure() -> list[Figure]:
    """Measure steps with and without our handler; the profiler is on in both."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            _figure("step outside profiled steps", folder, 1.02, active=False),
            _figure("step while the profiler records", folder, None, active=True),
        ]


def _figure(what: str, folder: str, goal: float | None, *, active: bool) -> Figure:
    with_us: list[float] = []
    without: list[float] = []
    for number in range(ROUNDS + 1):
        for times, ours in (
            ((with_us, True), (without, False)) if number % 2 else ((without, False), (with_us, True))
        ):
            times.append(_median_step(Path(folder), ours=ours, active=active))
    return Figure(what, "ms", with_us[1:], goal, without[1:], "the profiler alone")


def _median_step(folder: Path, *, ours: bool, active: bool) -> float:
    model, optimizer = make()
    handler: Callable[[profile], None] = (
        memory_trace_handler(folder, "w", model=model, optimizer=optimizer) if ours else _nothing
    )
    waiting = schedule(wait=0 if active else STEPS + 1, warmup=1, active=STEPS + 2, repeat=1)
    times = []
    with profile(
        activities=[ProfilerActivity.CPU], schedule=waiting, profile_memory=True, on_trace_ready=handler
    ) as prof:
        for _ in range(STEPS):
            begin = time.perf_counter()
            step(model, optimizer)
            times.append((time.perf_counter() - begin) * 1e3)
            prof.step()
    return sorted(times)[len(times) // 2]


def _nothing(_: profile) -> None:
    """A handler that does nothing."""
