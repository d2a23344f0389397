"""Levels in columns: by hand, and no highest or lowest is lost whatever the width."""

from __future__ import annotations

import numpy as np
import pytest

from tb_memplugin.analysis.allocator import Levels, fragmentation, levels
from tb_memplugin.analysis.columns import Cuts, event_cuts, time_cuts
from tb_memplugin.analysis.fragmentation import sampled_events, unused_levels
from tb_memplugin.analysis.layout import Placement
from tb_memplugin.analysis.reserve_curve import ReserveCurve, reserve_curve, split_moments
from tb_memplugin.trace import MemoryTrace
from tests.analysis.histories import K, M, allocator_trace
from tests.traces import EPOCH, MICROSECOND


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


def drawn(memory: Levels, cuts: Cuts) -> ReserveCurve:
    return reserve_curve(memory, unused_levels(memory), cuts)


def test_one_column_an_event() -> None:
    trace = history()
    got = drawn(levels(trace, 0), event_cuts(trace, 0, 5, 5))
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
        got = drawn(now, cuts)
        assert got.reserved is not None
        assert len(cuts) == columns + 1
        assert (got.allocated + got.pending).max() == now.active.max()
        assert got.low.min() == now.active.min()
        assert got.reserved.max() == 22 * M


def test_an_event_is_drawn_from_its_index_to_the_next() -> None:
    trace = history()
    cuts = event_cuts(trace, 0, 5, 50)
    got = drawn(levels(trace, 0), cuts)
    active = got.allocated + got.pending
    assert active[1:10].tolist() == [K] * 9
    assert active[11:20].tolist() == [3 * K] * 9
    assert active[31:40].tolist() == [K] * 9


def test_without_a_reserve_there_is_none() -> None:
    trace = allocator_trace("alloc 16M 1K")
    got = drawn(levels(trace, 0), event_cuts(trace, 0, 1, 2))
    assert got.unused is None or bool(np.isnan(got.unused).all())


def test_the_split_of_moments_is_the_fragmentation_then() -> None:
    trace = history()
    found = split_moments(Placement(trace, 0), event_cuts(trace, 0, 5, 5))
    assert [event for event, _ in found] == [0, 1, 2, 3, 4]
    for event, ratio in found:
        assert ratio == fragmentation(trace, 0, event).split
    assert sampled_events(event_cuts(trace, 0, 5, 5), moments=2).tolist() == [0, 4]
