"""One training run seen by the tracer and by torch.profiler at once: what each says of the same blocks."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import MemoryTracer
from tb_memplugin.trace import Kind, MemoryTrace
from tests.training import reported_events


@dataclass
class Both:
    """The tracer, its trace, and the profiler's own events: columns in time order, `bytes` signed.

    `held` marks the profiler's events of blocks that the tracer saw in a tensor, too; the others are what
    kernels took and gave back. `missing` are the tracer's blocks that the profiler does not know.
    """

    tracer: MemoryTracer
    time_ns: np.ndarray
    bytes: np.ndarray
    held: np.ndarray
    missing: list[tuple[int, int]]

    @property
    def trace(self) -> MemoryTrace:
        return self.tracer.trace_result()

    @property
    def curve(self) -> np.ndarray:
        """Bytes in tensors after each of the profiler's events, from 0."""
        return np.cumsum(np.where(self.held, self.bytes, 0))

    @property
    def peak(self) -> int:
        """The profiler's highest running sum, kernels' buffers included."""
        return int(np.cumsum(self.bytes).max())


def profiled(run: Callable[[], Any]) -> np.ndarray:
    """Live bytes from 0 after each of the profiler's events in a run without a tracer."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    told = [
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in _below(recorded.profiler.kineto_results.experimental_event_tree())
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation)
    ]
    return np.cumsum([0, *(size for _, size in sorted(told))])


def _below(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _below(event.children)


def both(
    make: Callable[[], Any],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 2,
    run: Callable[[Any, torch.optim.Optimizer], None] | None = None,
    **options: Any,
) -> Both:
    """Train a model for some steps, gradients at None when they begin."""
    torch.manual_seed(0)
    model = make()
    step = run or train_step
    with_optimizer = optimizer(model.parameters(), lr=0.01)
    step(model, with_optimizer)
    with_optimizer.zero_grad()
    gc.collect()
    tracer = MemoryTracer(**options)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof,
        tracer.trace(model, with_optimizer),
    ):
        for _ in range(steps):
            step(model, with_optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        reported, _ = reported_events(path)
    return _joined(tracer, reported)


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    x, y = model.batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _joined(tracer: MemoryTracer, reported: list[tuple[int, int, int, int]]) -> Both:
    """Match each block of the tracer with the profiler's newest block at its address."""
    ours = tracer.trace_result().events
    pending = [
        (time, int(address), int(size))
        for time, address, size, kind in zip(
            ours.time_ns.tolist(), ours.address, ours.bytes, ours.kind, strict=True
        )
        if kind == Kind.ALLOC
    ]
    held = np.zeros(len(reported), bool)
    open_rows: dict[int, int] = {}
    open_sizes: dict[int, int] = {}
    ends: dict[int, int] = {}
    missing = []
    place = 0
    for row, (time, address, size, _) in enumerate(reported):
        while place < len(pending) and pending[place][0] < time:
            missing += _seen(pending[place], open_rows, open_sizes, held)
            place += 1
        if size > 0:
            open_rows[address], open_sizes[address] = row, size
        elif address in open_rows:
            ends[open_rows.pop(address)] = row
    for one in pending[place:]:
        missing += _seen(one, open_rows, open_sizes, held)
    for row, end in ends.items():
        held[end] = held[row]
    time_ns = np.array([row[0] for row in reported], np.int64)
    return Both(tracer, time_ns, np.array([row[2] for row in reported], np.int64), held, missing)


def _seen(
    block: tuple[int, int, int], open_rows: dict[int, int], sizes: dict[int, int], held: np.ndarray
) -> list[tuple[int, int]]:
    _, address, size = block
    if open_rows.get(address) is None or sizes[address] != size:
        return [(address, size)]
    held[open_rows[address]] = True
    return []
