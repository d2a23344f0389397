"""What `MemoryTracer` adds on CUDA to the time of the host: per call of a layer, and per allocation.

Kernels are not waited for, so a stand-in for the GPU (docs/gpu.md) gives these figures, too. Each is the
lowest of many short rounds, because a machine that does other things only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from benchmarks.figures import Figure
from benchmarks.on_gpu.cost import GPT_2
from benchmarks.on_gpu.programs import Program
from tb_memplugin import MemoryTracer

LAYERS, ALLOCATIONS, DEPTH = 20, 50, 20
BLOCKS, ROUNDS, STEPS = 5, 60, 10


class View(nn.Module):
    """A layer that allocates nothing, neither in forward nor in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def measure() -> list[Figure]:
    """Measure both, and multiply them by the calls and allocations of a step of GPT-2's size."""
    layers = nn.Sequential(*(View() for _ in range(LAYERS))).cuda()
    x = torch.ones(1, device="cuda", requires_grad=True)
    start = torch.ones_like(x)

    def forward_and_backward() -> None:
        torch.autograd.backward(layers(x), start)
        x.grad = None

    tracer = MemoryTracer(device="cuda", max_events=1_000_000)
    per_layer = _added(forward_and_backward, lambda: tracer.trace(layers)) / (LAYERS + 1)
    per_block = _added(lambda: _allocate(DEPTH), lambda: tracer.trace(layers)) / ALLOCATIONS
    step, model, optimizer = Program("transformer", "bf16", "Adam").step("cuda", GPT_2)
    for _ in range(3):
        step()
    alone = min(_milliseconds(step) for _ in range(STEPS))
    with tracer.trace(model, optimizer):
        step()
    stats = tracer.get_layer_stats()
    calls = sum(one.calls for one in stats.values())
    allocations = sum(event.event_type == "alloc" for event in tracer.events)
    total = (calls * per_layer + allocations * per_block) / 1e3
    what = "tracer on CUDA"
    return [
        Figure(f"{what}: a layer's call and backward", "µs", [per_layer]),
        Figure(f"{what}: an allocation and its free", "µs", [per_block]),
        Figure(f"{what}, GPT-2's size: calls in a step", "", [calls]),
        Figure(f"{what}, GPT-2's size: allocations in a step", "", [allocations]),
        Figure(f"{what}, GPT-2's size: both, a step", "ms", [total]),
        Figure(f"{what}, GPT-2's size: the host's step without it", "ms", [alone]),
    ]


def _added(work: Callable[[], None], around: Callable[[], AbstractContextManager[object]]) -> float:
    """Return the microseconds of the process that a context adds to some work, lowest against lowest."""
    lowest = {True: float("inf"), False: float("inf")}
    for _ in range(BLOCKS):
        for inside in (False, True):
            with around() if inside else nullcontext():
                lowest[inside] = min(lowest[inside], *(_milliseconds(work) for _ in range(ROUNDS)))
    return 1e3 * (lowest[True] - lowest[False])


def _milliseconds(work: Callable[[], None]) -> float:
    begin = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin) / 1e6


def _allocate(depth: int) -> None:
    """Allocate and free from a stack of this many frames, which the history records."""
    if depth:
        _allocate(depth - 1)
        return
    for _ in range(ALLOCATIONS):
        torch.empty(1000, device="cuda")
