"""Active, pending, reserved, pools and fragmentation of histories that a person can draw on paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tb_memplugin.analysis.allocator import (
    AllocatorHistory,
    ReserveCurve,
    fragmentation,
    levels,
    peak_split,
    pools,
    sampled_events,
    split_moments,
)
from tb_memplugin.analysis.allocator_state import device_state
from tb_memplugin.analysis.columns import Cuts, event_cuts, time_cuts
from tb_memplugin.analysis.curves import curve
from tb_memplugin.analysis.layout import Placement, pending_since
from tb_memplugin.analysis.moments import moment
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.trace import Device, Kind, MemoryTrace
from tests.analysis.histories import K, M, allocator_trace
from tests.traces import EPOCH, MICROSECOND, trace


def reserve_of(history: MemoryTrace) -> list[int]:
    reserved = history.reserved(0)
    assert reserved is not None
    return reserved.tolist()


def test_the_whole_state_at_a_failed_request_is_one_call() -> None:
    history = allocator_trace("held 16M 2M", "alloc 16M 600", "free_requested 16M 600", "oom 3M 90M")
    state = device_state(history, 0, 2)
    assert (state.name, state.event) == ("cuda:0", 2)
    assert (state.allocated_bytes, state.pending_bytes, state.active_bytes) == (0, 600, 600)
    assert (state.rounded_bytes, state.reserved_bytes, state.failed_requests) == (1024, 2 * M, 1)
    assert [segment.bytes for segment in state.segments or ()] == [2 * M]
    assert [report.requested_bytes for report in state.ooms] == [90 * M]


def test_a_block_is_pending_from_its_request_to_its_completed_free() -> None:
    found = levels(
        allocator_trace(
            "held 16M 2M",
            "alloc 16M 600",
            "free_requested 16M 600",
            "alloc 17M 100",
            "free_completed 16M 600",
        ),
        0,
    )
    assert found.active.tolist() == [0, 600, 600, 700, 100]
    assert found.pending.tolist() == [0, 0, 600, 600, 0]
    assert found.allocated.tolist() == [0, 600, 0, 100, 100]
    assert found.reserved is not None
    assert found.reserved.tolist() == [2 * M] * 5


def test_a_free_completed_without_its_request_was_requested_before_the_window() -> None:
    found = levels(
        allocator_trace(
            "live 16M 600",
            "live 17M 30",
            "free_completed 16M 600",
            "free_requested 17M 30",
            "free_completed 17M 30",
        ),
        0,
    )
    assert found.pending.tolist() == [600, 0, 30, 0]


def test_a_block_that_ends_without_a_completed_free_was_not_pending_before() -> None:
    found = levels(allocator_trace("live 16M 600", "alloc 16M 7", "free_requested 16M 7"), 0)
    assert (found.active.tolist(), found.pending.tolist()) == ([600, 7, 7], [0, 0, 7])


def test_the_start_state_says_itself_what_was_pending() -> None:
    found = levels(allocator_trace("live 16M 600 pending=1", "live 17M 30", "alloc 18M 5"), 0)
    assert (found.pending.tolist(), found.allocated.tolist()) == ([600, 600], [30, 35])


def test_a_source_that_writes_no_requests_has_nothing_pending() -> None:
    found = levels(allocator_trace("live 16M 600", "free_completed 16M 600"), 0)
    assert found.pending.tolist() == [0, 0]


def test_a_request_counts_for_the_block_of_its_time_at_an_address_that_is_used_again() -> None:
    history = allocator_trace(
        "alloc 16M 1", "free_requested 16M 1", "free_completed 16M 1", "alloc 16M 2", "alloc 17M 9"
    )
    assert pending_since(history, 0).tolist() == [1, 5, 5]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=30))
def test_what_is_pending_equals_a_plain_replay(happened: list[tuple[int, int]]) -> None:
    # Each draw moves one of three addresses of one of two devices on: alloc, request, completed, alloc...
    words, age = ("alloc", "free_requested", "free_completed"), dict.fromkeys(happened, 0)
    lines, expected = [], [0]
    for home in happened:
        lines.append(f"{words[age[home] % 3]} {16 + home[0]}M {8 ** home[0]} device={home[1]}")
        age[home] += 1
        waits = [place for place, count in age.items() if count % 3 == 2 and place[1] == 0]
        expected.append(sum(8**place for place, _ in waits))
    assert levels(allocator_trace("live 90M 5 device=1", *lines), 0).pending.tolist() == expected


def test_devices_do_not_share_what_is_pending() -> None:
    history = allocator_trace(
        "alloc 16M 10", "alloc 16M 20 device=1", "free_requested 16M 20 device=1", "alloc 18M 1"
    )
    assert levels(history, 0).pending.tolist() == [0, 0, 0, 0, 0]
    assert levels(history, 1).pending.tolist() == [0, 0, 0, 20, 20]


def test_the_reserve_moves_with_whole_segments_and_with_mapped_parts() -> None:
    history = allocator_trace(
        "held 16M 2M", "segment_alloc 32M 20M", "map 64M 4M", "unmap 66M 2M", "segment_free 32M 20M"
    )
    assert reserve_of(history) == [2 * M, 22 * M, 26 * M, 24 * M, 4 * M]


def test_the_reserve_of_before_is_that_of_the_first_event_where_nothing_else_tells() -> None:
    assert reserve_of(trace("alloc 5 a device=cuda:0 reserved=70", "free a reserved=90")) == [70, 70, 90]
    assert trace("alloc 5 a").reserved(0) is None


def test_a_device_without_events_keeps_the_reserve_it_had() -> None:
    history = allocator_trace("held 16M 2M", "alloc 16M 1 device=1")
    assert reserve_of(history) == [2 * M, 2 * M]


def test_the_two_measures_of_fragmentation() -> None:
    # 2 MiB: [512 K used][512 K free][512 K used][512 K free]; the first is pending, so not allocated.
    history = allocator_trace("held 16M 2M", "live 16M 512K pending=1", "live 17M 512K")
    found = fragmentation(history, 0, -1)
    assert (found.reserved_bytes, found.allocated_bytes, found.unused) == (2 * M, 512 * K, 0.75)
    assert (found.free_bytes, found.largest_free_bytes, found.split) == (M, 512 * K, 0.5)


def test_fragmentation_says_nothing_that_is_not_told() -> None:
    found = fragmentation(trace("alloc 5 a device=cuda:0 reserved=20"), 0, 0)
    assert (found.unused, found.free_bytes, found.largest_free_bytes, found.split) == (0.75, None, None, None)
    bare = fragmentation(trace("alloc 5 a"), 0, 0)
    assert (bare.reserved_bytes, bare.unused, bare.allocated_bytes) == (None, None, 5)


def test_nothing_is_split_where_nothing_is_free() -> None:
    found = fragmentation(allocator_trace("held 16M 2M", "live 16M 2M rounded=2097152"), 0, -1)
    assert (found.free_bytes, found.split, found.unused) == (0, None, 0)


def test_pools_and_streams_are_told_apart_and_sum_to_the_device() -> None:
    history = allocator_trace(
        "held 16M 2M",
        "held 32M 20M pool=1",
        "held 64M 2M stream=1",
        "live 16M 600 rounded=1024",
        "live 32M 2M pool=1",
        "alloc 17M 100",
        "free_requested 16M 600",
    )
    found = pools(history, 0, 1)
    assert [(p.pool, p.stream) for p in found] == [
        ("private (7, 1)", "default stream"),
        ("default", "default stream"),
        ("default", "stream 0xabc0"),
    ]
    graph, default, other = found
    assert (default.allocated_bytes, default.pending_bytes, default.active_bytes) == (100, 600, 700)
    assert (default.rounded_bytes, default.by_rule_bytes, default.rounded_exact) == (1024 + 512, 512, False)
    assert (default.reserved_bytes, default.segments, default.free_bytes) == (2 * M, 1, 2 * M - 1536)
    assert default.largest_free_bytes == M - 512
    assert (graph.allocated_bytes, graph.rounded_bytes, graph.free_bytes) == (2 * M, 2 * M, 18 * M)
    assert (other.active_bytes, other.rounded_exact, other.largest_free_bytes) == (0, True, 2 * M)
    assert sum(p.active_bytes for p in found) == history.live(0)[2]
    assert all(p.reserved_bytes == p.rounded_bytes + (p.free_bytes or 0) for p in found)


def test_a_block_counts_where_its_segment_does() -> None:
    history = allocator_trace("held 16M 2M pool=1 stream=1", "live 16M 600 pool=-1 stream=-1")
    (found,) = pools(history, 0, -1)
    assert (found.pool, found.stream, found.active_bytes) == ("private (7, 1)", "stream 0xabc0", 600)


def test_without_segments_pools_tell_blocks_alone() -> None:
    (found,) = pools(trace("start 700 w device=cuda:0", "alloc 5 a device=cuda:0"), 0, 0)
    assert (found.pool, found.stream, found.active_bytes) == ("(not known)", "(not known)", 705)
    assert (found.rounded_bytes, found.by_rule_bytes) == (1024 + 512, 1536)
    assert (found.reserved_bytes, found.segments, found.free_bytes, found.largest_free_bytes) == (None,) * 4


def test_an_empty_device_has_no_pools() -> None:
    assert pools(allocator_trace("alloc 16M 1 device=1"), 0, 0) == ()


def test_the_peak_is_what_was_there_and_what_came() -> None:
    found = peak_split(trace("start 400 w", "start 50 x", "alloc 100 a", "free x", "alloc 70 b", "free a"), 0)
    assert (found.event, found.bytes, found.before_bytes, found.came_bytes) == (2, 570, 400, 170)


def unused_columns(history: MemoryTrace, t0_ns: int, t1_ns: int, columns: int) -> list[float]:
    unused = AllocatorHistory(history, 0).curve(time_cuts(history, t0_ns, t1_ns, columns)).unused
    assert unused is not None
    return unused.tolist()


def test_columns_keep_the_highest_unused_share() -> None:
    # Of 2 MiB: 1 MiB used, then all, then none.
    history = allocator_trace(
        "held 16M 2M", "alloc 16M 1M", "alloc 17M 1M", "free_completed 16M 1M", "free_completed 17M 1M"
    )
    assert unused_columns(history, EPOCH, EPOCH + 4 * MICROSECOND, 2) == [1.0, 1.0]
    assert unused_columns(history, EPOCH, EPOCH + 4 * MICROSECOND, 4) == [1.0, 0.5, 0.5, 1.0]
    moments = split_moments(Placement(history, 0), time_cuts(history, EPOCH, EPOCH + 4 * MICROSECOND, 2))
    assert moments == ((3, 0.0),)  # after event 1 nothing is free


def test_no_more_moments_are_sampled_than_asked() -> None:
    history = allocator_trace("held 16M 100M", *[f"alloc {16 + 2 * place}M 600" for place in range(50)])
    cuts = time_cuts(history, EPOCH, EPOCH + 50 * MICROSECOND, 50)
    assert len(sampled_events(cuts, moments=7)) == 7


def test_a_device_without_a_reserve_has_no_unused_share() -> None:
    history = trace("alloc 5 a")
    assert AllocatorHistory(history, 0).unused is None


def test_a_reserve_of_nothing_has_no_share() -> None:
    history = allocator_trace("segment_alloc 16M 2M", devices=(Device("cuda:0", reserved_at_start=0),))
    assert history.events.kind[0] == Kind.SEGMENT_ALLOC
    unused = unused_columns(history, EPOCH - MICROSECOND, EPOCH + MICROSECOND, 2)
    assert np.isnan(unused[0])
    assert unused[1] == 1.0


def test_every_view_tells_the_same_reserve_where_only_segments_tell_that_of_the_start() -> None:
    history = allocator_trace("held 16M 2M", "segment_alloc 32M 20M", devices=(Device("cuda:0"),))
    assert reserve_of(history) == [2 * M, 22 * M]
    assert moment(history, 0, -1).reserved == 2 * M
    assert step_stats(history, 0)[0].peak_reserved_bytes == 22 * M
    drawn = curve(history, 0, EPOCH - MICROSECOND, EPOCH + MICROSECOND, 2)
    assert drawn.reserved is not None
    assert drawn.reserved.tolist() == [2 * M, 22 * M]


def test_an_event_that_tells_no_reserve_leaves_it_as_it_was() -> None:
    history = trace("alloc 5 a device=cuda:0 reserved=70", "alloc 5 b device=cuda:0")
    assert history.events.reserved.tolist() == [70, -1]
    assert moment(history, 0, 1).reserved == 70


def history() -> MemoryTrace:
    """Alive after each event: 1, 3, 3 (2 of them pending), 1 KiB in 2 MiB; then 22 MiB are reserved."""
    return allocator_trace(
        "held 16M 2M",
        "alloc 16M 1K",
        "alloc 17M 2K",
        "free_requested 17M 2K",
        "free_completed 17M 2K",
        "segment_alloc 64M 20M",
    )


def drawn(trace: MemoryTrace, cuts: Cuts) -> ReserveCurve:
    return AllocatorHistory(trace, 0).curve(cuts)


def test_one_column_an_event() -> None:
    trace = history()
    got = drawn(trace, event_cuts(trace, 0, 5, 5))
    assert got.low.tolist() == [0, K, 3 * K, K, K]
    assert (got.allocated + got.pending).tolist() == [K, 3 * K, 3 * K, 3 * K, K]
    assert got.pending.tolist() == [0, 0, 0, 2 * K, 0]  # the first of equal moments counts
    assert got.reserved is not None
    assert got.reserved.tolist() == [2 * M, 2 * M, 2 * M, 2 * M, 22 * M]
    assert got.unused is not None
    assert got.unused[-1] == (22 * M - K) / (22 * M)


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 400])
def test_nothing_highest_or_lowest_is_lost(columns: int) -> None:
    trace = history()
    now = levels(trace, 0)
    for cuts in (
        event_cuts(trace, 0, 5, columns),
        time_cuts(trace, EPOCH - MICROSECOND, EPOCH + 6 * MICROSECOND, columns),
    ):
        got = drawn(trace, cuts)
        assert got.reserved is not None
        assert len(cuts) == columns + 1
        assert (got.allocated + got.pending).max() == now.active.max()
        assert got.low.min() == now.active.min()
        assert got.reserved.max() == 22 * M


def test_an_event_is_drawn_from_its_index_to_the_next() -> None:
    trace = history()
    cuts = event_cuts(trace, 0, 5, 50)
    got = drawn(trace, cuts)
    active = got.allocated + got.pending
    assert active[1:10].tolist() == [K] * 9
    assert active[11:20].tolist() == [3 * K] * 9
    assert active[31:40].tolist() == [K] * 9


def test_without_a_reserve_there_is_none() -> None:
    trace = allocator_trace("alloc 16M 1K")
    got = drawn(trace, event_cuts(trace, 0, 1, 2))
    assert got.unused is None or bool(np.isnan(got.unused).all())


def test_the_split_of_moments_is_the_fragmentation_then() -> None:
    trace = history()
    found = split_moments(Placement(trace, 0), event_cuts(trace, 0, 5, 5))
    assert [event for event, _ in found] == [0, 1, 2, 3, 4]
    for event, ratio in found:
        assert ratio == fragmentation(trace, 0, event).split
    assert sampled_events(event_cuts(trace, 0, 5, 5), moments=2).tolist() == [0, 4]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_free_after_many_events_is_what_each_layout_says(data: st.DataObject) -> None:
    """Segments come, go and expand; blocks are of any size, reach into the next, and lie outside of them."""
    lines, live, held = [], list[str](), list[str]()
    place, size = st.integers(16 * 8, 24 * 8), st.sampled_from([1, 600, 4 * K, 100 * K, 500 * K, 3 * M])
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(("alloc", "alloc", "free", "segment", "release")))
        if what == "alloc":
            live.append(f"{data.draw(place) * 128 * K} {data.draw(size)}")
            lines.append(f"alloc {live[-1]} rounded={data.draw(st.sampled_from([-1, 512, 2 * M]))}")
        elif what == "free" and live:
            lines.append(f"free_completed {live.pop(data.draw(st.integers(0, len(live) - 1)))}")
        elif what == "segment":
            kind = data.draw(st.sampled_from(("segment_alloc", "map")))
            held.append(f"{data.draw(st.integers(8, 12)) * 2}M {data.draw(st.sampled_from((2, 4)))}M")
            lines.append(f"{kind} {held[-1]}")
        elif held:
            lines.append(f"segment_free {held.pop()}")
    history = allocator_trace("held 16M 2M", *lines)
    events = np.unique(data.draw(st.lists(st.integers(-1, len(lines) - 1), min_size=1)))
    placement = Placement(history, 0)
    total, largest = placement.free_after(events)
    each = [placement.at(event).free_bytes for event in events.tolist()]
    assert total.tolist() == [free.sum() for free in each]
    assert largest.tolist() == [free.max(initial=0) for free in each]
