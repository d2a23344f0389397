"""The handler's time, compared with `tensorboard_trace_handler` and `export_memory_timeline`."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import profile, tensorboard_trace_handler

from benchmarks.figures import Figure
from benchmarks.training import make, profiled
from tb_memplugin import memory_trace_handler

ROUNDS = 9
GOALS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("", {}, 1.25),
    (", record_shapes", {"record_shapes": True}, 1.0),
    (", record_shapes, with_stack", {"record_shapes": True, "with_stack": True}, 1.0),
)


def measure() -> list[Figure]:
    """Measure handlers on the same profile of 10 steps; they take turns at going first."""
    subjects: list[Callable[[], Figure]] = [
        *(partial(_against_trace_handler, *goal) for goal in GOALS),
        _against_memory_timeline,
        _own_events,
    ]
    figures = []
    for subject in subjects:
        gc.collect()  # the hooks of the previous handler stay as long as it lives
        figures.append(subject())
    return figures


def _milliseconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def _against_trace_handler(name: str, options: dict[str, Any], goal: float) -> Figure:
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = make()
        memory = memory_trace_handler(Path(folder, "memory"), "w", model=model, optimizer=optimizer)
        kineto = tensorboard_trace_handler(str(Path(folder, "kineto")))

        def ready(prof: profile) -> None:
            turns = [(ours, memory), (theirs, kineto)]
            for times, handler in turns if len(ours) % 2 else reversed(turns):
                times.append(_milliseconds(lambda handler=handler: handler(prof)))  # type: ignore[misc]

        for _ in range(ROUNDS + 1):
            profiled(ready, model, optimizer, **options)
    return Figure(f"handler, 10 steps{name}", "ms", ours[1:], goal, theirs[1:], "tensorboard_trace_handler")


def _against_memory_timeline() -> Figure:
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = make()
        memory = memory_trace_handler(Path(folder, "memory"), "w", model=model, optimizer=optimizer)

        def ready(prof: profile) -> None:
            ours.append(_milliseconds(lambda: memory(prof)))
            target = str(Path(folder, "timeline.json"))
            theirs.append(_milliseconds(lambda: prof.export_memory_timeline(target, device="cpu")))

        for _ in range(3):
            profiled(ready, model, optimizer, record_shapes=True, with_stack=True)
    what = "handler, 10 steps, record_shapes, with_stack"
    return Figure(what, "ms", ours[1:], 1 / 40, theirs[1:], "export_memory_timeline")


def _own_events() -> Figure:
    """Count the events that our hooks add to a profile with stacks, in which each call is an event."""
    ours: list[float] = []
    every: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = make()
        memory = memory_trace_handler(Path(folder, "memory"), "w", model=model, optimizer=optimizer)

        def ready(prof: profile) -> None:
            memory(prof)
            assert prof.profiler is not None
            assert prof.profiler.kineto_results is not None
            own, count = _count(prof.profiler.kineto_results.experimental_event_tree())
            ours.append(own)
            every.append(count)

        profiled(ready, model, optimizer, record_shapes=True, with_stack=True)
    return Figure("events of a profile with stacks, 10 steps", "events", ours, None, every, "all events")


def _count(roots: list[Any]) -> tuple[int, int]:
    """Return the number of events in functions of this package and what they call, and of all events."""
    pending = [(event, False) for event in roots]
    own = count = 0
    while pending:
        event, inside = pending.pop()
        inside = inside or event.name.startswith("tb_memplugin/")
        own += inside
        count += 1
        pending += [(child, inside) for child in event.children]
    return own, count
