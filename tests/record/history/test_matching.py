"""The same allocs and frees, told by the profiler and by the allocator, find each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.record.history.merge import match_events
from tb_memplugin.trace import Category, Device, Events, Kind, MemoryTrace, Step, events, start_state
from tests.read.snapshot.test_real import path_of, real
from tests.snapshots import load_snapshot
from tests.traces import EPOCH


def reused(shift_us: int, *, drop: tuple[int, ...] = ()) -> tuple[Events, Events]:
    """Twenty blocks one after the other at one address, 10 µs apart; the profile lacks some events."""
    kind = np.tile([Kind.ALLOC, Kind.FREE_REQUESTED], 20)
    time = EPOCH + 5_000 * np.arange(40)
    other = np.full(40, 0x9000, np.uint64)
    other[0] = 0x1000  # one alloc at an address of its own gives the clocks' difference
    told = events(time, kind=kind, address=other, bytes=np.full(40, 500))
    keep = np.setdiff1d(np.arange(40), drop)
    seen = np.where(kind == Kind.ALLOC, Kind.ALLOC, Kind.FREE_COMPLETED)[keep]
    profile = events(
        time[keep] + shift_us * 1_000, kind=seen, address=other[keep], bytes=np.full(len(keep), 512)
    )
    return profile, told


@pytest.mark.parametrize("shift_us", [0, 3, -40, 900_000])
def test_clocks_that_differ_do_not_matter(shift_us):
    profile, told = reused(shift_us)
    match = match_events(profile, 0, told, 0)
    assert match.snapshot.tolist() == list(range(40))
    assert match.later_ns == shift_us * 1_000


def test_one_address_reused_many_times_with_events_that_only_the_history_has():
    profile, told = reused(700, drop=(6, 7, 20, 21))
    match = match_events(profile, 0, told, 0)
    assert match.unseen.tolist() == [6, 7, 20, 21]
    assert match.snapshot.tolist() == [row for row in range(40) if row not in (6, 7, 20, 21)]
    assert match.out_of_order == 0


def stopped_at(row: int) -> tuple[Events, Events]:
    """The system stops the thread for 5 ms after the allocator wrote this event, before the profiler did."""
    profile, told = reused(0)
    late = 5_000_000 * (np.arange(40) >= row)
    times = replace(profile, time_ns=profile.time_ns + late)
    return times, replace(told, time_ns=told.time_ns + np.where(np.arange(40) == row, 0, late))


@pytest.mark.parametrize("row", [0, 11, 39])
def test_a_thread_that_the_system_stopped_between_the_two_reports_loses_no_event(row):
    profile, told = stopped_at(row)
    match = match_events(profile, 0, told, 0)
    assert match.snapshot.tolist() == list(range(40))


def test_a_far_event_out_of_order_is_another_one():
    profile, told = reused(0)
    address, time = told.address.copy(), told.time_ns.copy()
    address[6], time[34:] = 0x2000, time[34:] + 5_000_000
    other = address.copy()
    other[6], other[36] = 0x9000, 0x2000  # the profile has it 30 events later
    match = match_events(
        replace(profile, address=other, time_ns=time), 0, replace(told, address=address, time_ns=time), 0
    )
    assert 36 in match.missing
    assert 6 in match.unseen


def test_a_free_whose_address_was_guessed_is_found_by_its_size_and_time():
    profile, told = reused(0)
    address, size = told.address.copy(), told.bytes.copy()
    address[2:4], size[2:4] = 0x2000, 700
    other = address.copy()
    other[3] = 0x3000  # of two blocks of 1,024 bytes the wrong one
    rounded = np.where(size == 700, 1_024, 512)
    match = match_events(
        replace(profile, address=other, bytes=rounded), 0, replace(told, address=address, bytes=size), 0
    )
    assert match.snapshot.tolist() == list(range(40))


def test_frees_are_matched_where_requests_were_not_recorded():
    profile, told = reused(0)
    completed = replace(
        told, kind=np.where(told.kind == Kind.ALLOC, Kind.ALLOC, Kind.FREE_COMPLETED).astype(np.uint8)
    )
    assert len(match_events(profile, 0, completed, 0).missing) == 0


def test_of_nothing_with_nothing_is_nothing():
    none = events([])
    match = match_events(none, 0, none, 0)
    assert (len(match.profile), len(match.missing), len(match.unseen)) == (0, 0, 0)


def as_profiled(told: MemoryTrace, device: int, *, lose: float, seed: int) -> tuple[MemoryTrace, np.ndarray]:
    """What a profiler would have seen of a device: rounded sizes, frees as requested, one thread's events.

    Gives the profile and, for each of its events, the row in the snapshot that it is.
    """
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(
        (told.events.device == device)
        & ((told.events.kind == Kind.ALLOC) | (told.events.kind == Kind.FREE_REQUESTED))
    )
    rows = rows[(rng.random(len(rows)) >= lose) | (np.arange(len(rows)) == 0)]
    time = told.events.time_ns[rows] + 250_000_000 + rng.integers(0, 999, len(rows))
    seen = events(
        np.maximum.accumulate(time),
        kind=np.where(told.events.kind[rows] == Kind.ALLOC, Kind.ALLOC, Kind.FREE_COMPLETED),
        address=told.events.address[rows],
        bytes=-(-told.events.bytes[rows] // 512) * 512,
        category=np.full(len(rows), Category.ACTIVATION),
    )
    steps = (Step(0, int(time[0]), int(time[-1]) + 1),)
    name = told.devices[device].name
    return MemoryTrace("torch.profiler", seen, start_state([]), (Device(name),), steps), rows


@real
@pytest.mark.parametrize("number", ["01", "03", "07", "12", "20"])
@pytest.mark.parametrize("lose", [0.0, 0.02])
def test_real_histories_find_their_events_again(number, lose):
    told = load_snapshot(path_of(number))
    for device in range(len(told.devices)):
        profile, rows = as_profiled(told, device, lose=lose, seed=7)
        match = match_events(profile.events, 0, told.events, device)
        assert np.array_equal(rows[match.profile], match.snapshot)
        assert len(match.missing) <= len(rows) // 1000
