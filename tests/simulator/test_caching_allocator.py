"""Tests for each rule of the allocator; the first segment begins at 0, the next one 2 MiB after its end."""

import random

import pytest

from tb_memplugin.simulator.caching_allocator import Block
from tb_memplugin.trace import Kind
from tests.simulator.devices import K, M, allocator, placed, where
from tests.simulator.plain_allocator import PlainAllocator


def test_small_requests_share_a_segment_of_2_mib():
    made = allocator()
    assert where(*placed(made, 100, 600, 1)) == [(0, 512), (512, 1024), (1536, 512)]
    assert made.reserved == 2 * M


def test_large_requests_share_a_segment_of_20_mib():
    made = allocator()
    assert where(*placed(made, 3 * M, 5 * M)) == [(0, 3 * M), (3 * M, 5 * M)]
    assert made.reserved == 20 * M


def test_from_10_mib_on_a_request_has_a_segment_of_its_own():
    made = allocator()
    placed(made, 11 * M)
    assert made.reserved == 12 * M


def test_a_rest_of_up_to_1_mib_stays_with_a_large_block():
    whole, cut = allocator(), allocator()
    assert where(*placed(whole, 11 * M)) == [(0, 12 * M)]
    assert where(*placed(cut, 11 * M - 512)) == [(0, 11 * M - 512)]  # the rest is 1 MiB and 512 bytes


def test_a_rest_of_512_bytes_is_cut_off_a_small_block():
    made = allocator()
    blocks = placed(made, *[M - 512] * 2)
    assert where(*placed(made, 512, 512)) == [(2 * M - 1024, 512), (2 * M - 512, 512)]
    assert where(*blocks) == [(0, M - 512), (M - 512, M - 512)]
    assert made.reserved == 2 * M


def test_the_smallest_block_that_fits_is_taken():
    made = allocator()
    large, _, small, _ = placed(made, 6 * M, 2 * M, 4 * M, 2 * M)
    made.free(large)
    made.free(small)
    assert where(*placed(made, 2 * M)) == [(8 * M, 2 * M)]


def test_of_equal_blocks_the_lowest_is_taken():
    made = allocator()
    low, _, high, _ = placed(made, 4 * M, 2 * M, 4 * M, 2 * M)
    made.free(high)
    made.free(low)
    assert where(*placed(made, 4 * M)) == [(0, 4 * M)]


def test_a_freed_block_joins_its_free_neighbours():
    made = allocator()
    first, second, third, _ = placed(made, 4 * M, 4 * M, 4 * M, 8 * M)
    made.free(first)
    made.free(third)
    made.free(second)
    assert where(*placed(made, 12 * M)) == [(0, 12 * M)]
    assert made.reserved == 20 * M


def test_streams_do_not_share_blocks():
    made = allocator()
    (block,) = placed(made, 4 * M, stream=1)
    made.free(block)
    assert where(*placed(made, 4 * M, stream=2)) == [(22 * M, 4 * M)]
    assert where(*placed(made, 4 * M, stream=1)) == [(0, 4 * M)]


def test_a_block_that_waits_for_a_stream_is_neither_used_nor_joined():
    made = allocator()
    waits, other, _ = placed(made, 4 * M, 4 * M, 12 * M)
    ticket = made.defer_free(waits)
    made.free(other)
    assert where(*placed(made, 4 * M)) == [(4 * M, 4 * M)]
    assert made.complete(ticket) is None
    assert where(*placed(made, 2 * M)) == [(0, 2 * M)]


def test_a_failed_request_gives_back_unused_segments_and_is_tried_again():
    made = allocator(capacity=50 * M)
    unused, used = placed(made, 20 * M, 20 * M)
    made.free(unused)
    made.clock = 7
    assert where(*placed(made, 30 * M)) == [(44 * M, 30 * M)]
    assert [(change.clock, change.kind, change.bytes) for change in made.changes[2:]] == [
        (7, Kind.SEGMENT_FREE, 20 * M),
        (7, Kind.SEGMENT_ALLOC, 30 * M),
    ]
    assert (made.reserved, made.peak_reserved) == (50 * M, 50 * M)
    assert used.address == 22 * M


def test_a_segment_with_one_live_block_is_not_given_back():
    made = allocator(capacity=40 * M)
    large, _ = placed(made, 16 * M, 2 * M)  # segments of 16 MiB and of 20 MiB
    other, _ = placed(made, 10 * M, 2 * M)
    made.free(other)
    assert made.reserved == 36 * M
    assert made.malloc(30 * M) is None
    assert large.size == 16 * M


def test_out_of_memory_is_told_by_no_block():
    made = allocator(capacity=30 * M)
    assert made.malloc(31 * M) is None
    assert made.reserved == 0


def test_memory_that_waits_for_a_stream_is_freed_when_memory_runs_short():
    made = allocator(capacity=20 * M)
    (waits,) = placed(made, 20 * M)
    ticket = made.defer_free(waits)
    made.clock = 3
    placed(made, 18 * M)
    assert made.complete(ticket) == 3
    assert made.reserved == 18 * M


def test_the_cache_is_emptied_large_segments_first():
    made = allocator()
    for block in placed(made, 100, 30 * M, 12 * M):
        made.free(block)
    made.empty_cache()
    freed = [change.bytes for change in made.changes if change.kind == Kind.SEGMENT_FREE]
    assert freed == [12 * M, 30 * M, 2 * M]
    assert made.reserved == 0


def test_private_pools_have_blocks_of_their_own():
    made = allocator()
    (block,) = placed(made, 4 * M)
    made.free(block)
    assert where(*placed(made, 4 * M, pool=(0, 1))) == [(22 * M, 4 * M)]


def test_a_private_pool_keeps_its_segments_until_it_is_destroyed():
    made = allocator()
    (block,) = placed(made, 4 * M, pool=(0, 1))
    made.free(block)
    made.empty_cache()
    assert made.reserved == 20 * M
    made.destroyed.add((0, 1))
    made.empty_cache()
    assert made.reserved == 0


def test_blocks_of_the_split_limit_are_left_for_requests_of_it():
    made = allocator("max_split_size_mb:32")
    (block,) = placed(made, 40 * M)
    made.free(block)
    assert where(*placed(made, 20 * M)) == [(42 * M, 20 * M)]
    assert where(*placed(made, 36 * M)) == [(0, 40 * M)]  # taken whole: it is never split


@pytest.mark.parametrize(("held", "address"), [(58, 0), (60, 62 * M)])
def test_a_request_beyond_the_split_limit_takes_a_block_less_than_20_mib_larger(held, address):
    made = allocator("max_split_size_mb:32")
    (block,) = placed(made, held * M)
    made.free(block)
    assert placed(made, 40 * M)[0].address == address


def test_one_oversize_block_is_given_back_for_a_request_that_failed():
    made = allocator("max_split_size_mb:32", capacity=260 * M)
    for block in placed(made, 30 * M, 100 * M, 120 * M):  # 100 MiB are enough
        made.free(block)
    placed(made, 40 * M)
    freed = [change.bytes for change in made.changes if change.kind == Kind.SEGMENT_FREE]
    assert freed == [100 * M]


def test_several_oversize_blocks_are_given_back_the_largest_first():
    made = allocator("max_split_size_mb:32", capacity=170 * M)
    for block in placed(made, 30 * M, 40 * M, 44 * M, 50 * M):
        made.free(block)
    placed(made, 80 * M)
    freed = [change.bytes for change in made.changes if change.kind == Kind.SEGMENT_FREE]
    assert freed == [50 * M, 44 * M]


def test_no_more_than_the_allowed_share_of_the_device_is_reserved():
    made = allocator("per_process_memory_fraction:0.5", capacity=80 * M)
    placed(made, 30 * M)
    assert made.malloc(12 * M) is None
    placed(made, 10 * M)


def test_garbage_collection_gives_back_what_was_not_used_for_longest():
    # 100 MiB are allowed. Above 50 MiB, a request that finds no block frees old segments first.
    made = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:1.0", capacity=100 * M)
    old, young = placed(made, 20 * M, 20 * M)
    made.free(old)  # after 2 searches
    placed(made, 12 * M, stream=1)
    made.free(young)  # after 3
    placed(made, 30 * M)  # the 4th finds none: ages are 2 and 1, so the first is above the average
    freed = [(change.address, change.bytes) for change in made.changes if change.kind == Kind.SEGMENT_FREE]
    assert freed == [(0, 20 * M)]
    assert made.reserved == 62 * M


def test_garbage_is_left_where_no_share_was_set():
    made = allocator("garbage_collection_threshold:0.5", capacity=100 * M)
    (block,) = placed(made, 60 * M)
    made.free(block)
    placed(made, 30 * M, stream=1)
    assert made.reserved == 90 * M


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_an_allocator_does_that_looks_at_every_block(seed):
    chance = random.Random(seed)
    fast, plain = allocator(capacity=300 * M), PlainAllocator(capacity=300 * M)
    sizes = [300, 512, 4 * K, 700 * K, M, 3 * M, 5 * M, 9 * M, 11 * M, 24 * M + 100]
    live: list[tuple[Block, int]] = []
    for _ in range(600):
        if live and chance.random() < 0.45:
            gone, address = live.pop(chance.randrange(len(live)))
            fast.free(gone)
            plain.free(address)
        elif chance.random() < 0.01:
            fast.empty_cache()
            plain.empty_cache()
        else:
            size = chance.choice(sizes)
            block, expected = fast.malloc(size), plain.malloc(size)
            assert (None if block is None else block.address) == expected
            live += [(block, block.address)] if block is not None else []
        assert fast.reserved == plain.reserved
