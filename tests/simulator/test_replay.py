"""Tests for replays of small recordings, with addresses that can be drawn on paper."""

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator import AllocatorSettings, replay, simulated_trace
from tests.analysis.histories import allocator_trace
from tests.simulator.devices import M, reserved_misses
from tests.traces import trace as profile

STEP = (
    "segment_alloc 16M 20M",
    "alloc 16M 4M",
    "alloc 20M 8M",
    "free_requested 16M 4M",
    "free_completed 16M 4M",
    "alloc 16M 2M",
)


def test_a_recording_is_reproduced():
    done = replay(allocator_trace(*STEP), 0)
    assert (done.allocs, done.exact_addresses, done.first_miss) == (3, 3, None)
    assert done.address.tolist() == [16 * M, 20 * M, 16 * M]
    assert done.rounded.tolist() == [4 * M, 8 * M, 2 * M]
    assert done.reserved.tolist() == [0, 0] + [20 * M] * 5  # at the request that needed it
    assert (done.reserved_peak, done.reserved_peak_recorded) == (20 * M, 20 * M)
    assert (reserved_misses(done), done.surprises, done.end) == ([], (), 6)


def test_the_first_allocation_elsewhere_is_named():
    done = replay(allocator_trace(*STEP[:-1], "alloc 28M 2M"), 0)
    assert (done.allocs, done.exact_addresses) == (3, 2)
    assert done.first_miss is not None
    assert (done.first_miss.event, done.first_miss.bytes) == (5, 2 * M)
    assert (done.first_miss.recorded_address, done.first_miss.simulated_address) == (28 * M, 16 * M)
    assert done.first_miss.cause == "another free block fits best"


def test_a_segment_that_was_not_needed_is_a_miss_with_its_cause():
    done = replay(allocator_trace(*STEP, "segment_alloc 64M 20M", "alloc 64M 2M"), 0)
    assert done.first_miss is not None
    assert done.first_miss.event == 7
    what = "the recording has a SEGMENT_ALLOC of 20,971,520 bytes that did not happen"
    assert done.first_miss.cause == what
    assert reserved_misses(done) == [7]


def test_a_segment_that_is_not_recorded_is_a_miss_with_its_cause():
    done = replay(allocator_trace("segment_alloc 16M 20M", "alloc 16M 18M", "alloc 34M 4M"), 0)
    assert done.first_miss is not None
    what = "the simulation made a segment of 20,971,520 bytes, the recording has none"
    assert done.first_miss.cause == what


def test_addresses_are_made_up_below_those_of_the_upper_half():
    """A block that no segment has, where XPU's addresses are: 1 MiB above it, none is left."""
    highest = (1 << 64) - M
    done = replay(allocator_trace(f"alloc {highest} 4096", "alloc 16M 4M"), 0)
    assert done.allocs == 2
    assert max(done.address.tolist()) < 1 << 63


EQUAL_BLOCKS = (
    *("segment_alloc 64M 12M", "alloc 64M 12M", "segment_alloc 32M 12M", "alloc 32M 12M"),
    *("free_requested 32M 12M", "free_completed 32M 12M", "free_requested 64M 12M", "free_completed 64M 12M"),
)


@pytest.mark.parametrize("oldest_or_lowest", [64, 32])
def test_equal_blocks_are_taken_as_the_pytorch_that_recorded_takes_them(oldest_or_lowest):
    done = replay(allocator_trace(*EQUAL_BLOCKS, f"alloc {oldest_or_lowest}M 12M"), 0)
    assert (done.allocs, done.exact_addresses) == (3, 3)


@pytest.mark.parametrize(("first", "second"), [(16, 64), (64, 16)])
def test_of_equal_blocks_from_before_the_recording_the_recorded_one_is_taken(first, second):
    # The segment at 8 MiB is of the recording, so PyTorch 2.13 takes it last. Nobody knows the others' ages.
    events = ("segment_alloc 8M 12M", "alloc 8M 12M", "free_requested 8M 12M", "free_completed 8M 12M")
    taken = [f"alloc {address}M 12M" for address in (first, second, 8)]
    held = ("held 16M 12M", "live 16M 12M", "held 64M 12M", "live 64M 12M")
    freed = [f"free_{what} {at}M 12M" for at in (16, 64) for what in ("requested", "completed")]
    done = replay(allocator_trace(*held, *events[:2], *freed, *events[2:], *taken), 0)
    assert (done.allocs, done.exact_addresses) == (4, 4)


def test_requests_without_a_known_stream_come_from_the_pool_of_their_size():
    """A small block that was freed before the first large request does not decide that request's pool.

    Two MiB fill the first segment, and the third gets one of its own, though 16 MiB are free of the large.
    """
    small = [f"alloc {M} {name} device=cuda:0" for name in "cde"]
    done = replay(profile("alloc 512 a device=cuda:0", "free a", f"alloc {4 * M} b device=cuda:0", *small), 0)
    assert [(change.clock, change.bytes) for change in done.changes] == [(0, 2 * M), (2, 20 * M), (5, 2 * M)]


def test_what_was_there_before_the_window_is_laid_out_first():
    # 4 MiB are free, 2 live, 6 free, 8 live. 3 MiB fit the first gap best; then 5 MiB fit only the second.
    done = replay(
        allocator_trace("held 16M 20M", "live 20M 2M", "live 28M 8M", "alloc 16M 3M", "alloc 22M 5M"), 0
    )
    assert (done.exact_addresses, done.reserved_at_start) == (2, 20 * M)
    assert done.start_address.tolist() == [20 * M, 28 * M]


def test_a_rest_too_small_to_be_a_block_belongs_to_the_block_before_it():
    # After the live block of 19.5 MiB there is half a MiB, too small for a block.
    done = replay(
        allocator_trace(
            "held 16M 20M",
            f"live 16M {19 * M + M // 2}",
            "free_completed 16M 0",
            "alloc 16M 20M",
        ),
        0,
    )
    assert done.exact_addresses == 1
    assert done.start_rounded.tolist() == [20 * M]


def test_the_first_request_behind_a_block_tells_where_it_ends():
    # 2 MiB have half a MiB of rest with them, so 9.5 MiB are free: exactly what is asked for first.
    held = ("held 16M 20M", "live 16M 2M", "live 28M 8M")
    done = replay(
        allocator_trace(*held, "alloc 18944K 9728K", "free_completed 16M 0", "alloc 16M 2560K"),
        0,
    )
    assert done.exact_addresses == done.allocs == 2
    assert done.start_rounded.tolist() == [2 * M + M // 2, 8 * M]


@pytest.mark.parametrize(
    "events",
    [
        ("free_completed 16M 2M", "alloc 16M 2560K", "alloc 18944K 2M"),  # the gap begins at 16 MiB by then
        ("alloc 24M 2M",),  # no rest is so large: something is missing in the recording
    ],
)
def test_a_request_that_does_not_show_the_end_of_a_block_is_no_evidence(events):
    done = replay(allocator_trace("held 16M 20M", "live 16M 2M", "live 28M 8M", *events), 0)
    assert done.start_rounded.tolist() == [2 * M, 8 * M]


@pytest.mark.parametrize(
    ("request_kib", "exact", "rounded"),
    [
        (9 * 1024 + 768, 1, 28 * M - (9 * M + 768 * 1024) + 512 - 16 * M),  # the gap is 512 bytes too small
        (8 * 1024, 0, 2 * M),  # the rest would be 2 MiB: a block of its own
    ],
)
def test_a_request_that_went_elsewhere_tells_that_the_best_gap_was_too_small(request_kib, exact, rounded):
    # Without a rest, 10 MiB are free behind the first block, and 15 MiB in the other segment.
    held = ("held 16M 20M", "live 16M 2M", "live 28M 8M", "held 64M 30M", "live 64M 15M")
    done = replay(allocator_trace(*held, f"alloc 79M {request_kib}K"), 0)
    assert (done.exact_addresses, int(done.start_rounded[0])) == (exact, rounded)


def test_a_block_that_waits_for_a_stream_is_not_used_until_it_is_free():
    done = replay(
        allocator_trace(
            "held 16M 20M",
            "live 16M 4M pending=1",
            "live 20M 16M",
            "segment_alloc 64M 20M",
            "alloc 64M 4M",
            "free_completed 16M 4M",
            "alloc 16M 4M",
        ),
        0,
    )
    assert (done.exact_addresses, done.allocs) == (2, 2)


def test_a_free_that_is_completed_later_is_later():
    done = replay(
        allocator_trace(
            *STEP[:4],  # requested, not completed
            "alloc 28M 4M",
            "free_completed 16M 4M",
            "alloc 16M 4M",
        ),
        0,
    )
    assert done.exact_addresses == done.allocs == 4


def test_the_program_empties_the_cache():
    done = replay(
        allocator_trace(
            "held 16M 20M",
            "held 64M 12M",
            "live 64M 12M",
            "segment_free 16M 20M",
            "free_completed 64M 12M",
            "alloc 64M 12M",
        ),
        0,
    )
    assert (done.exact_addresses, done.surprises) == (1, ())
    assert done.reserved.tolist() == [32 * M] + [12 * M] * 3


def test_a_request_fails_at_first_and_then_finds_memory():
    done = replay(
        allocator_trace("held 16M 20M", "segment_free 16M 20M", "segment_alloc 64M 30M", "alloc 64M 30M"),
        0,
    )
    assert (done.exact_addresses, done.surprises, done.reserved_peak) == (1, (), 30 * M)


def test_the_cache_was_emptied_before_a_request_that_would_have_found_a_block():
    done = replay(
        allocator_trace("held 16M 20M", "segment_free 16M 20M", "segment_alloc 64M 20M", "alloc 64M 4M"), 0
    )
    assert (done.exact_addresses, done.surprises) == (1, ())


def test_garbage_collection_frees_what_the_recording_freed():
    # 20 MiB of the first segment are free, and all of the second; only the first went before the third came.
    freed = [f"free_{what} {at} 20M" for at in ("16M", "64M") for what in ("requested", "completed")]
    held = ("segment_alloc 16M 20M", "alloc 16M 20M", "segment_alloc 64M 20M", "alloc 64M 20M")
    later = ("segment_free 16M 20M", "segment_alloc 128M 40M", "alloc 128M 40M", "alloc 64M 20M")
    history = allocator_trace(*held, *freed, *later)
    done = replay(history, 0, AllocatorSettings.from_conf("garbage_collection_threshold:0.5"), recorded=True)
    assert (done.allocs, done.exact_addresses, done.surprises) == (4, 4, ())
    surprise = "the simulation released 20,971,520 bytes at 0x4000000, the recording did not"
    assert (10, surprise) in replay(history, 0).surprises  # without a threshold, all went


def test_a_segment_that_could_not_have_been_given_back_is_told():
    done = replay(allocator_trace("held 16M 20M", "live 16M 2M", "segment_free 16M 20M", "alloc 18M 2M"), 0)
    assert done.surprises == (
        (1, "the recording has a SEGMENT_FREE of 20,971,520 bytes that did not happen"),
    )


def test_what_a_failed_request_waited_for_was_not_there_when_it_looked():
    # A request for 8 MiB finds neither a block nor memory. It waits until 10 MiB are free, then gets memory.
    done = replay(
        allocator_trace(
            "held 16M 20M",
            "live 16M 10M pending=1",
            "live 26M 10M",
            "free_completed 16M 10M",
            "segment_alloc 96M 20M",
            "alloc 96M 8M",
            "alloc 16M 10M",
        ),
        0,
    )
    assert (done.exact_addresses, done.surprises) == (2, ())


def test_a_failed_request_of_the_record_fails_here():
    done = replay(allocator_trace("held 16M 20M", "live 16M 20M", "oom 100 30M"), 0)
    assert (done.rescued, done.failure, done.surprises) == ((), None, ())


def test_a_recording_with_segments_that_expand():
    done = replay(
        allocator_trace(
            "map 100M 20M",
            "alloc 100M 6M",
            "map 120M 20M",
            "alloc 106M 30M",
            "free_completed 100M 6M",
            "free_completed 106M 30M",
            "unmap 100M 40M",
            "map 300M 20M",
            "alloc 300M 2M",
        ),
        0,
    )
    assert (done.exact_addresses, done.surprises) == (3, ())
    assert done.reserved_peak == 40 * M


def test_segments_that_expand_were_there_before():
    # One segment has two mapped ranges and a hole of one page; the hole is mapped before the end grows.
    done = replay(
        allocator_trace(
            "held 100M 20M expandable=1",
            "held 140M 20M expandable=1",
            "live 100M 18M",
            "live 140M 20M",
            "map 120M 20M",
            "alloc 118M 12M",
            "map 160M 20M",
            "alloc 160M 15M",
        ),
        0,
    )
    assert (done.exact_addresses, done.surprises) == (2, ())


def test_the_addresses_of_a_segment_that_is_gone_tell_nothing_of_its_pool():
    # The program empties the cache. The 2M are a page of the small pool; the large request that has the
    # address later got pages of its own.
    trace = allocator_trace(
        "held 100M 2M expandable=1",
        "held 16M 2M",
        "live 16M 512",
        "unmap 100M 2M",
        "free_completed 16M 512",
        "map 100M 20M stream=1",
        "alloc 100M 4M stream=1",
    )
    done = replay(trace, 0)
    assert (done.exact_addresses, done.failure, done.surprises) == (1, None, ())


def test_pools_and_streams_are_those_of_the_record():
    done = replay(
        allocator_trace(
            "held 16M 20M",
            "segment_alloc 64M 20M stream=1",
            "alloc 64M 2M stream=1",
            "segment_alloc 96M 20M pool=1",
            "alloc 96M 2M pool=1",
            "alloc 16M 2M",
        ),
        0,
    )
    assert done.exact_addresses == 3


def test_a_private_pool_keeps_its_segments_until_the_record_gives_one_back():
    done = replay(
        allocator_trace(
            "held 16M 20M pool=1",
            "held 64M 20M",
            "segment_free 64M 20M",
            "alloc 16M 4M pool=1",
            "free_completed 16M 4M",
            "segment_free 16M 20M pool=1",
            "segment_alloc 96M 20M pool=1",
            "alloc 96M 4M pool=1",
        ),
        0,
    )
    assert (done.exact_addresses, done.surprises) == (2, ())
    assert [(change.clock, change.address // M) for change in done.changes] == [(1, 64), (5, 16), (5, 96)]
    assert done.reserved.tolist() == [40 * M, 40 * M, 20 * M, 20 * M, 20 * M, 20 * M, 20 * M]


def test_what_if_the_device_were_smaller():
    done = replay(allocator_trace(*STEP, "segment_alloc 64M 30M", "alloc 64M 30M"), 0, capacity=40 * M)
    assert done.failure is not None
    assert (done.failure.event, done.failure.requested_bytes) == (7, 30 * M)
    assert (done.failure.reserved_bytes, done.failure.live_bytes) == (20 * M, 10 * M)
    assert (done.end, done.allocs, done.reserved_peak) == (7, 3, 20 * M)
    assert replay(done.source, 0, capacity=50 * M).failure is None


def test_what_a_request_freed_before_it_failed_is_not_in_the_reserved_bytes_before_it():
    trace = allocator_trace("held 16M 20M", "alloc 16M 4M", "free_completed 16M 4M", "alloc 64M 30M")
    done = replay(trace, 0, capacity=25 * M)
    assert done.failure is not None
    assert (done.end, done.failure.reserved_bytes) == (2, 0)
    assert done.reserved.tolist() == [20 * M, 20 * M, 20 * M]
    simulated = simulated_trace([done])
    assert simulated.events.reserved.tolist()[-1] == 0


def test_what_if_what_is_live_at_the_start_does_not_fit():
    done = replay(allocator_trace("held 16M 20M", "live 16M 2M", *STEP), 0, capacity=10 * M)
    assert done.failure is not None
    assert (done.failure.event, done.end, done.allocs) == (-1, 0, 0)


def test_on_a_smaller_device_unused_segments_of_the_start_go_first():
    done = replay(allocator_trace("held 16M 20M", "held 64M 20M", "live 64M 2M"), 0, capacity=20 * M)
    assert done.failure is None
    assert (done.reserved.tolist(), done.reserved_peak) == ([20 * M], 40 * M)
    assert [(change.clock, change.address) for change in done.changes] == [(-1, 16 * M)]


def test_what_if_a_failed_request_had_found_memory():
    recording = allocator_trace("held 16M 20M", "live 16M 20M", "oom 100 30M", "free_completed 16M 20M")
    assert replay(recording, 0, capacity=60 * M).rescued == (0,)
    assert replay(recording, 0, capacity=40 * M).rescued == ()


def test_what_if_segments_expanded():
    # 6 MiB are left of the first segment, too few for 9 MiB. With expandable segments, one segment holds all.
    recording = allocator_trace(
        "segment_alloc 100M 20M", "alloc 100M 14M", "segment_alloc 200M 20M", "alloc 200M 9M", "alloc 209M 9M"
    )
    done = replay(recording, 0, AllocatorSettings(expandable_segments=True))
    assert (done.address - done.address[0]).tolist() == [0, 14 * M, 23 * M]
    assert done.reserved_peak == 40 * M


def test_a_cache_that_the_program_emptied_is_emptied_with_other_settings_too():
    # The device provided 32 MiB later, so 12 MiB beside the 20 MiB were no reason to free a segment.
    emptied = ("held 16M 20M", "segment_free 16M 20M", "segment_alloc 64M 12M", "alloc 64M 12M")
    done = replay(allocator_trace(*emptied, "segment_alloc 96M 20M", "alloc 96M 20M"), 0, AllocatorSettings())
    assert done.reserved.tolist() == [20 * M, 0, 0, 12 * M, 12 * M, 32 * M]


def test_what_a_failed_request_gave_back_is_not_with_another_device():
    # 50 MiB were never reserved: the request found no memory. With more memory nothing has to be freed.
    recording = allocator_trace(
        "held 16M 20M", "segment_free 16M 20M", "segment_alloc 64M 30M", "alloc 64M 30M"
    )
    assert replay(recording, 0, capacity=60 * M).reserved.tolist() == [20 * M] * 3 + [50 * M]


def test_memory_that_waits_for_a_stream_is_freed_when_memory_runs_short():
    recording = allocator_trace(
        "segment_alloc 16M 20M",
        "alloc 16M 20M",
        "free_requested 16M 20M",
        "segment_alloc 64M 20M",
        "alloc 64M 20M",
        "free_completed 16M 20M",
        "alloc 16M 20M",
    )
    done = replay(recording, 0, capacity=30 * M)
    assert done.failure is not None  # at the last event: the second block is live
    assert done.failure.event == 6
    assert done.early == ((4, 5, 16 * M),)


def test_a_profile_without_segments_is_simulated_from_nothing():
    done = replay(profile("start 3000 w device=cuda:0", f"alloc {4 * M} a device=cuda:0", "free a"), 0)
    assert (done.follows_record, done.first_miss) == (False, None)
    assert (done.allocs, done.rounded.tolist()) == (1, [4 * M])
    assert (done.reserved_peak, done.reserved_peak_recorded) == (22 * M, None)


def test_settings_that_cannot_be_simulated_are_refused():
    recording = allocator_trace(*STEP, properties={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    with pytest.raises(MemPluginError, match="a different allocator"):
        replay(recording, 0)
    assert replay(recording, 0, AllocatorSettings()).allocs == 3
