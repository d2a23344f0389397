"""The rule `failed_request` on small histories."""

from __future__ import annotations

import pytest

from tests.analysis.advice_rules.findings import found, why
from tests.analysis.histories import M, allocator_trace

FULL = ("held 0M 100M", "live 0M 40M", "alloc 40M 60M", "oom 10M 30M")


def test_a_failed_request_says_what_is_missing_and_what_would_have_been_enough() -> None:
    """30M are requested and 10M are free on the device, so 20M are missing."""
    finding = found(allocator_trace(*FULL), "failed_request")
    assert (finding.bytes, finding.evidence[0].bytes) == (20 * M, 30 * M)
    changes = {row.what: (row.bytes, row.detail.partition(":")[0]) for row in finding.evidence[1:]}
    assert changes["a device with more memory"] == (20 * M, "enough")
    assert changes["expandable_segments:True"][1] == "not enough"
    # the request and the block of the window shrink, the block of before it does not: 20 of 90
    assert changes["a batch smaller by 22.2 %"][0] == 20 * M


def test_a_request_that_a_limit_refused_says_so_and_not_that_nothing_was_missing() -> None:
    """900M are free; the limit is not known: a new segment of 30M is the most that is missing."""
    finding = found(allocator_trace(*FULL[:3], "oom 900M 30M"), "failed_request")
    assert (finding.bytes, finding.measure) == (30 * M, "missing at most")
    assert "which had 900.0 MiB free: a limit on the process refused it" in finding.title
    changes = {
        row.what.partition(" (")[0]: (row.bytes, row.detail.partition(":")[0]) for row in finding.evidence
    }
    assert changes["a higher limit"] == (30 * M, "enough")
    assert changes["expandable_segments:True"][1] == "not enough"
    assert "a device with more memory" not in changes


IN_PIECES = (
    *("segment_alloc 0M 40M", "alloc 0M 40M", "segment_alloc 100M 20M", "alloc 100M 20M"),
    *("segment_alloc 200M 40M", "alloc 200M 40M", "free_requested 0M 40M", "free_completed 0M 40M"),
    *("free_requested 200M 40M", "free_completed 200M 40M"),
    *("alloc 0M 4M", "alloc 200M 4M"),
)
"""36M and 36M are free, each in a segment of its own."""


@pytest.mark.parametrize(
    ("free", "missing"), [(2, 24), (54, 6)], ids=["in the largest block", "for a segment of its own"]
)
def test_what_is_missing_in_one_piece_is_never_added_up_from_two(free: int, missing: int) -> None:
    """60M are requested: a segment lacks 6M where the device has 54M, the largest free block lacks 24M."""
    finding = found(allocator_trace(*IN_PIECES, f"oom {free}M 60M"), "failed_request")
    assert finding.bytes == missing * M
    assert finding.measure == "missing in one piece"


def test_a_failed_request_that_expandable_segments_would_have_served() -> None:
    finding = found(allocator_trace(*IN_PIECES, "oom 2M 60M"), "failed_request")
    row = next(row for row in finding.evidence if row.what == "expandable_segments:True")
    assert row.detail.startswith("enough: simulated")
    assert finding.measure == "missing in one piece"


def test_a_recording_without_a_failed_request_has_none() -> None:
    assert why(allocator_trace("held 0M 100M", "live 0M 4M"), "failed_request") == (
        "No request failed while it was recorded."
    )
