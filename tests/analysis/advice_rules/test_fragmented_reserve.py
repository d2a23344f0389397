"""The rule `fragmented_reserve` on small histories."""

from __future__ import annotations

from tests.analysis.advice_rules.findings import found, why
from tests.analysis.histories import M, allocator_trace


def test_free_memory_beside_new_segments_is_told_by_what_keeps_it() -> None:
    """100M free beside a block of 4M; 60M of another stream; 50M beside 50M. Then 200M need a new segment."""
    history = allocator_trace(
        *("held 0M 104M", "live 0M 4M"),
        *("held 200M 80M stream=1", "live 200M 20M stream=1"),
        *("held 400M 100M", "live 400M 50M"),
        *("segment_alloc 600M 200M", "alloc 600M 200M"),
    )
    finding = found(history, "fragmentation")
    assert [(row.what, row.bytes) for row in finding.evidence[:4]] == [
        ("pinned", 100 * M),
        ("streams", 60 * M),
        ("splits", 50 * M),
        ("cached segments", 0),
    ]
    assert (finding.bytes, finding.of_bytes) == (210 * M, 484 * M)


def test_free_memory_that_costs_no_reserve_is_no_finding() -> None:
    """The 96M beside the small block are used when the reserve is at its highest."""
    history = allocator_trace(
        *("held 0M 100M", "live 0M 4M"),
        *("segment_alloc 600M 200M", "alloc 600M 200M", "alloc 4M 96M"),
    )
    assert "the highest reserve is 0 B above the highest use" in why(history, "fragmentation")
