"""Fifty clients of a TensorBoard with a recording of a million events: answer times, errors, memory kept.

A client asks what the tab asks, in random order and with random zooms and moments. People pause about a
second between two requests. Clients "without pause" ask again as soon as they have an answer, which no person
does: then the server is always busy, and answer times show what a request costs.

One client, people and clients without pause take turns. "CPU" is what TensorBoard's process computes, for all
clients, between a question and its answer: other programs delay a process that always computes more than one
that seldom does.

`python -m benchmarks.clients SECONDS` measures for another time than a minute.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from urllib.parse import urlencode

from benchmarks.figures import Figure
from benchmarks.server import EVENTS, STEP_NS, synthetic
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import MemoryTrace
from tests.tensorboard.process import TensorBoard, tensorboard

CLIENTS, SECONDS, ROUNDS, PAUSE_SECONDS = 50, 60.0, 3, 1.0
ENDLESS_RULE = "endless=^((.|.)+)+#"
RULE_CLIENTS = 20
IDLE_SECONDS = 5.0
MIB = 1 << 20

Query = dict[str, object]
STEP: Query = {"run": "run", "worker": "w0", "step": 0, "device": "cuda:0"}


@dataclass
class Answers:
    """What clients saw: seconds of each request by route, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    """CPU seconds of TensorBoard's process between each question and its answer, for all that it answers."""
    cpu_seconds: float = 0.0
    """What TensorBoard's process computed meanwhile."""

    def all(self) -> list[float]:
        return [second for seconds in self.seconds.values() for second in seconds]

    def add(self, other: Answers) -> None:
        """Add the answers of another round."""
        for route, seconds in other.seconds.items():
            self.seconds.setdefault(route, []).extend(seconds)
        self.errors += other.errors
        self.cpu_seconds += other.cpu_seconds


def measure(seconds: float = SECONDS) -> list[Figure]:
    """Measure one client, fifty people, fifty clients without pause, and one beside endless rules."""
    one, people, without_pause = [], [], []
    with recorded() as server:
        asyncio.run(_each_route_once(server))
        before = memory_of(server)
        each = seconds / ROUNDS
        for number in range(ROUNDS):
            one.append(asyncio.run(load(server, 1, each / 3, pause=0, seed=f"one {number}")))
            people.append(
                asyncio.run(load(server, CLIENTS, each, pause=PAUSE_SECONDS, seed=f"people {number}"))
            )
            without_pause.append(
                asyncio.run(load(server, CLIENTS, each, pause=0, seed=f"without pause {number}"))
            )
        time.sleep(IDLE_SECONDS)
        after = memory_of(server)
        again = asyncio.run(load(server, 1, seconds / 3, pause=0, seed="again"))
        beside = asyncio.run(_beside_rules(server, seconds))
        time.sleep(IDLE_SECONDS)
        left = searches_of(server)
    by_rounds = {"one": one, "people": people, "without pause": without_pause}
    every = {name: Answers() for name in by_rounds} | {"one again": again, "beside rules": beside}
    for name, rounds in by_rounds.items():
        for answers in rounds:
            every[name].add(answers)
    show(every)
    errors = sum(len(answers.errors) for answers in every.values())
    alone, p50_again = [*map(_milliseconds, one)], _milliseconds(again)
    without = [*map(_milliseconds, without_pause)]
    computed = [[1e3 * median(answers.computed) for answers in rounds] for rounds in (without_pause, one)]
    return [
        Figure("50 people, 1M events: p50", "ms", [*map(_milliseconds, people)], 10, alone, "one client"),
        Figure("50 without pause: p50", "ms", without, 10, alone, "one client"),
        Figure("50 without pause: p50, CPU", "ms", computed[0], None, computed[1], "one client"),
        Figure(
            "beside 20 with endless rules: p50",
            "ms",
            [_milliseconds(beside)],
            3,
            [p50_again],
            "without",
        ),
        Figure("all these requests: errors", "", [errors], 0),
        Figure("memory after 50 clients", "MiB", [after / MIB], 1.2, [before / MIB], "before"),
        Figure("searches left behind", "", [left], 0),
    ]


@contextmanager
def recorded() -> Iterator[TensorBoard]:
    """Run TensorBoard over two workers with a million events each."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            RunWriter(f"{folder}/run", f"w{number}").write(with_stacks(number))
        with tensorboard(folder) as server:
            server.wait_for("runs", lambda answer: sum(len(run["workers"]) for run in answer["runs"]) == 2)
            yield server


def with_stacks(seed: int) -> MemoryTrace:
    """Return the trace of `benchmarks.server` with a stack of eight frames for each module and operator."""
    trace = synthetic(seed)
    events = trace.events
    modules, operators = len(trace.modules), 10
    stacks = tuple(
        (
            *(f"forward_{depth} /train/model.py:{100 * module + depth}" for depth in range(7)),
            f"op_{operator} /torch/nn/functional.py:{operator}",
        )
        for module in range(modules)
        for operator in range(operators)
    )
    rows = events.module.astype("int32") * operators + events.operator % operators
    return replace(trace, events=replace(events, stack=rows.astype(events.stack.dtype)), stacks=stacks)


def requests(choose: random.Random) -> Iterator[tuple[str, Query]]:
    """Yield routes and their parameters without end: what one person asks for."""
    while True:
        route = choose.choices(list(_ASKS), [weight for weight, _ in _ASKS.values()])[0]
        yield route, STEP | _ASKS[route][1](choose)


def _stretch(choose: random.Random) -> Query:
    over, whole = choose.choice([("time", STEP_NS), ("event", EVENTS)])
    width = whole // 2 ** choose.randrange(10)
    start = choose.randrange(whole - width + 1)
    return {"over": over, "t0": start, "t1": start + width}


def _moment(choose: random.Random) -> Query:
    return {"event": choose.randrange(EVENTS)}


def _nothing(_: random.Random) -> Query:
    return {}


_SORTS = ("bytes", "-bytes", "born")
_ASKS: dict[str, tuple[float, Callable[[random.Random], Query]]] = {
    "runs": (3, _nothing),
    "step": (3, _nothing),
    "curve": (20, lambda choose: _stretch(choose) | {"by": choose.choice(("category", "module", "phase"))}),
    "lanes": (20, _stretch),
    "moment": (15, _moment),
    "allocations": (
        5,
        lambda choose: _stretch(choose) | {"sort": choose.choice(_SORTS)},
    ),
    "allocation": (3, lambda choose: {"row": choose.randrange(EVENTS // 2)}),
    "allocation_bands": (2, _stretch),
    "modules": (3, _nothing),
    "stacks": (3, lambda choose: choose.choice((_moment(choose), {}))),
    "stack_table": (3, lambda choose: choose.choice((_moment(choose), {}))),
    "line_table": (1, _nothing),
    "rule_table": (1, lambda choose: {"rules": f"layer=forward_{choose.randrange(7)}"}),
    "allocator": (3, _moment),
    "allocator_curve": (3, _stretch),
    "allocator_segments": (2, _moment),
    "divisions": (2, _nothing),
    "advice": (2, _nothing),
    "compare": (
        3,
        lambda choose: {
            "base_run": "run",
            "base_worker": "w1",
            "base_step": 0,
            "by": choose.choice(("category", "module", "line")),
        },
    ),
}
"""How often of 100 requests a route is asked for, and its parameters."""


async def load(server: TensorBoard, clients: int, seconds: float, *, pause: float, seed: str) -> Answers:
    """Let clients ask for some time; other seeds ask for other zooms and moments."""
    answers, end, begin = Answers(), time.monotonic() + seconds, cpu_of(server)

    async def client(number: int) -> None:
        choose = random.Random(f"{seed} {number}")
        for route, query in requests(choose):
            await asyncio.sleep(pause * choose.uniform(0.5, 1.5))
            if time.monotonic() > end:
                return
            await ask(server, answers, route, query)

    await asyncio.gather(*map(client, range(clients)))
    answers.cpu_seconds = cpu_of(server) - begin
    return answers


async def ask(server: TensorBoard, answers: Answers, route: str, query: Query) -> None:
    """Ask as a browser does, and note the time or the error."""
    clock = (~server.pid << 3) | 2  # of the CPU seconds of a process (man 3 clock_getcpuclockid)
    begin, computed = time.perf_counter(), time.clock_gettime(clock)
    try:
        status, text = await asyncio.wait_for(_answer(server, route, query), 120)
    except (OSError, EOFError, TimeoutError) as error:
        answers.errors.append(f"{route}: {error!r} {query}")
        return
    answers.seconds.setdefault(route, []).append(time.perf_counter() - begin)
    answers.computed.append(time.clock_gettime(clock) - computed)
    if status != 200:
        answers.errors.append(f"{route}: {status} {query} {text}")


async def _answer(server: TensorBoard, route: str, query: Query) -> tuple[int, str]:
    """Return the status and, unless it is 200, the text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    path = f"/data/plugin/tb_memplugin/{route}?{urlencode(query)}"
    header = (
        "Host: 127.0.0.1\r\nAccept: application/json\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"
    )
    writer.write(f"GET {path} HTTP/1.1\r\n{header}".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    body = await reader.readexactly(int(head.partition("\r\ncontent-length:")[2].split()[0]))
    writer.close()  # as browsers do: TensorBoard's server closes its end 10 ms later
    status = int(head.split()[1])
    if status == 200:
        return status, ""
    return status, (gzip.decompress(body) if "content-encoding: gzip" in head else body).decode()


async def _each_route_once(server: TensorBoard) -> None:
    answers, choose = Answers(), random.Random(0)
    for route, (_, query) in _ASKS.items():
        await ask(server, answers, route, STEP | query(choose))
    if answers.errors:
        raise AssertionError(answers.errors)


async def _beside_rules(server: TensorBoard, seconds: float) -> Answers:
    """Return the answers of one client, beside others that ask for endless rules one after another."""
    end = time.monotonic() + seconds

    async def bad(number: int) -> None:
        while time.monotonic() < end:
            await ask(server, Answers(), "rule_table", STEP | {"rules": f"{number}{ENDLESS_RULE}"})

    begin = cpu_of(server)
    others = asyncio.gather(*map(bad, range(RULE_CLIENTS)))
    answers, choose = Answers(), random.Random("beside")
    for route, query in requests(choose):
        if time.monotonic() > end:
            break
        if route != "rule_table":
            await ask(server, answers, route, query)
    await others
    answers.cpu_seconds = cpu_of(server) - begin
    return answers


def memory_of(server: TensorBoard) -> int:
    """Return the resident bytes of TensorBoard's process."""
    lines = Path(f"/proc/{server.pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def cpu_of(server: TensorBoard) -> float:
    """Return the CPU seconds that TensorBoard's process has used (man 5 proc)."""
    fields = Path(f"/proc/{server.pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def searches_of(server: TensorBoard) -> int:
    """Return how many searches for rules run."""
    tasks = Path(f"/proc/{server.pid}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text("ascii").split()]
    commands = [Path(f"/proc/{child}/cmdline") for child in children]
    return sum(b"RLIMIT_CPU" in command.read_bytes() for command in commands if command.exists())


def _milliseconds(answers: Answers) -> float:
    return 1e3 * median(answers.all())


def show(measured: dict[str, Answers]) -> None:
    """Print p50 and p95 of every route, in milliseconds, and what went wrong."""
    print("ms: p50/p95 (requests)".ljust(24), *(name.rjust(22) for name in measured))
    for route in _ASKS:
        print(
            route.ljust(24),
            *(_spread(answers.seconds.get(route, [])).rjust(22) for answers in measured.values()),
        )
    print("all".ljust(24), *(_spread(answers.all()).rjust(22) for answers in measured.values()))
    costs = (1e3 * answers.cpu_seconds / max(1, len(answers.all())) for answers in measured.values())
    print("CPU ms per request".ljust(24), *(f"{cost:.1f}".rjust(22) for cost in costs))
    for name, answers in measured.items():
        for error in answers.errors:
            print(f"{name}: {error}")


def _spread(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"({len(seconds)})"
    return f"{1e3 * median(seconds):.1f}/{1e3 * quantiles(seconds, n=20)[-1]:.0f} ({len(seconds)})"


if __name__ == "__main__":
    for figure in measure(float(sys.argv[1]) if sys.argv[1:] else SECONDS):
        print(*figure.row())
