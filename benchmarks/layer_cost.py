"""What `MemoryTracer` adds on CUDA to the time of the host: per call of a layer, and per allocation.

Kernels are not waited for, so a stand-in for the GPU (docs/gpu.md) gives these figures, too. They are taken
within training steps: in a loop with nothing else, the same hooks cost a quarter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median

from benchmarks.figures import Figure
from benchmarks.on_gpu.cost import GPT_2
from benchmarks.on_gpu.programs import Program
from tb_memplugin import MemoryTracer
from tb_memplugin.record.history.allocators import SWITCH, allocators

ROUNDS, STEPS, ENTRIES = 40, 5, 1_000_000


def measure() -> list[Figure]:
    """Measure both, and what they come to in a step of GPT-2's size, without, with history, with all."""
    step, model, optimizer = Program("transformer", "bf16", "Adam").step("cuda", GPT_2)
    tracer = MemoryTracer(device="cuda", max_events=ENTRIES)
    for _ in range(3):
        step()
    with tracer.trace(model, optimizer):
        step()
    calls = sum(one.calls for one in tracer.get_layer_stats().values())
    allocations = sum(event.event_type == "alloc" for event in tracer.events)
    without, history, traced = [], [], []
    for _ in range(ROUNDS):
        without.append(_milliseconds(step, nullcontext()))
        history.append(_milliseconds(step, _history()) - without[-1])
        traced.append(_milliseconds(step, tracer.trace(model, optimizer)) - without[-1])
    of_history, of_all = median(history), median(traced)
    what = "tracer on CUDA"
    return [
        Figure(f"{what}: a layer's call and backward", "µs", [1e3 * (of_all - of_history) / calls]),
        Figure(f"{what}: an allocation and its free", "µs", [1e3 * of_history / allocations]),
        Figure(f"{what}, GPT-2's size: calls in a step", "", [calls]),
        Figure(f"{what}, GPT-2's size: allocations in a step", "", [allocations]),
        Figure(f"{what}, GPT-2's size: both, a step", "ms", [of_all]),
        Figure(f"{what}, GPT-2's size: the host's step without it", "ms", [median(without)]),
    ]


@contextmanager
def _history() -> Iterator[None]:
    """Record the allocator's history alone, as the tracer does."""
    allocator = next(one for one in allocators() if one.device_type == "cuda")
    SWITCH.on(allocator, max_entries=ENTRIES)
    try:
        yield
    finally:
        SWITCH.off(allocator)


def _milliseconds(step: Callable[[], None], around: AbstractContextManager[object]) -> float:
    """Return the median time of the process for a step inside a context, its first step not counted."""
    times = []
    with around:
        step()
        for _ in range(STEPS):
            begin = time.process_time_ns()
            step()
            times.append((time.process_time_ns() - begin) / 1e6)
    return median(times)
