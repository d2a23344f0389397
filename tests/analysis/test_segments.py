"""Segments and blocks at any moment: placed by hand, and against a loop that cannot be wrong."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tb_memplugin.analysis import segments as module
from tb_memplugin.analysis.layout import Layout, faults, layout, reserve
from tb_memplugin.analysis.segments import (
    ALLOCATED,
    FREE,
    PENDING,
    LiveBlocks,
    Pieces,
    SegmentState,
    free_histogram,
    pieces,
    segment_order,
    segments_at,
)
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.allocator import MOST_PIECES, rounded_by_rule
from tests.analysis.histories import K, M, allocator_trace


def drawn(segment: SegmentState) -> list[tuple[str, int, int]]:
    """State, offset and extent of each block."""
    return [(block.state, block.address - segment.address, block.extent_bytes) for block in segment.blocks]


def test_blocks_and_free_stretches_fill_a_segment() -> None:
    history = allocator_trace(
        "held 16M 2M stream=1", "live 16M 600 rounded=1024", "alloc 17M 512", "free_requested 16M 600"
    )
    (segment,) = segments_at(history, 0, 1)
    assert (segment.address, segment.bytes, segment.stream, segment.pool) == (
        16 * M,
        2 * M,
        "stream 0xabc0",
        "default",
    )
    assert drawn(segment) == [
        ("pending", 0, 1024),
        ("free", 1024, M - 1024),
        ("allocated", M, 512),
        ("free", M + 512, M - 512),
    ]
    first, _, second, last = segment.blocks
    assert (first.bytes, first.rounded_bytes, first.allocation) == (600, 1024, 0)
    assert (second.bytes, second.rounded_bytes, second.allocation) == (512, None, 1)
    assert (last.bytes, last.rounded_bytes, last.allocation) == (0, M - 512, -1)


def test_a_segment_without_blocks_is_one_free_stretch() -> None:
    (segment,) = segments_at(allocator_trace("held 16M 2M"), 0, -1)
    assert drawn(segment) == [("free", 0, 2 * M)]


def test_a_segment_that_a_block_fills_has_nothing_free() -> None:
    (segment,) = segments_at(allocator_trace("held 16M 20M", "live 16M 20M"), 0, -1)
    assert drawn(segment) == [("allocated", 0, 20 * M)]


def test_segments_come_and_go() -> None:
    history = allocator_trace(
        "held 16M 2M", "segment_alloc 32M 20M", "segment_free 16M 2M", "segment_free 32M 20M"
    )
    found = [[segment.address // M for segment in segments_at(history, 0, event)] for event in range(-1, 3)]
    assert found == [[16], [16, 32], [32], []]


def test_a_segment_that_expands_grows_at_its_end_and_loses_parts() -> None:
    history = allocator_trace("map 16M 20M", "map 36M 20M", "unmap 20M 4M", "map 20M 2M")
    found = [
        [(segment.address // M, segment.bytes // M) for segment in segments_at(history, 0, event)]
        for event in range(4)
    ]
    assert found == [[(16, 20)], [(16, 40)], [(16, 4), (24, 32)], [(16, 6), (24, 32)]]
    assert all(segment.expandable for segment in segments_at(history, 0, 3))


def test_neighbours_stay_apart_where_they_came_apart() -> None:
    whole = allocator_trace("segment_alloc 16M 2M", "segment_alloc 18M 2M")
    assert [segment.bytes for segment in segments_at(whole, 0, 1)] == [2 * M, 2 * M]
    mixed = allocator_trace("segment_alloc 16M 2M", "map 18M 2M", "segment_alloc 20M 2M")
    assert [segment.expandable for segment in segments_at(mixed, 0, 2)] == [False, True, False]
    streams = allocator_trace("map 16M 2M", "map 18M 2M stream=1")
    assert [segment.stream for segment in segments_at(streams, 0, 1)] == ["default stream", "stream 0xabc0"]


def test_a_part_of_unknown_pool_takes_it_from_its_neighbours() -> None:
    parts = ("map 16M 2M pool=-1", "map 18M 2M pool=1", "map 20M 2M pool=-1", "map 22M 2M pool=0")
    found = segments_at(allocator_trace(*parts, "map 64M 2M pool=-1"), 0, 4)
    assert [(segment.address // M, segment.pool) for segment in found] == [
        (16, "private (7, 1)"),
        (22, "default"),
        (64, "(not known)"),
    ]


def test_a_whole_segment_stays_one_though_others_lay_across_its_addresses_later() -> None:
    history = allocator_trace("segment_alloc 16M 20M", "segment_free 16M 20M", "segment_alloc 18M 2M")
    assert [segment.bytes // M for segment in segments_at(history, 0, 0)] == [20]
    assert [segment.bytes // M for segment in segments_at(history, 0, 2)] == [2]


def test_devices_have_segments_of_their_own() -> None:
    history = allocator_trace(
        "held 16M 2M", "held 16M 20M device=1", "segment_free 16M 2M", "live 16M 5 device=1"
    )
    assert segments_at(history, 0, 0) == ()
    assert [segment.bytes // M for segment in segments_at(history, 1, 0)] == [20]


def test_a_rest_too_small_to_be_a_block_belongs_to_the_block_before_it() -> None:
    # 19.5 MiB asked for: half a MiB is left, and large segments have no block of 1 MiB or less.
    found = layout(allocator_trace("held 16M 20M", "live 16M 19968K"), 0, -1)
    assert (found.extent.tolist(), found.free_bytes.tolist()) == ([20 * M], [])
    assert found.by_rule.tolist() == [True]


def test_a_rest_that_can_be_a_block_is_free() -> None:
    for lines, rest in (
        (("held 16M 20M", "live 16M 18944K"), 1536 * K),  # above 1 MiB
        (("held 16M 2M", "live 16M 900K"), 2 * M - 900 * K),  # small segments split down to 512 bytes
        (("held 16M 20M expandable=1", "live 16M 19968K"), 512 * K),  # and so do those that expand
        (("held 16M 20M", f"live 16M 19968K rounded={19968 * K}"), 512 * K),  # the file tells better
    ):
        assert layout(allocator_trace(*lines), 0, -1).free_bytes.tolist() == [rest]


def test_a_block_outside_every_segment_is_a_misfit() -> None:
    found = layout(
        allocator_trace("held 16M 2M", "live 8M 5", "live 16M 5", "live 18M 5", "live 90M 5"), 0, -1
    )
    assert (found.rows.tolist(), sorted(found.misfits.tolist())) == ([1], [0, 2, 3])


def test_overlapping_blocks_are_cut_and_counted() -> None:
    found = layout(
        allocator_trace("held 16M 2M", f"live 16M 1M rounded={2 * M}", f"live 17M 9 rounded={4 * M}"), 0, -1
    )
    assert (found.extent.tolist(), found.free_bytes.tolist(), found.overlaps) == ([M, M], [], 2)


def test_contradictions_of_segments_are_counted() -> None:
    found = reserve(allocator_trace("held 16M 4M", "map 18M 4M", "unmap 64M 2M"), 0)
    assert (found.doubled, found.strays) == (1, 1)
    assert found.bytes[found.freed > 0].sum() == 6 * M


def test_contradictions_are_told_in_sentences() -> None:
    history = allocator_trace(
        "held 16M 4M", "live 90M 1500", f"live 16M 9 rounded={8 * M}", "map 18M 4M", "unmap 64M 2M"
    )
    assert faults(history, 0, -1) == (
        "cuda:0: 1 live blocks (1,500 bytes) lie outside every segment.",
        "cuda:0: 1 live blocks overlap the next one or the end of their segment; cut off there.",
        "cuda:0: 1 address ranges were reserved although they already were.",
        "cuda:0: 1 address ranges were released although they were not reserved.",
    )
    assert faults(allocator_trace("held 16M 4M", "live 16M 9"), 0, -1) == ()
    assert faults(allocator_trace("live 16M 9"), 0, -1) == ()  # without segments nothing can lie outside


def test_a_segment_at_the_end_of_all_addresses_does_not_wrap() -> None:
    history = allocator_trace(f"held {(1 << 64) - 4096} 2M", f"live {(1 << 64) - 4096} 100")
    (segment,) = segments_at(history, 0, -1)
    assert (segment.bytes, segment.blocks[0].state) == (4095, "allocated")


def test_segments_without_sense_are_refused_and_do_not_eat_the_memory() -> None:
    # Half of the maps cut the addresses into 6000 pieces, the others cover all of them.
    narrow = [f"map {16 + 2 * place}M 1M" for place in range(3000)]
    wide = ["map 1M 20000M"] * 6000
    assert MOST_PIECES < 6000 * 6000
    with pytest.raises(UnreadableFileError, match="pieces"):
        reserve(allocator_trace(*narrow, *wide), 0)


def test_requests_round_up_to_512() -> None:
    assert rounded_by_rule(np.array([0, 1, 512, 513])).tolist() == [512, 512, 512, 1024]


def test_free_stretches_by_size() -> None:
    found = layout(
        allocator_trace("held 16M 2M", "held 32M 2M", "live 16M 512K", "live 17M 1M", "live 32M 1M"), 0, -1
    )
    assert found.free_bytes.tolist() == [512 * K, M]
    assert free_histogram(found) == ((512 * K, 1, 512 * K), (M, 1, M))
    assert free_histogram(layout(allocator_trace("alloc 16M 5"), 0, 0)) == ()


CHANGES = st.lists(
    st.tuples(st.sampled_from(["map", "unmap"]), st.integers(1, 12), st.integers(1, 6)), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_what_is_reserved_equals_a_set_of_pages_at_every_event(changes: list[tuple[str, int, int]]) -> None:
    history = allocator_trace(*(f"{kind} {first}M {count}M" for kind, first, count in changes))
    pages: set[int] = set()
    for event, (kind, first, count) in enumerate(changes):
        touched = set(range(first, first + count))
        pages = pages | touched if kind == "map" else pages - touched
        found = segments_at(history, 0, event)
        held = {page for s in found for page in range(s.address // M, (s.address + s.bytes) // M)}
        assert held == pages
        assert sum(s.bytes for s in found) == len(pages) * M
        assert all(a.address + a.bytes < b.address for a, b in pairwise(found))


WORDS = ["held", "live", "alloc", "free_requested", "free_completed"]
WORDS += ["segment_alloc", "segment_free", "map", "unmap"]
LINES = st.builds(
    "{} {}K {}K rounded={}".format,
    st.sampled_from(WORDS),
    st.integers(1, 40),
    st.integers(0, 24),
    st.sampled_from([-1, 0, 512, 4 * K, 64 * K]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES, max_size=25))
def test_histories_without_sense_still_sum_to_their_parts(lines: list[str]) -> None:
    history = allocator_trace(*lines)
    for event in range(-1, len(history.events)):
        found = layout(history, 0, event)
        live = history.allocations.alive_at(event, 0)
        assert sorted([*found.rows, *found.misfits]) == live.tolist()
        assert found.extent.sum() + found.free_bytes.sum() == found.segments.bytes.sum()
        for segment in segments_at(history, 0, event):
            ends = [segment.address, *(b.address + b.extent_bytes for b in segment.blocks)]
            assert [b.address for b in segment.blocks] == ends[:-1]
            assert ends[-1] == segment.address + segment.bytes


def history() -> MemoryTrace:
    """A small segment with three blocks of 1 KiB and a gap between, and an empty one of another stream."""
    return allocator_trace(
        "held 16M 2M",
        "held 64M 20M stream=1",
        "live 16M 1K rounded=1024",
        "live 16385K 1K rounded=1024",
        "live 16387K 1K rounded=1024 pending=1",
    )


def pieces_and_layout(trace: MemoryTrace, order: str = "address", **options: int) -> tuple[Pieces, Layout]:
    found = layout(trace, 0, -1)
    blocks = trace.allocations
    live = LiveBlocks(
        blocks.address[found.rows],
        blocks.bytes[found.rows],
        np.arange(len(found.rows)),
        trace.start.pending[found.rows] != 0,
    )
    return pieces(found, segment_order(found, order), live, **options), found


def test_pieces_fill_their_segments_in_address_order() -> None:
    got, _ = pieces_and_layout(history())
    assert got.segment.tolist() == [0, 0, 0, 0, 0, 1]
    assert got.offset.tolist() == [0, K, 2 * K, 3 * K, 4 * K, 0]
    assert got.bytes.tolist() == [K, K, K, K, 2 * M - 4 * K, 20 * M]
    assert got.state.tolist() == [ALLOCATED, ALLOCATED, FREE, PENDING, FREE, FREE]
    assert got.key.tolist() == [0, 1, -1, 2, -1, -1]
    assert got.row.tolist() == [0, 1, -1, 2, -1, -1]
    assert got.count.tolist() == [1] * 6


def test_what_shares_a_pixel_stands_as_one_with_the_look_of_the_largest() -> None:
    got, _ = pieces_and_layout(history(), finest=2 * K)
    assert got.offset.tolist() == [0, 2 * K, 4 * K, 0]
    assert got.bytes.tolist() == [2 * K, 2 * K, 2 * M - 4 * K, 20 * M]
    assert got.requested.tolist() == [2 * K, K, 0, 0]
    assert got.count.tolist() == [2, 2, 1, 1]
    assert got.row.tolist() == [-1, -1, -1, -1]
    assert got.finest == 2 * K


@pytest.mark.parametrize("finest", [1, 512, K, 3 * K, M, 64 * M])
def test_no_byte_is_lost_at_any_fineness(finest: int) -> None:
    got, found = pieces_and_layout(history(), finest=finest)
    for place, size in enumerate(found.segments.bytes.tolist()):
        assert got.bytes[got.segment == place].sum() == size
    assert got.requested.sum() == 3 * K
    assert got.count.sum() == 6


def test_some_segments_only() -> None:
    got, _ = pieces_and_layout(history(), first=1, last=1)
    assert got.segment.tolist() == [1]


def test_too_many_pieces_are_merged_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 4)
    got, found = pieces_and_layout(history())
    assert len(got) <= 4
    assert got.finest > 1
    assert got.bytes.sum() == found.segments.bytes.sum()


@pytest.mark.parametrize(
    ("order", "wanted"), [("address", [0, 1]), ("size", [1, 0]), ("free", [1, 0]), ("pool", [1, 0])]
)
def test_orders(order: str, wanted: list[int]) -> None:
    assert segment_order(layout(history(), 0, -1), order).tolist() == wanted


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(MemPluginError, match="moon"):
        segment_order(layout(history(), 0, -1), "moon")


def test_without_segments_there_is_nothing() -> None:
    got, _ = pieces_and_layout(allocator_trace("alloc 16M 512"))
    assert len(got) == 0


def test_more_segments_than_a_screen_shows_are_a_piece_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 1)
    got, found = pieces_and_layout(history())
    assert got.segment.tolist() == [0, 1]
    assert got.bytes.tolist() == found.segments.bytes.tolist()
