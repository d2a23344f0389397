"""The cost of `MemoryMonitor` per training step: the time of its calls, and the size of a record on disk.

Without a GPU, stand-ins with as many counters as torch.cuda's are used; then the time to read and reset the
real ones must be added (`tests/gpu/test_monitor.py` checks the total against its goal).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.figures import Figure
from tb_memplugin import MemoryMonitor
from tb_memplugin.record.steps.counters import AllocatorCounters, Counters, SharedPeaks
from tests.counting_allocator import CountingAllocator, Handle

ROUNDS, STEPS = 5, 400
PHASES = ("forward", "backward", "optimizer")
STEP_US = 100_000
"""A training step of 100 ms."""

POOLS = ("all", "small_pool", "large_pool")
LEVELS = ("allocation", "segment", "active", "inactive_split")


def measure() -> list[Figure]:
    """Measure the microseconds per step with three phases, and their share of a step of 100 ms."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.empty(1, device="cuda")  # counters of a device that is not in use are not read
    allocator, process = _rounds(None if cuda else _stand_in), _rounds(None, device="process")
    untouched = _rounds(None, device="process", reset_peaks=False)
    name = "cuda" if cuda else "stand-in for cuda's counters"
    return [
        Figure(f"monitor, {name}: a step with 3 phases", "µs", allocator),
        Figure(f"monitor, {name}: share of a 100 ms step", "%", _share(allocator), 1.0),
        Figure("monitor, process: a step with 3 phases", "µs", process, None, untouched, "reset_peaks=False"),
        Figure("monitor, process: share of a 100 ms step", "%", _share(process), 1.0),
        Figure("monitor: bytes a step on disk", "B", [_bytes_of_a_step()]),
    ]


def _share(microseconds: list[float]) -> list[float]:
    return [100 * one / STEP_US for one in microseconds]


def _rounds(counters: Callable[..., list[Counters]] | None, **options: Any) -> list[float]:
    """Return the median microseconds of a step in each round; `counters` replaces the device's counters."""
    swapped = (
        patch("tb_memplugin.record.monitor.counters_of", counters) if counters is not None else nullcontext()
    )
    with swapped:
        return [_round(**options) for _ in range(ROUNDS)]


def _round(**options: Any) -> float:
    times = []
    with tempfile.TemporaryDirectory() as folder, MemoryMonitor(folder, "rank0", **options) as monitor:
        for _ in range(STEPS):
            begin = time.perf_counter()
            for name in PHASES:
                with monitor.phase(name):
                    pass
            monitor.step()
            times.append((time.perf_counter() - begin) * 1e6)
            time.sleep(0.0005)  # like a training step, it leaves time for the writing thread
    return median(times)


def _bytes_of_a_step() -> float:
    with tempfile.TemporaryDirectory() as folder:
        with MemoryMonitor(folder, "rank0", device="process", flush_seconds=600) as monitor:
            for _ in range(10 * STEPS):
                for name in PHASES:
                    with monitor.phase(name):
                        pass
                monitor.step()
        size = sum(path.stat().st_size for path in Path(folder).rglob("events*"))
    return size / (10 * STEPS)


def _stand_in(*_: object, **__: object) -> list[Counters]:
    """Return as many counters as torch.cuda has, so that tracking their peaks costs the same."""
    allocator = CountingAllocator()
    few = allocator.stats

    def all_of_them(index: int) -> dict[str, object]:
        counter = few(index)["allocated_bytes"]["all"]
        many = {
            f"{level}{end}": {pool: dict(counter) for pool in POOLS}
            for level in LEVELS
            for end in ("", "_bytes")
        }
        return {**many, **few(index)}

    allocator.module.read = all_of_them
    peaks = SharedPeaks(allocator.doors)
    return [AllocatorCounters(Handle(), lambda: peaks)]
