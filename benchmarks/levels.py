"""The same 100,000 events asked of recordings of 10^6 and of 10^7 events: what each route computes for them.

All are CPU times of the server's routes, in this process and without a network: the first answers, the same
stretch, and the slowest of zooms of all sizes. Recordings are simulated, have the same density and live
blocks, and are written by the store itself. Sorting as many numbers stands beside them: where it grows more
than tenfold, caches and pages do, not what is computed. Beside what fills files and memory stands the same
without the system's part: it depends on whether a virtual machine has the pages, or its host took them back.
Last comes the memory of a process in which several clients ask for zooms of several recordings (Linux).
"""

from __future__ import annotations

import mmap
import multiprocessing
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller
from pathlib import Path
from statistics import quantiles

import numpy as np
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from benchmarks.figures import Figure
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
VISIBLE, ROUNDS, ZOOMS, TIMES = 100_000, 15, 100, 3
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


TENFOLD = 10**1.02
LIMITS = {
    "last / first: write": TENFOLD,
    "last / first: step, with loading": TENFOLD,
    "1,000,000 events: all that the Timeline asks first": 1_000.0,
    "1,000,000 events: all that the Allocator asks first": 1_000.0,
    "10,000,000 events: all that the Timeline asks first": 2_000.0,
    "10,000,000 events: all that the Allocator asks first": 2_000.0,
    "10,000,000 events: side file, bytes per event": 12.0,
    **{f"last / first: {route} of the same events": 1.3 for route in ZOOMED},
    **{f"{size:,} events: p99 of zooms: {route}": 30.0 for size in SIZES for route in ZOOMED},
}


class Measured:
    """The figures of one recording, by what they are of: milliseconds of CPU time, or bytes."""

    def __init__(self, count: int, logdir: str) -> None:
        self.rows: dict[str, list[float]] = {}
        worker = f"w{count}"
        trace = simulated(count)
        numbers = np.random.default_rng(0).integers(0, 1 << 40, count)
        for number in range(TIMES):
            before = _seconds()
            written = RunWriter(f"{logdir}/{worker}/run{number}", worker).write(trace)
            self._add_laps("write", before)
            self._add("side file, bytes per event", written.side_file_bytes / count)
            begin = time.process_time()
            np.sort(numbers)
            self._add("np.sort of as many numbers", (time.process_time() - begin) * 1e3)
        self._recording = Recording(count, f"{logdir}/{worker}", "run0")

    def _add(self, what: str, value: float) -> None:
        self.rows.setdefault(what, []).append(value)

    def _add_laps(self, what: str, begin: tuple[float, float]) -> None:
        user, system = (1e3 * (after - before) for before, after in zip(begin, _seconds(), strict=True))
        self._add(what, user + system)
        self._add(f"{what}, without the system's part", user)

    def ask_first(self) -> None:
        """Ask new servers what two views ask first."""
        for view, routes in (("Timeline", TIMELINE), ("Allocator", ALLOCATOR)):
            server, begin = self._opened(), _seconds()
            for route in routes:
                server.milliseconds(route, **self._recording.parameters(route, whole=True))
                if route == "step":
                    self._add_laps("step, with loading", begin)
            self._add_laps(f"all that the {view} asks first", begin)

    def open(self) -> None:
        """Ask a new server for the whole recording, as the tab does before it zooms."""
        self._server = self._opened()
        for route in ZOOMED:
            self._server.milliseconds(route, **self._recording.parameters(route, whole=True))

    def ask_same(self, route: str) -> None:
        """Ask for the stretch in the middle."""
        took = self._server.milliseconds(route, **self._recording.parameters(route))
        self._add(f"{route} of the same events", took)

    def ask_zooms(self, route: str) -> None:
        """Ask for zooms of all sizes."""
        zooms = [self._recording.parameters(route, zoom=True) for _ in range(ZOOMS)]
        laps = [self._server.milliseconds(route, **zoom) for zoom in zooms]
        self._add(f"p99 of zooms: {route}", quantiles(laps, n=100)[-1])

    def _opened(self) -> Server:
        server = Server(self._recording.logdir)
        server.milliseconds("runs")
        return server


def measure() -> list[Figure]:
    """Measure both sizes, how much more the larger one takes, and the memory of the larger one."""
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        recordings = {f"{size:,} events": Measured(size, folder) for size in SIZES}
        _take_turns(list(recordings.values()))
        # In a process of its own, because what was measured here would count.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            resident = pool.submit(memory, SIZES[-1], folder).result()
    first, last = (recording.rows for recording in recordings.values())
    tables = {name: recording.rows for name, recording in recordings.items()}
    tables["last / first"] = {
        what: [b / a for a, b in zip(first[what], last[what], strict=True)] for what in first
    }
    units = {"last / first": ""}
    figures = [
        Figure(name, units.get(column, "B" if "bytes" in what else "ms"), rows[what], LIMITS.get(name))
        for what in first
        for column, rows in tables.items()
        for name in [f"{column}: {what}"]
    ]
    names = ("before", f"{OPEN} of {SIZES[-1]:,} events open", f"highest while {CLIENTS} clients ask")
    limits = (None, None, 800)
    return figures + [
        Figure(f"memory of the server, {name}", "MiB", [size / (1 << 20)], limit)
        for name, size, limit in zip(names, resident, limits, strict=True)
    ]


def _take_turns(recordings: list[Measured]) -> None:
    """Ask for all recordings in turn, so that what else runs on the machine slows them alike."""
    asked: list[tuple[int, Callable[[Measured], None]]] = [(TIMES, Measured.ask_first), (1, Measured.open)]
    for route in ZOOMED:
        asked += (ROUNDS, methodcaller("ask_same", route)), (TIMES, methodcaller("ask_zooms", route))
    for times, ask in asked:
        for _ in range(times):
            for recording in recordings:
                ask(recording)


def memory(count: int, folder: str) -> list[int]:
    """Return the memory of this process before, with recordings open, and at most while clients ask."""
    random.seed(0)
    recordings = [Recording(count, f"{folder}/w{count}", f"run{number}") for number in range(OPEN)]
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
    return [*resident, highest]


def _seconds() -> tuple[float, float]:
    """Return how long this process computed, and the system for it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
