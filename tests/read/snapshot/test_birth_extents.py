"""What blocks above 1 MiB took: a request takes all of the room that it finds, or 1 MiB and more remains."""

from __future__ import annotations

from typing import Any

import pytest

from tb_memplugin.read.snapshot import rounding
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tests.snapshots import block, entries, segment, snapshot

M = 1 << 20
A = 64 * M
SETTINGS = {"roundup_power2_divisions": {"1": 0}, "max_split_size": -1}
LINES = (
    f"segment_alloc {A} {20 * M}",
    f"alloc {A} {8 * M - 100}",  # 12 MiB remain
    f"alloc {A + 8 * M} {11 * M + 100}",  # less than 1 MiB remains of the 12
    f"free_completed {A} {8 * M - 100}",
    f"alloc {A} {7 * M}",  # of 8 MiB before the next block, 1 MiB remains
    f"free_completed {A + 8 * M} {11 * M + 100}",
    f"alloc {A + 8 * M} {11 * M - 1024}",  # 1 MiB and 1 KiB remain of the 12
    f"free_completed {A + 8 * M} {11 * M - 1024}",
    f"free_completed {A} {7 * M}",
    f"segment_free {A} {20 * M}",
)
TOOK = [8 * M, 12 * M, 8 * M, 11 * M - 1024]


def born(content: dict[str, Any], settings: dict[str, Any] = SETTINGS) -> list[int]:
    """What the blocks that an entry allocates took, in the order of these entries."""
    allocations = trace_from_snapshot({**content, "allocator_settings": settings}, "x").allocations
    rows = [row for row in allocations.born.argsort().tolist() if allocations.born[row] >= 0]
    return [int(allocations.rounded[row]) for row in rows]


def test_a_block_takes_a_remainder_of_up_to_1_mib() -> None:
    assert born(snapshot([], entries(*LINES))) == TOOK


def test_the_next_segment_is_no_room() -> None:
    behind = segment(block(A + 20 * M, 0, "inactive", 20 * M), total=20 * M)
    assert born(snapshot([behind], entries(*LINES))) == TOOK


@pytest.mark.parametrize(
    "settings",
    [{}, {**SETTINGS, "max_split_size": 64 * M}, {**SETTINGS, "roundup_power2_divisions": {"1": 4}}],
)
def test_nothing_is_derived_under_other_settings(settings: dict[str, Any]) -> None:
    assert born(snapshot([], entries(*LINES)), settings) == [-1] * 4


def test_nothing_is_derived_from_a_snapshot_that_contradicts_itself() -> None:
    assert born(snapshot([], entries(*LINES, f"free_completed {A} 5"))) == [-1] * 4


def test_nothing_is_derived_where_a_final_block_took_something_else() -> None:
    lines = entries(*LINES[:3])
    first, last = block(A, 8 * M - 100, size=8 * M), block(A + 8 * M, 11 * M + 100, size=12 * M)
    assert born(snapshot([segment(first, last, total=20 * M)], lines)) == TOOK[:2]
    gone = entries(f"free_completed {A} {8 * M - 100}", f"alloc {A} {7 * M}")
    shorter = block(A, 7 * M, size=7 * M)
    rest = block(A + 7 * M, 0, "inactive", M)
    assert born(snapshot([segment(shorter, rest, last, total=20 * M)], lines + gone)) == [-1, 12 * M, 7 * M]


def test_mixed_with_expandable_segments_nothing_is_derived() -> None:
    mapped = entries(f"segment_map {9 * A} {2 * M}", f"segment_unmap {9 * A} {2 * M}")
    assert born(snapshot([], entries(*LINES) + mapped)) == [-1] * 4


def test_a_block_from_before_the_window_bounds_the_room_but_its_own_size_is_not_known() -> None:
    lines = (f"alloc {A} {7 * M}", f"free_completed {A + 8 * M} {4 * M}")
    held = segment(block(A, 7 * M, size=8 * M), block(A + 8 * M, 0, "inactive", 12 * M), total=20 * M)
    trace = trace_from_snapshot({**snapshot([held], entries(*lines)), "allocator_settings": SETTINGS}, "x")
    assert (trace.start.rounded.tolist(), trace.events.rounded.tolist()) == ([-1], [8 * M, -1])


def test_too_many_blocks_that_came_and_went_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MOST_GONE", 1)
    assert born(snapshot([], entries(*LINES))) == [-1] * 4


def test_nothing_is_derived_where_a_request_is_in_no_recorded_segment() -> None:
    behind = segment(block(9 * A, 0, "inactive", 20 * M), total=20 * M)
    assert born(snapshot([behind], entries(*LINES[1:3], LINES[3], LINES[5]))) == [-1] * 2
