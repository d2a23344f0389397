"""Replay any trace through a simulated allocator, with the recorded settings or with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from tb_memplugin.simulator.allocator_settings import AllocatorSettings, recorded_settings
from tb_memplugin.simulator.replay_run import Outcome, longer_block, run
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Int64

MOST_LONGER = 8
"""How many blocks of the start state are made longer at most, each at the cost of one replay."""


@dataclass(frozen=True, slots=True)
class FirstMiss:
    """The first allocation whose simulated address differs from the recorded one.

    `event` is an index into the trace's events, `bytes` the requested size, `cause` a sentence.
    """

    event: int
    bytes: int
    recorded_address: int
    simulated_address: int
    cause: str


@dataclass(frozen=True, eq=False)
class Replay(Outcome):
    """What the simulated allocator did on one device of a trace.

    Attributes:
        source, device, settings, capacity: what was replayed; `capacity` in bytes, None for no limit.
        follows_record: whether the driver answered as recorded, so that addresses can be compared.
    """

    source: MemoryTrace
    device: int
    settings: AllocatorSettings
    capacity: int | None
    follows_record: bool

    @property
    def allocs(self) -> int:
        """The number of allocations that were served."""
        return len(self.allocations)

    @cached_property
    def exact(self) -> np.ndarray:
        """Whether each allocation is at the recorded address: bool, shape (allocations,)."""
        return np.asarray(self.address == self.source.events.address[self.allocations])

    @property
    def exact_addresses(self) -> int:
        """The number of allocations at the recorded address."""
        return int(np.count_nonzero(self.exact))

    @cached_property
    def reserved(self) -> Int64:
        """The simulated reserved bytes: int64, shape (end + 1,); entry e + 1 holds after event e.

        What a request freed before it failed is not in it: `failure.reserved_bytes` says what was left.
        """
        level = np.zeros(self.end + 1, np.int64)
        level[0] = self.reserved_at_start
        for change in self.changes:
            if change.clock < self.end:
                level[change.clock + 1] += change.growth
        return np.cumsum(level)

    @cached_property
    def reserved_peak(self) -> int:
        """The highest reserved bytes at any time, also while a request is being served."""
        peak = level = self.reserved_at_start
        for change in self.changes:
            level += change.growth
            peak = max(peak, level)
        return peak

    @property
    def reserved_peak_recorded(self) -> int | None:
        """The highest recorded reserved bytes; None if the trace does not record them."""
        reserved = self.source.events.reserved[self.source.events.device == self.device]
        start = self.source.devices[self.device].reserved_at_start
        peaks = [int(reserved.max(initial=-1)), -1 if start is None else start]
        return max(peaks) if max(peaks) >= 0 else None

    @cached_property
    def reserved_misses(self) -> Int64:
        """Events (allocations, completed frees) after which the reserved bytes differ from the recorded."""
        events = self.source.events
        comparable = (events.device == self.device) & (events.reserved >= 0)
        comparable &= (events.kind == Kind.ALLOC) | (events.kind == Kind.FREE_COMPLETED)
        rows = np.flatnonzero(comparable[: self.end])
        wrong: Int64 = rows[events.reserved[rows] != self.reserved[rows + 1]]
        return wrong

    @cached_property
    def first_miss(self) -> FirstMiss | None:
        """The first allocation at another address than recorded; None also if nothing can be compared."""
        missed = np.flatnonzero(~self.exact)
        if not self.follows_record or not len(missed):
            return None
        row = int(missed[0])
        event = int(self.allocations[row])
        why = [sentence for clock, sentence in self.surprises if clock <= event]
        return FirstMiss(
            event,
            int(self.source.events.bytes[event]),
            int(self.source.events.address[event]),
            int(self.address[row]),
            why[-1] if why else "another free block fits best",
        )


def replay(
    trace: MemoryTrace,
    device: int,
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
    *,
    recorded: bool | None = None,
) -> Replay:
    """Replay a device's events through a simulated allocator, from the state in which the trace begins.

    Args:
        trace: any trace. The blocks and segments at its start stay as they are: other settings apply from
            the first event on.
        settings: of the allocator; the recorded ones if None.
        capacity: total bytes that the allocator can reserve; None for no limit.
        recorded: whether to follow the recording: segments at the recorded addresses, and no memory where
            there was none. It is never followed if it has no segments. None: follow it if neither settings
            nor a capacity are given.

    Raises:
        MemPluginError: the trace's own settings cannot be simulated.
    """
    follow = settings is None and capacity is None if recorded is None else recorded
    follow = follow and trace.records_segments(device)
    chosen = recorded_settings(trace) if settings is None else settings
    result = _with_longer_blocks(_replay(trace, device, chosen, capacity, follow))
    if result.first_miss is None:
        return result
    other = _replay(trace, device, chosen, capacity, follow, by_age=False)  # recorded by an older PyTorch
    return max(result, other, key=lambda candidate: candidate.exact_addresses)


def _with_longer_blocks(result: Replay) -> Replay:
    """Replay again as long as a request that went elsewhere tells of a longer block at the start.

    One replay more for each such block, `MOST_LONGER` at the most.
    """
    trace, device, least = result.source, result.device, dict[int, int]()
    for _ in range(MOST_LONGER):
        miss = result.first_miss
        if miss is None:
            break
        request = result.settings.rounded(miss.bytes)
        longer = longer_block(trace, device, miss.simulated_address, miss.event, request)
        if longer is None:
            break
        least[longer[0]] = longer[1]
        settings, capacity, follows = result.settings, result.capacity, result.follows_record
        again = _replay(trace, device, settings, capacity, follows, least=least)
        if again.exact_addresses <= result.exact_addresses:
            break
        result = again
    return result


def _replay(
    trace: MemoryTrace,
    device: int,
    settings: AllocatorSettings,
    capacity: int | None,
    follow: bool,
    *,
    by_age: bool = True,
    least: Mapping[int, int] = MappingProxyType({}),
) -> Replay:
    """Replay once. `by_age`, `least`: see `CachingAllocator` and `lay_out`."""
    outcome = run(trace, device, settings, capacity, follow, by_age, least)
    return Replay(
        **vars(outcome),
        source=trace,
        device=device,
        settings=settings,
        capacity=capacity,
        follows_record=follow,
    )
