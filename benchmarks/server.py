"""How long the tab waits for a step of a million events, from a real TensorBoard and in process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from tb_memplugin.analysis.curves import curve
from tb_memplugin.store.reader import load_window
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import (
    Category,
    Device,
    Kind,
    MemoryTrace,
    Module,
    Phase,
    Spans,
    StartState,
    Step,
    events,
)
from tests.tensorboard.process import TensorBoard, tensorboard

EVENTS, MODULES, STEP_NS = 1_000_000, 300, 1_000_000_000
ROUNDS, ZOOMS, STARTS = 5, 20, 12

START = """
from importlib import metadata
from tensorboard import main

points = metadata.entry_points(group="tensorboard_plugins")
kept = [point for point in points if {with_ours} or point.name != "tb_memplugin"]
metadata.entry_points = lambda **_: {{"tensorboard_plugins": kept}}
main.run_main()
"""
"""A TensorBoard with all installed plugins, or with all but ours."""


def measure() -> list[Figure]:
    """Measure the first view, for which the side file must be read, and zooms after it."""
    first: list[float] = []
    zooms: list[float] = []
    over_events: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        files = [
            RunWriter(f"{folder}/run", f"w{number}").write(synthetic(number)) for number in range(ROUNDS)
        ]
        with tensorboard(folder) as server:
            server.wait_for(
                "runs", lambda answer: sum(len(run["workers"]) for run in answer["runs"]) == ROUNDS
            )
            for number in range(ROUNDS):
                step = {"run": "run", "worker": f"w{number}", "step": 0, "device": "cuda:0"}
                first.append(_lap(partial(_first_view, server, step)))
                for zoom in range(ZOOMS // ROUNDS):
                    t0 = STEP_NS * zoom // 40
                    zooms.append(_lap(partial(server.get, "curve", **step, t0=t0, t1=t0 + STEP_NS // 5)))
                    first_event = EVENTS * zoom // 40
                    stretch = {"over": "event", "t0": first_event, "t1": first_event + EVENTS // 5}
                    over_events.append(_lap(partial(server.get, "curve", **step, **stretch)))
        load = [_lap(partial(load_window, written.side_file)) for written in files]
        trace = load_window(files[0].side_file)
        replay = _lap(partial(trace.live, 0))
        drawn = [_lap(partial(curve, trace, 0, STEP_NS // 3, STEP_NS // 2, 1000)) for _ in range(ROUNDS)]
    pairs = [(_start(with_ours=True), _start(with_ours=False)) for _ in range(STARTS)]
    with_ours, without = zip(*pairs, strict=True)
    return [
        Figure("TensorBoard, from its start until it serves", "ms", with_ours, 1.05, without, "without us"),
        Figure("1M events: first view (step and curve), HTTP", "ms", first, 500),
        Figure("1M events: zoom, HTTP", "ms", zooms, 50),
        Figure("1M events: zoom over events, HTTP", "ms", over_events, 50),
        Figure("1M events: load the side file", "ms", load),
        Figure("1M events: pair and replay", "ms", [replay]),
        Figure("1M events: a curve of a sixth", "ms", drawn),
    ]


def _start(*, with_ours: bool) -> float:
    """Return the milliseconds until TensorBoard serves."""
    program = ("-c", START.format(with_ours=with_ours))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        with tensorboard(folder, program=program) as server:
            server.fetch("data/environment")
            return (time.perf_counter() - begin) * 1e3


def _first_view(server: TensorBoard, step: dict[str, Any]) -> None:
    server.get("step", **step)
    server.get("curve", **step)


def _lap(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def synthetic(seed: int) -> MemoryTrace:
    """Return a step with short-lived and long-lived blocks on a GPU with reserved memory."""
    random = np.random.default_rng(seed)
    blocks = EVENTS // 2
    born = np.sort(random.integers(0, STEP_NS, blocks))
    lives = random.exponential(np.where(random.random(blocks) < 0.9, STEP_NS / 1e4, STEP_NS / 4)).astype(
        np.int64
    )
    size = random.integers(1, 4096, blocks) * 512
    time_ns = np.concatenate((born, np.minimum(born + lives + 1, STEP_NS - 1)))
    order = np.argsort(time_ns, kind="stable")
    twice = np.tile(np.arange(blocks), 2)[order]
    is_alloc = np.repeat([True, False], blocks)[order]
    table = random.integers(0, [MODULES, 200, len(Category)], (blocks, 3))[twice]
    return MemoryTrace(
        source="synthetic",
        events=events(
            time_ns[order],
            kind=np.where(is_alloc, Kind.ALLOC, Kind.FREE_COMPLETED),
            address=(twice + 1) * 512,
            bytes=size[twice],
            module=table[:, 0],
            operator=table[:, 1],
            category=table[:, 2],
            phase=np.where(time_ns[order] < STEP_NS // 2, Phase.FORWARD, Phase.BACKWARD),
            reserved=np.full(EVENTS, 80 << 30),
        ),
        start=StartState(),
        devices=(Device("cuda:0", 80 << 30),),
        steps=(Step(0, 0, STEP_NS),),
        operators=tuple(f"aten::op{number}" for number in range(200)),
        modules=tuple(Module(f"layers.{number}") for number in range(MODULES)),
        phases=Spans(),
    )
