"""Time of the simulated allocator for a million events: compared with a record, and with other settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.figures import Figure
from tb_memplugin.simulator import AllocatorSettings, Replay, replay, simulated_trace
from tb_memplugin.trace import Device, Kind, MemoryTrace, Step, events, start_state
from tb_memplugin.trace.tables import Int64

EVENTS, ROUNDS, GOAL_SECONDS = 1_000_000, 3, 5
LAYERS, KEPT, TEMPORARIES = 32, 12, 20
WEIGHTS, SCATTERED = 2_000, 20_000
CONFS = ("expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4")

Move = tuple[int, int, int]
"""Kind of event, number of the block, bytes."""


def measure() -> list[Figure]:
    """Measure training compared with its record, training with other settings, and many free blocks."""
    recorded = _recorded(training())
    figures = [_figure("the allocator beside its record", recorded, None)]
    figures += [_figure(f"what if {conf}", recorded, AllocatorSettings.from_conf(conf)) for conf in CONFS]
    return [*figures, _figure("the same, 20,000 blocks freed in any order", _recorded(scattered()), None)]


def _recorded(moves: Iterator[Move]) -> MemoryTrace:
    """Return a history with the addresses that the simulator chooses: what a GPU would have recorded."""
    recorded = simulated_trace([replay(_history(moves), 0)])
    again = replay(recorded, 0)
    if again.exact_addresses != again.allocs:
        raise AssertionError(f"the simulator contradicts its own record: {again.first_miss}")
    return recorded


def _figure(what: str, recorded: MemoryTrace, settings: AllocatorSettings | None) -> Figure:
    run = partial(replay, recorded, 0, settings)
    return Figure(f"1M events: {what}", "s", [_lap(run) for _ in range(ROUNDS)], GOAL_SECONDS)


def _lap(run: partial[Replay]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _history(moves: Iterator[Move]) -> MemoryTrace:
    rows = [next(moves) for _ in range(EVENTS)]
    kind, block, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return MemoryTrace(
        source="benchmark",
        events=events(np.arange(EVENTS) * 1_000, kind=kind, address=_token(block), bytes=size),
        start=start_state(np.full(WEIGHTS, 4 << 20), address=_token(np.arange(WEIGHTS))),
        devices=(Device("cuda:0"),),
        steps=(Step(0, 0, EVENTS * 1_000),),
        streams=(0,),
        pools=((0, 0),),
    )


def _token(block: Int64) -> Int64:
    """Return a number that stands for a block's address, which the simulator will choose."""
    return (block + 1) << 40


def training() -> Iterator[Move]:
    """Yield steps over batches of changing length; backward frees what forward keeps, in reverse order."""
    random, count = np.random.default_rng(0), WEIGHTS
    sizes = random.integers(1, 1 << 14, (LAYERS, KEPT + TEMPORARIES))
    while True:
        tokens = int(random.integers(64, 512))
        kept: list[tuple[int, int]] = []
        for layer in (*range(LAYERS), *range(LAYERS - 1, -1, -1)):
            forward = len(kept) <= layer * KEPT
            for place, size in enumerate((sizes[layer] * tokens).tolist()):
                block = (count, size)
                count += 1
                yield int(Kind.ALLOC), *block
                if forward and place < KEPT:
                    kept.append(block)
                    continue
                yield from _freed(block)
                if not forward and place < KEPT:
                    yield from _freed(kept.pop())


def scattered() -> Iterator[Move]:
    """Yield thousands of blocks of random sizes and lifetimes, so that free blocks are many and scattered."""
    random, count = np.random.default_rng(0), WEIGHTS
    live: list[tuple[int, int]] = []
    while True:
        sizes = 512 * random.integers(1, 4096, SCATTERED)
        places = random.integers(0, SCATTERED, SCATTERED)
        for size, place in zip(sizes.tolist(), places.tolist(), strict=True):
            live.append((count, size))
            yield int(Kind.ALLOC), *live[-1]
            count += 1
            if len(live) > SCATTERED:
                live[place], live[-1] = live[-1], live[place]
                yield from _freed(live.pop())


def _freed(block: tuple[int, int]) -> Iterator[Move]:
    yield int(Kind.FREE_REQUESTED), *block
    yield int(Kind.FREE_COMPLETED), *block
