"""Tests for expandable segments on a device of 80 MiB: each has 100 MiB of addresses, the first from 0 on."""

import random
from itertools import pairwise

import pytest

from tb_memplugin.simulator.caching_allocator import FREE, LIVE, Block
from tb_memplugin.trace import Kind
from tests.simulator.devices import K, M, allocator, placed, where

CONF = "expandable_segments:True"


def mapped(made):
    return [(change.kind.name[8:], change.address, change.bytes) for change in made.changes]


def test_large_requests_map_pages_of_20_mib_one_behind_the_other():
    made = allocator(CONF, capacity=80 * M)
    assert where(*placed(made, 3 * M, 3 * M, 30 * M)) == [(0, 3 * M), (3 * M, 3 * M), (6 * M, 30 * M)]
    assert mapped(made) == [("MAP", 0, 20 * M), ("MAP", 20 * M, 20 * M)]


def test_small_requests_map_pages_of_2_mib_in_a_segment_of_their_own():
    made = allocator(CONF, capacity=80 * M)
    (large,) = placed(made, 3 * M)
    first, *_, last = placed(made, *[M] * 3)
    assert (large.address, first.address, last.address - first.address) == (0, 102 * M, 2 * M)
    assert mapped(made)[1:] == [("MAP", 102 * M, 2 * M), ("MAP", 104 * M, 2 * M)]


def test_a_rest_of_512_bytes_is_cut_off_a_large_block():
    made = allocator(CONF, capacity=80 * M)
    assert where(*placed(made, 20 * M - 512)) == [(0, 20 * M - 512)]


def test_a_block_of_a_segment_that_expands_is_no_one_s_once_segments_may_not():
    made = allocator(capacity=80 * M)
    made.simple = False  # as set in the replay of a recording with expandable segments
    home = made.home(3 * M)
    home.put(Block(100 * M, 20 * M, home, FREE, origin=100 * M))
    assert where(*placed(made, 3 * M)) == [(0, 3 * M)]  # in a new segment


def test_every_stream_has_a_segment_of_its_own():
    made = allocator(CONF, capacity=80 * M)
    placed(made, 3 * M)
    assert where(*placed(made, 3 * M, stream=5)) == [(102 * M, 3 * M)]


def test_emptying_the_cache_unmaps_whole_pages_only():
    made = allocator(CONF, capacity=80 * M)
    first, second, third = placed(made, 30 * M, 5 * M, 25 * M)
    made.free(first)
    made.empty_cache()
    assert mapped(made)[-1] == ("UNMAP", 0, 20 * M)  # the second block is at 30 to 35 MiB, in the second page
    assert made.reserved == 40 * M
    made.free(third)
    made.empty_cache()
    assert mapped(made)[-1] == ("UNMAP", 40 * M, 20 * M)
    made.free(second)
    made.empty_cache()
    assert (mapped(made)[-1], made.reserved) == (("UNMAP", 20 * M, 20 * M), 0)


def test_a_hole_is_mapped_again_before_the_end_grows():
    made = allocator(CONF, capacity=80 * M)
    first, _ = placed(made, 30 * M, 10 * M)
    made.free(first)
    made.empty_cache()  # leaves 10 MiB free after a hole of 20 MiB
    assert where(*placed(made, 25 * M)) == [(0, 25 * M)]
    assert mapped(made)[-1] == ("MAP", 0, 20 * M)


def test_a_request_larger_than_the_hole_goes_to_the_end():
    made = allocator(CONF, capacity=80 * M)
    first, _ = placed(made, 30 * M, 10 * M)
    made.free(first)
    made.empty_cache()
    assert where(*placed(made, 35 * M)) == [(40 * M, 35 * M)]


def test_a_block_that_cannot_grow_fits_better_than_a_smaller_one_that_can():
    made = allocator(CONF, capacity=80 * M)
    first, _ = placed(made, 8 * M, 6 * M)
    made.free(first)  # 8 MiB are between live blocks; 6 MiB are at the end, before 80 MiB unmapped
    assert where(*placed(made, 5 * M)) == [(0, 5 * M)]


def test_a_request_that_finds_no_memory_unmaps_what_is_free_and_tries_again():
    made = allocator(CONF, capacity=80 * M)
    first, _ = placed(made, 40 * M, 40 * M)
    made.free(first)
    (block,) = placed(made, 12 * M, stream=1)
    assert (block.address, made.reserved) == (102 * M, 60 * M)
    assert [kind for kind, *_ in mapped(made)[2:]] == ["UNMAP", "MAP"]


def test_out_of_memory():
    made = allocator(CONF, capacity=80 * M)
    placed(made, 70 * M)
    assert made.malloc(20 * M) is None
    assert made.reserved == 80 * M


def test_a_segment_without_memory_gives_its_addresses_back():
    made = allocator(CONF, capacity=80 * M)
    (block,) = placed(made, 40 * M)
    made.free(block)
    made.empty_cache()
    assert where(*placed(made, 5 * M)) == [(102 * M, 5 * M)]


def test_of_a_free_block_beyond_the_split_limit_pages_go_back():
    made = allocator(f"{CONF},max_split_size_mb:32", capacity=120 * M)
    first, _ = placed(made, 50 * M, 50 * M)
    made.free(first)
    placed(made, 36 * M, stream=1)
    assert ("UNMAP", 0, 40 * M) in mapped(made)


@pytest.mark.parametrize("conf", [CONF, f"{CONF},max_split_size_mb:20", "", "max_split_size_mb:20"])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_tile_what_is_reserved_whatever_happens(conf, seed):
    chance = random.Random(seed)
    made = allocator(conf, capacity=260 * M)
    live: list[Block] = []
    for _ in range(500):
        if live and chance.random() < 0.47:
            made.free(live.pop(chance.randrange(len(live))))
        elif chance.random() < 0.02:
            made.empty_cache()
        else:
            size = chance.choice([300, 4 * K, 700 * K, 3 * M, 9 * M, 24 * M + 100, 41 * M])
            block = made.malloc(size, stream=chance.choice([0, 0, 1]))
            live += [block] if block is not None else []
        free = [made.half((0, 0), small) for small in (True, False)]
        every = live + [block for pool in free for block in pool.in_order()]
        assert sum(block.size for block in every) == made.reserved <= 260 * M
        ends = sorted((block.address, block.address + block.size) for block in every)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert {block.state for block in live} <= {LIVE}
        assert {block.state for block in every[len(live) :]} <= {FREE}


def test_the_kinds_are_those_of_the_trace():
    made = allocator(CONF, capacity=80 * M)
    placed(made, 3 * M)
    assert made.changes[0].kind == Kind.SEGMENT_MAP
