"""The same 100,000 events asked of recordings of 10^6 and of 10^7 events: what each route computes for them.

`python -m benchmarks.levels [EVENTS...]` prints CPU times of the server's routes, in this process and without
a network: the first answers, the same stretch (median of `ROUNDS`), and the slowest of zooms of all sizes. It
also prints the size on disk. Recordings are simulated, have the same density and live blocks, and are written
by the store itself.

`python -m benchmarks.levels memory [EVENTS]` opens `OPEN` recordings in one process, lets `CLIENTS` threads
ask for zooms, and prints how much memory the process has (Linux).
"""

from __future__ import annotations

import mmap
import multiprocessing
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from tb_memplugin.server.backend import Backend
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import (
    Category,
    Device,
    Kind,
    MemoryTrace,
    Module,
    Phase,
    Segments,
    Spans,
    Step,
    events,
    start_state,
)

SIZES = (1_000_000, 10_000_000)
VISIBLE, ROUNDS, ZOOMS = 100_000, 15, 300
EVENT_NS, STEP_EVENTS, CALL_EVENTS = 77_000, 100_000, 100
START_BLOCKS, SLOT, SLOTS_PER_SEGMENT, MODULES, SITES = 2_000, 2 << 20, 10, 300, 3_000
LIFETIMES, SHARES = (50, 5_000, 400_000), (0.9, 0.099, 0.001)
"""Mean lifetimes in events, and how many of the blocks have them."""

ZOOMED = ("curve", "moment", "allocation_bands", "lanes", "allocator_curve", "allocator", "stretch")
OPEN, CLIENTS, ASKED = 3, 20, 10
"""How many recordings are open, how many clients ask for zooms of them, and how often each."""

TIMELINE = ("step", "divisions", "curve", "lanes", "moment", "stretch")
ALLOCATOR = ("allocator_curve", "allocator", "allocator_segments")
"""What the two views ask first."""


def simulated(count: int, seed: int = 0) -> MemoryTrace:
    """Return a recording with `count` events of one GPU, with segments, calls and steps of 100,000 events."""
    rng = np.random.default_rng(seed)
    blocks = count // 2
    mean = rng.choice(LIFETIMES, blocks, p=SHARES)
    born = 2.0 * np.arange(blocks)
    freed = born + 1 + rng.exponential(mean)
    order = np.argsort(np.concatenate((born, freed)), kind="stable")[:count]
    block, is_alloc = order % blocks, order < blocks
    slot = _slots(block.tolist(), is_alloc.tolist(), blocks)
    time_ns = np.arange(count, dtype=np.int64) * EVENT_NS
    reserved = -(-int(slot.max() + 1) // SLOTS_PER_SEGMENT) * SLOTS_PER_SEGMENT * SLOT
    size = rng.integers(1, SLOT // 512, blocks) * 512
    sites = rng.integers(0, [MODULES, 200, len(Category)], (SITES, 3))
    table = sites[rng.integers(0, SITES, blocks)]
    begins = range(0, count, STEP_EVENTS)
    calls = np.arange(0, count, CALL_EVENTS, dtype=np.int64)
    segment = np.arange(reserved // (SLOT * SLOTS_PER_SEGMENT), dtype=np.uint64)
    phase = np.where(np.arange(count) % STEP_EVENTS < STEP_EVENTS // 2, Phase.FORWARD, Phase.BACKWARD)
    return MemoryTrace(
        source="simulated",
        events=events(
            time_ns,
            kind=np.where(is_alloc, Kind.ALLOC, Kind.FREE_COMPLETED),
            address=(slot[block] + 1) * SLOT,
            bytes=size[block],
            module=table[block, 0],
            operator=table[block, 1],
            category=table[block, 2],
            phase=phase,
            reserved=np.full(count, reserved),
            pool=np.zeros(count),
            stream=np.zeros(count),
        ),
        start=start_state(
            np.full(START_BLOCKS, 1 << 20),
            address=(int(slot.max()) + 2 + np.arange(START_BLOCKS)) * SLOT,
            category=np.full(START_BLOCKS, Category.PARAMETER),
            module=np.arange(START_BLOCKS) % MODULES,
        ),
        devices=(Device("cuda:0", 80 << 30, "", reserved),),
        steps=tuple(
            Step(number, begin * EVENT_NS, min(begin + STEP_EVENTS, count) * EVENT_NS)
            for number, begin in enumerate(begins)
        ),
        operators=tuple(f"aten::op{number}" for number in range(200)),
        modules=tuple(Module(f"layers.{number}") for number in range(MODULES)),
        calls=Spans(
            calls * EVENT_NS,
            (calls + CALL_EVENTS) * EVENT_NS,
            (calls // CALL_EVENTS % MODULES).astype(np.int32),
            np.zeros(len(calls), np.int32),
            phase[calls].astype(np.uint8),
        ),
        segments=Segments(
            device=np.zeros(len(segment), np.uint8),
            address=(segment * np.uint64(SLOTS_PER_SEGMENT) + np.uint64(1)) * np.uint64(SLOT),
            bytes=np.full(len(segment), SLOT * SLOTS_PER_SEGMENT, np.int64),
            stream=np.zeros(len(segment), np.int32),
            pool=np.zeros(len(segment), np.int32),
            expandable=np.zeros(len(segment), np.uint8),
        ),
        streams=(0,),
        pools=((0, 0),),
    )


def _slots(block: list[int], is_alloc: list[bool], blocks: int) -> np.ndarray:
    """Return where each block lies, so that no two that are alive lie in the same place: int64, (blocks,)."""
    slot, free, used = [0] * blocks, list[int](), 0
    for row, allocates in zip(block, is_alloc, strict=True):
        if not allocates:
            free.append(slot[row])
        elif free:
            slot[row] = free.pop()
        else:
            slot[row], used = used, used + 1
    return np.array(slot, np.int64)


class Server:
    """The routes over a logdir, in this process."""

    def __init__(self, logdir: str) -> None:
        multiplexer = EventMultiplexer(tensor_size_guidance={"tb_memplugin": 0})
        provider = MultiplexerDataProvider(multiplexer, logdir)
        self._backend = Backend(TBContext(data_provider=provider, logdir=logdir))
        multiplexer.AddRunsFromDirectory(logdir)
        multiplexer.Reload()

    def milliseconds(self, route: str, **parameters: object) -> float:
        """Return how long this process computed for an answer."""
        begin = time.process_time()
        response = Client(self._backend.apps[f"/{route}"]).get("/", query_string=parameters)
        took = (time.process_time() - begin) * 1e3
        if response.status_code != 200:
            sys.exit(f"{route}: {response.get_data()!r}")
        return took


class Recording:
    """A recording in a logdir, and what to ask of it."""

    def __init__(self, count: int, logdir: str, run: str = "run") -> None:
        self.count, self.logdir = count, logdir
        self.step = {"run": run, "worker": f"w{count}", "step": count // STEP_EVENTS // 2}

    def parameters(self, route: str, *, whole: bool = False, zoom: bool = False) -> dict[str, object]:
        """Return the parameters for all of it, a zoom of any size, or the stretch in its middle."""
        count, parameters = self.count, {**self.step, "span": "window"}
        events = count if whole else VISIBLE
        if zoom:
            events = int(count ** random.uniform(0.5, 1))
        first = 0 if whole else count // 2 + random.randrange(1_000)
        first = random.randrange(count - events + 1) if zoom else first
        if route in ("moment", "allocator", "allocator_segments"):
            return {**parameters, "event": first + events // 2}
        if route in ("step", "divisions"):
            return parameters
        return {**parameters, "t0": first * EVENT_NS, "t1": (first + events) * EVENT_NS}


class Measured:
    """The CPU times of one recording, in milliseconds by row of the table."""

    def __init__(self, count: int, logdir: str) -> None:
        self.rows: dict[str, float] = {}
        worker = f"w{count}"
        trace = simulated(count)
        begin = time.process_time()
        written = RunWriter(f"{logdir}/{worker}/run", worker).write(trace)
        self.rows["write, ms"] = (time.process_time() - begin) * 1e3
        self.rows["side file, bytes per event"] = written.side_file_bytes / count
        del trace
        self._recording = Recording(count, f"{logdir}/{worker}")

    def measure(self) -> None:
        """Ask a new server what two views ask first, then stretches and moments."""
        for view, routes in (("Timeline", TIMELINE), ("Allocator", ALLOCATOR)):
            server = self._opened()
            each = {
                route: server.milliseconds(route, **self._recording.parameters(route, whole=True))
                for route in routes
            }
            self.rows |= {f"first {view}: {route}, ms": took for route, took in each.items()}
            self.rows[f"first {view}, ms"] = sum(each.values())
        server = self._opened()
        for route in ZOOMED:  # as the tab does, which begins with the whole
            server.milliseconds(route, **self._recording.parameters(route, whole=True))
        for route in ZOOMED:
            ask: Callable[[int], float] = lambda _, route=route: server.milliseconds(  # type: ignore[misc]  # noqa: E731
                route, **self._recording.parameters(route)
            )
            self.rows[f"same stretch: {route}, ms"] = median(map(ask, range(ROUNDS)))
        for route in ZOOMED:
            zooms = [
                server.milliseconds(route, **self._recording.parameters(route, zoom=True))
                for _ in range(ZOOMS)
            ]
            self.rows[f"zooms: {route}, p99 ms"] = quantiles(zooms, n=100)[-1]

    def _opened(self) -> Server:
        server = Server(self._recording.logdir)
        server.milliseconds("runs")
        return server


def _write(count: int, folder: str) -> None:
    Measured(count, folder)


def memory(count: int) -> None:
    """Print the memory of this process before, with the recordings open, and while the clients ask."""
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        # Another process writes, because what simulating takes would count here.
        writer = multiprocessing.get_context("spawn").Process(target=_write, args=(count, folder))
        writer.start()
        writer.join()
        recordings = [Recording(count, f"{folder}/w{count}", f"run{number}") for number in range(OPEN)]
        for recording in recordings:
            shutil.copytree(f"{folder}/w{count}/run", f"{folder}/w{count}/{recording.step['run']}")
        shutil.rmtree(f"{folder}/w{count}/run")
        server = Server(f"{folder}/w{count}")
        server.milliseconds("runs")
        resident = [_resident()]
        for recording in recordings:
            for route in (*TIMELINE, *ALLOCATOR):
                server.milliseconds(route, **recording.parameters(route, whole=True))
        resident.append(_resident())

        def ask() -> None:
            for _ in range(ASKED):
                route = random.choice(ZOOMED)
                server.milliseconds(route, **random.choice(recordings).parameters(route, zoom=True))

        clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        highest = 0
        while any(client.is_alive() for client in clients):
            highest = max(highest, _resident())
            time.sleep(0.02)
    names = ("before", f"{OPEN} recordings of {count:,} events open", f"highest while {CLIENTS} clients ask")
    for name, size in zip(names, (*resident, highest), strict=True):
        print(f"{name}: {size >> 20:,} MiB")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def main(sizes: list[int]) -> None:
    """Print a row for each figure, with a column for each size and their ratio."""
    random.seed(0)
    table = Table("CPU time", *(f"{size:,} events" for size in sizes), "last / first")
    with tempfile.TemporaryDirectory() as folder:
        recordings = [Measured(size, folder) for size in sizes]
        for recording in recordings:
            recording.measure()
    for what, first in recordings[0].rows.items():
        values = [recording.rows[what] for recording in recordings]
        table.add_row(what, *(f"{value:,.1f}" for value in values), f"{values[-1] / first:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        memory(int(sys.argv[2]) if len(sys.argv) > 2 else SIZES[-1])
    else:
        main([int(size) for size in sys.argv[1:]] or list(SIZES))
