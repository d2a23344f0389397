"""What fills segments, as fine as a screen can show: drawn by hand, and no byte is lost at any fineness."""

from __future__ import annotations

import numpy as np
import pytest

from tb_memplugin.analysis import pieces as module
from tb_memplugin.analysis.layout import Layout, layout
from tb_memplugin.analysis.pieces import ALLOCATED, FREE, PENDING, LiveBlocks, Pieces, pieces, segment_order
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import MemoryTrace
from tests.analysis.histories import K, M, allocator_trace


def history() -> MemoryTrace:
    """A small segment with three blocks of 1 KiB and a gap between, and an empty one of another stream."""
    return allocator_trace(
        "held 16M 2M",
        "held 64M 20M stream=1",
        "live 16M 1K rounded=1024",
        "live 16385K 1K rounded=1024",
        "live 16387K 1K rounded=1024 pending=1",
    )


def drawn(trace: MemoryTrace, order: str = "address", **options: int) -> tuple[Pieces, Layout]:
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
    got, _ = drawn(history())
    assert got.segment.tolist() == [0, 0, 0, 0, 0, 1]
    assert got.offset.tolist() == [0, K, 2 * K, 3 * K, 4 * K, 0]
    assert got.bytes.tolist() == [K, K, K, K, 2 * M - 4 * K, 20 * M]
    assert got.state.tolist() == [ALLOCATED, ALLOCATED, FREE, PENDING, FREE, FREE]
    assert got.key.tolist() == [0, 1, -1, 2, -1, -1]
    assert got.row.tolist() == [0, 1, -1, 2, -1, -1]
    assert got.count.tolist() == [1] * 6


def test_what_shares_a_pixel_stands_as_one_with_the_look_of_the_largest() -> None:
    got, _ = drawn(history(), finest=2 * K)
    assert got.offset.tolist() == [0, 2 * K, 4 * K, 0]
    assert got.bytes.tolist() == [2 * K, 2 * K, 2 * M - 4 * K, 20 * M]
    assert got.requested.tolist() == [2 * K, K, 0, 0]
    assert got.count.tolist() == [2, 2, 1, 1]
    assert got.row.tolist() == [-1, -1, -1, -1]
    assert got.finest == 2 * K


@pytest.mark.parametrize("finest", [1, 512, K, 3 * K, M, 64 * M])
def test_no_byte_is_lost_at_any_fineness(finest: int) -> None:
    got, found = drawn(history(), finest=finest)
    for place, size in enumerate(found.segments.bytes.tolist()):
        assert got.bytes[got.segment == place].sum() == size
    assert got.requested.sum() == 3 * K
    assert got.count.sum() == 6


def test_some_segments_only() -> None:
    got, _ = drawn(history(), first=1, last=1)
    assert got.segment.tolist() == [1]


def test_too_many_pieces_are_merged_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 4)
    got, found = drawn(history())
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
    got, _ = drawn(allocator_trace("alloc 16M 512"))
    assert len(got) == 0


def test_more_segments_than_a_screen_shows_are_a_piece_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 1)
    got, found = drawn(history())
    assert got.segment.tolist() == [0, 1]
    assert got.bytes.tolist() == found.segments.bytes.tolist()
