"""Raw memory timelines: each level and each category is the running sum of the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.loading import load
from tb_memplugin.read.timeline import CATEGORIES, trace_from_timeline
from tb_memplugin.trace import Category, MemoryTrace

TIMELINE = Path(__file__).parents[3] / "shared" / "data" / "timeline"


def held(trace: MemoryTrace, event: int) -> dict[Category, int]:
    alive = trace.allocations.alive_at(event, 0)
    sums = np.bincount(trace.allocations.category[alive], trace.allocations.bytes[alive], len(Category))
    return {category: int(sums[category]) for category in Category if sums[category]}


def test_a_change_of_category_moves_the_bytes() -> None:
    rows = [[-1, 1, 100, 0], [5, 2, 30, 7], [6, 3, -30, 7], [6, 3, 30, 5], [9, 4, -30, 5]]
    trace = trace_from_timeline(rows, "x", "cuda:0")
    assert trace.live(0).tolist() == [100, 130, 100, 130, 100]
    assert held(trace, 0) == {Category.PARAMETER: 100, Category.UNKNOWN: 30}
    assert held(trace, 2) == {Category.PARAMETER: 100, Category.GRADIENT: 30}
    assert trace.events.time_ns.tolist() == [5_000, 6_000, 6_000, 9_000]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[1, 2, 3]],
        [[1, 2, "3", 4]],
        [[1, 9, 3, 4]],
        [[1, 2, 3, 8]],
        [[-5, 2, 3, 4]],
        [[1, 2, 1 << 70, 4]],
    ],
)
def test_what_is_no_timeline_is_refused(rows: object) -> None:
    with pytest.raises(UnreadableFileError):
        trace_from_timeline(rows, "x", "cuda:0")


def test_a_free_of_what_was_never_there_is_told() -> None:
    trace = trace_from_timeline([[1, 2, 5, 0], [2, 4, -9, 0]], "x", "cpu")
    assert any("1 rows free 9 bytes" in note for note in trace.notes)


@pytest.mark.skipif(not TIMELINE.is_dir(), reason=f"{TIMELINE} holds a stranger's timeline; it is absent")
def test_the_real_timeline_at_its_moment_744() -> None:
    trace = load(next(TIMELINE.glob("t1_*")))
    moments = np.concatenate(([-1], np.unique(trace.events.time_ns)))
    state = held(trace, trace.event_at(int(moments[744])))
    assert [state.get(category, 0) for category in CATEGORIES] == [
        *(102440608, 102228128, 19395584, 0),
        *(2618160128, 58417152, 41811968, 25494440),
    ]
    assert len(trace.events) + len(trace.start) == 16845
    assert trace.allocations.unseen_frees == 0
