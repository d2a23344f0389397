"""Out of memory: each cause, in histories small enough to see it."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis.oom import oom_report, oom_reports
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import OutOfMemory, Segments
from tb_memplugin.trace.allocator import new_segment_bytes
from tests.analysis.histories import M, allocator_trace
from tests.snapshots import block, segment

# 100 MiB in five blocks of 20 MiB, of which the second and the fourth are free.
STRIPED = ("held 100M 100M", "live 100M 20M stack=0", "live 140M 20M stack=0", "live 180M 20M stack=1")
STACKS = (("grow a.py:1",), ("keep b.py:2",))


def test_memory_is_full() -> None:
    found = oom_report(allocator_trace(*STRIPED, "oom 3M 90M", "free_completed 100M 20M", stacks=STACKS))
    assert (found.device, found.event, found.cause) == ("cuda:0", 0, "full")
    assert (found.requested_bytes, found.new_segment_bytes, found.free_bytes) == (90 * M, 90 * M, 3 * M)
    assert (found.reserved_bytes, found.active_bytes, found.pending_bytes) == (100 * M, 60 * M, 0)
    assert (found.reserve_free_bytes, found.usable_free_bytes) == (40 * M, 40 * M)
    assert (found.largest_free_bytes, found.largest_usable_bytes) == (20 * M, 20 * M)
    assert found.why == (
        "PyTorch uses 60.00 MiB of the 100.0 MiB that it has reserved. The request needs one free block of "
        "90.00 MiB in the default pool for the default stream; the largest block that it could use has "
        "20.00 MiB, of 40.00 MiB free in all. The device had 3.00 MiB free. Memory is full: all free "
        "memory together is 47.00 MiB less than the request."
    )


def test_the_state_is_that_of_the_event_and_sums_to_what_was_active() -> None:
    found = oom_report(allocator_trace(*STRIPED, "oom 3M 90M", "free_completed 100M 20M", stacks=STACKS))
    assert [(part.key, part.bytes) for part in found.stacks] == [
        ("grow a.py:1", 40 * M),
        ("keep b.py:2", 20 * M),
    ]
    assert sum(part.bytes for part in found.parts) == found.active_bytes == 60 * M
    assert sum(pool.active_bytes for pool in found.pools) == 60 * M


def test_enough_is_free_but_not_in_one_piece() -> None:
    found = oom_report(allocator_trace(*STRIPED, "oom 3M 30M", stacks=STACKS))
    assert (found.cause, found.largest_usable_bytes) == ("fragmented", 20 * M)
    assert found.why.endswith("Fragmentation: enough memory is free, but not in one piece.")


def test_the_reserve_and_the_device_together_would_be_enough() -> None:
    assert oom_report(allocator_trace(*STRIPED, "oom 30M 70M", stacks=STACKS)).cause == "fragmented"
    assert oom_report(allocator_trace(*STRIPED, "oom 29M 70M", stacks=STACKS)).cause == "full"


@pytest.mark.parametrize("home", ["pool=1", "stream=1"])
def test_another_pool_or_stream_holds_a_block_that_would_do(home: str) -> None:
    found = oom_report(allocator_trace(*STRIPED, f"held 300M 80M {home}", "oom 3M 60M", stacks=STACKS))
    assert (found.cause, found.largest_usable_bytes, found.largest_free_bytes) == (
        "elsewhere",
        20 * M,
        80 * M,
    )
    assert found.why.endswith(
        "Enough memory is free, but 80.00 MiB of it belongs to other pools, streams or size classes."
    )


def test_other_pools_hold_enough_only_together_with_the_own_one() -> None:
    parts = (*STRIPED, "held 300M 30M pool=1")
    assert oom_report(allocator_trace(*parts, "oom 3M 73M", stacks=STACKS)).cause == "elsewhere"
    assert oom_report(allocator_trace(*parts, "oom 3M 74M", stacks=STACKS)).cause == "full"


def test_a_segment_that_expands_may_serve_any_size() -> None:
    found = oom_report(allocator_trace("map 16M 20M", "oom 0 600K"))
    assert found.largest_usable_bytes == 20 * M


def test_a_request_of_a_private_pool_cannot_use_the_default_one() -> None:
    found = oom_report(allocator_trace(*STRIPED, "oom 3M 20M pool=1", stacks=STACKS))
    assert (found.cause, found.pool, found.usable_free_bytes) == ("elsewhere", "private (7, 1)", 0)


def test_a_large_request_cannot_use_small_segments_nor_a_small_one_large_segments() -> None:
    large = oom_report(allocator_trace("held 16M 2M", "oom 0 1536K"))
    assert (large.largest_usable_bytes, large.largest_free_bytes, large.cause) == (0, 2 * M, "elsewhere")
    small = oom_report(allocator_trace("held 16M 20M", "oom 1M 600K"))
    assert (small.largest_usable_bytes, small.cause) == (0, "elsewhere")


def test_the_device_had_enough_so_a_limit_refused() -> None:
    found = oom_report(allocator_trace(*STRIPED, "oom 30M 30M", stacks=STACKS))
    assert found.cause == "limit"
    assert "set_per_process_memory_fraction" in found.why


def test_what_a_new_segment_takes_counts_not_what_was_asked_for() -> None:
    assert oom_report(allocator_trace("oom 3M 2M", "held 16M 2M")).cause != "limit"  # it takes 20 MiB
    sizes = [new_segment_bytes(size) for size in (1, M, M + 1, 10 * M - 1, 10 * M, 10 * M + 1)]
    assert [size // M for size in sizes] == [2, 2, 20, 20, 10, 12]


def test_a_block_that_would_do_was_not_split() -> None:
    found = oom_report(allocator_trace("held 100M 100M", "oom 3M 30M"))
    assert found.cause == "not split"
    assert "max_split_size_mb" in found.why


def test_without_segments_the_report_says_less() -> None:
    history = allocator_trace("live 16M 5M", "oom 3M 90M pool=-1 stream=-1", segments=Segments())
    found = oom_report(history)
    assert found.cause == "unknown"
    assert (found.reserve_free_bytes, found.usable_free_bytes, found.largest_usable_bytes) == (
        None,
        None,
        None,
    )
    assert found.why.endswith(
        "The request needs one free block of 90.00 MiB. The device had 3.00 MiB free. "
        "The recording does not show why the request failed."
    )


def test_a_device_that_never_reserved_anything_is_full_not_unknown() -> None:
    failed = {"action": "oom", "device_free": 3 * M, "size": 90 * M, "time_us": 1, "stream": 0}
    other = segment(block(1000, 512), total=512)
    trace = trace_from_snapshot({"segments": [other], "device_traces": [[], [failed]]}, "x")
    found = oom_report(trace)
    assert (found.device, found.cause, found.free_bytes, found.largest_free_bytes) == (
        "cuda:1",
        "full",
        3 * M,
        0,
    )
    assert found.why.endswith("all free memory together is 87.00 MiB less than the request.")


def test_free_bytes_that_are_not_told_are_not_taken_for_none() -> None:
    history = allocator_trace(*STRIPED, "oom 0 90M", stacks=STACKS)
    found = oom_report(history)
    assert (found.free_bytes, found.cause) == (None, "unknown")
    assert "How much the device had free is not known" in found.why
    fragmented = allocator_trace(*STRIPED, "oom 0 40M", stacks=STACKS)
    assert oom_report(fragmented).cause == "fragmented"


def test_each_failed_request_has_its_report() -> None:
    history = allocator_trace(
        *STRIPED, "oom 3M 90M", "live 900M 5 device=1", "oom 0 7M device=1", stacks=STACKS
    )
    assert [oom_report(history, number).requested_bytes // M for number in (0, 1)] == [90, 7]
    assert oom_report(history, 1).device == "cuda:1"


@pytest.mark.parametrize("number", [-1, 1])
def test_a_failed_request_that_is_not_there_is_refused(number: int) -> None:
    with pytest.raises(NotRecordedError, match="no out-of-memory event"):
        oom_report(allocator_trace("oom 3M 90M"), number)
    with pytest.raises(NotRecordedError, match="No request failed"):
        oom_report(allocator_trace("alloc 16M 1"))


def test_a_request_of_nothing_does_not_break_the_report() -> None:
    found = oom_report(allocator_trace("alloc 16M 5", "oom 0 0", ooms=(OutOfMemory(1, 0, None),)))
    assert found.requested_bytes == 0


def test_several_reports_are_each_as_if_asked_for_alone() -> None:
    lines = (*STRIPED, "oom 3M 90M", "free_completed 100M 20M", "oom 3M 70M", "oom 30M 70M")
    history = allocator_trace(*lines, stacks=STACKS)
    assert oom_reports(history, 0, [0, 2]) == (oom_report(history, 0), oom_report(history, 2))
    assert oom_reports(history, 0, []) == ()
