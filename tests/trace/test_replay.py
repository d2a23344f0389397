"""Pairing and levels: against values worked out by hand, and against a loop that cannot be wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import Device, Kind, MemoryTrace, StartState, Step, events, start_state
from tb_memplugin.trace.replay import address_order, match_frees, pair
from tb_memplugin.trace.tables import events as make_events
from tests.traces import trace


def test_live_bytes_rise_and_fall_with_each_event():
    found = trace("start 400 w", "alloc 100 a", "alloc 50 b", "free a", "free w")
    assert found.live(0).tolist() == [400, 500, 550, 450, 50]


def test_the_window_counts_from_zero_and_only_what_was_reported():
    found = trace("start 400 w", "alloc 100 a", "free w", "free a")
    assert found.window(0).tolist() == [0, 100, -300, -400]


def test_a_storage_of_the_start_state_that_dies_unreported_leaves_the_live_bytes_only():
    bare = events([10, 20], kind=[Kind.ALLOC, Kind.STORAGE_FREE], address=[1, 2], bytes=[100, 400])
    start = start_state([400], address=[2])
    found = MemoryTrace("test", bare, start, (Device("cpu"),), (Step(0, 0, 30),))
    assert found.live(0).tolist() == [400, 500, 100]
    assert found.window(0).tolist() == [0, 100, 100]


def test_of_start_blocks_at_one_address_only_the_last_is_alive():
    start = start_state([100, 20, 300, 4], address=[7, 7, 9, 9])
    found = MemoryTrace("x", make_events([10]), start, (Device("cpu"),), (Step(0, 0, 20),))
    assert found.live(0).tolist() == [24, 24]
    assert found.allocations.alive_at(-1, 0).tolist() == [1, 3]


def test_an_address_allocated_twice_was_freed_unseen():
    found = events(
        [1, 2, 3], kind=[Kind.ALLOC] * 2 + [Kind.FREE_COMPLETED], address=[7, 7, 7], bytes=[100, 30, 30]
    )
    blocks = pair(found, StartState())
    assert blocks.freed.tolist() == [1, 2]
    assert blocks.unseen_frees == 1


def test_a_free_of_nothing_known_is_kept_apart():
    found = events([1, 2], kind=[Kind.FREE_COMPLETED, Kind.ALLOC], address=[7, 8], bytes=[100, 30])
    assert pair(found, StartState()).unmatched_frees.tolist() == [0]


def test_the_same_address_on_two_devices_is_two_blocks():
    found = events(
        [1, 2, 3],
        kind=[Kind.ALLOC, Kind.ALLOC, Kind.FREE_COMPLETED],
        address=[7, 7, 7],
        bytes=[100, 30, 30],
        device=[0, 1, 1],
    )
    assert pair(found, StartState()).freed.tolist() == [3, 2]


def test_every_event_belongs_to_exactly_one_step():
    found = trace("alloc 1 a", "step 3", "alloc 2 b", "free a", "step 7", "free b")
    assert [step.number for step in found.steps] == [3, 7]
    assert [found.step_events(row) for row in range(2)] == [(0, 3), (3, 4)]
    assert [found.step_at(event).number for event in (-1, 0, 2, 3)] == [3, 3, 3, 7]


@pytest.mark.parametrize(("ask", "name"), [("step_row", 99), ("device_row", "cuda:7")])
def test_asking_for_what_was_not_recorded_names_what_was(ask, name):
    with pytest.raises(NotRecordedError, match=r"Choose one of: (0|cpu)"):
        getattr(trace("alloc 1 a"), ask)(name)


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="bytes"):
        make_events([1, 2], bytes=[1])
    with pytest.raises(TypeError, match="no column"):
        make_events([1, 2], colour=[1, 2])


operations = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 1), st.integers(1, 1000)), max_size=60
)
started = st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 5)), st.integers(1, 1000), max_size=4)


@given(started, operations)
def test_levels_equal_those_of_a_plain_loop(start, rows):
    """Any order of allocs and frees, matched or not, over few addresses on two devices."""
    live: list[dict[int, int]] = [{}, {}]
    for (device, address), size in start.items():
        live[device][address] = size
    expected = [[sum(live[device].values())] for device in range(2)]
    for is_alloc, address, device, size in rows:
        live[device].pop(address, None)
        if is_alloc:
            live[device][address] = size
        for each in range(2):
            expected[each].append(sum(live[each].values()))
    state = start_state(
        list(start.values()),
        device=[device for device, _ in start],
        address=[address + 1 for _, address in start],
    )
    found = MemoryTrace(
        "test",
        events(
            np.arange(len(rows)),
            kind=[Kind.ALLOC if row[0] else Kind.FREE_COMPLETED for row in rows],
            address=[row[1] + 1 for row in rows],
            device=[row[2] for row in rows],
            bytes=[row[3] for row in rows],
        ),
        state,
        (Device("a"), Device("b")),
        (Step(0, 0, 100),),
    )
    assert [found.live(device).tolist() for device in range(2)] == expected


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), st.integers(0, 40))
def test_address_order_is_a_stable_sort(addresses, shift):
    column = np.array(addresses, np.uint64) >> np.uint64(shift)
    assert address_order(column).tolist() == np.argsort(column, kind="stable").tolist()


def test_match_frees_of_nothing():
    empty = np.empty(0, np.uint64), np.empty(0, np.uint8), np.empty(0, bool)
    began, ended, unmatched = match_frees(*empty)
    assert len(began) == len(ended) == len(unmatched) == 0
