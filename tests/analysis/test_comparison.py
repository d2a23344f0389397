"""Comparison of the peaks of two traces."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis.comparison import compare
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.errors import NotRecordedError
from tests.recorded_program import program
from tests.traces import trace

STACKS = {"a": ("f a.py:1",), "b": ("g b.py:2",), "c": ("h c.py:3",)}
BASE = program("before 5 w", "alloc 10 x at=a", "alloc 20 y at=b", "free y", stacks=STACKS)
OTHER = program("before 5 w", "alloc 40 x at=a", "alloc 3 z at=c", stacks=STACKS)


def rows(found):
    return [(row.key, row.status, row.base_bytes, row.other_bytes, row.delta_bytes) for row in found.rows]


def test_stacks_are_added_removed_grown_and_the_same():
    (found,) = compare(BASE, OTHER, by="stack")
    assert (found.device, found.base_peak_bytes, found.other_peak_bytes) == ("cuda:0", 35, 48)
    assert rows(found) == [
        ("f a.py:1", "grown", 10, 40, 30),
        ("g b.py:2", "removed", 20, 0, -20),
        ("h c.py:3", "added", 0, 3, 3),
        ("(no stack)", "same", 5, 5, 0),
    ]
    assert sum(row.delta_bytes for row in found.rows) == found.delta_bytes == 13


def test_a_row_names_the_category_that_changed_most_and_by_how_much():
    base = trace("alloc 10 a module=loss category=activation")
    other = trace(
        "alloc 22 a module=loss category=activation", "alloc 24 b module=loss category=autograd_detail"
    )
    (found,) = compare(base, other, by="module")
    (row,) = found.rows
    assert (row.delta_bytes, row.category, row.category_delta_bytes) == (36, "autograd_detail", 24)


@pytest.mark.parametrize("by", ["category", "module", "line", "pool", "annotation", read_rules(["f=a.py"])])
def test_deltas_sum_to_the_difference_whatever_divides(by):
    (found,) = compare(BASE, OTHER, by=by)
    assert sum(row.delta_bytes for row in found.rows) == 13


def test_devices_are_matched_by_name_then_by_rank_then_with_nothing():
    base = trace("alloc 1 a device=cpu", "alloc 2 b device=cuda:0", "alloc 4 c device=cuda:2")
    other = trace("alloc 10 b device=cuda:0", "alloc 30 c device=cuda:10", "alloc 20 d device=cuda:3")
    found = compare(base, other)
    assert [(one.device, one.other_device, one.base_peak_bytes, one.other_peak_bytes) for one in found] == [
        ("cpu", "", 1, 0),
        ("cuda:0", "cuda:0", 2, 10),
        ("cuda:2", "cuda:3", 4, 20),
        ("", "cuda:10", 0, 30),
    ]
    assert [row.status for row in found[3].rows] == ["added"]


def test_one_device_and_one_step_can_be_chosen():
    base = trace("step 1", "alloc 1 a device=cuda:0", "step 2", "alloc 2 b device=cuda:0")
    other = trace("step 1", "alloc 5 a device=cuda:0", "step 2", "alloc 9 b device=cuda:0")
    (found,) = compare(base, other, device="cuda:0", step=1)
    assert (found.base_peak_bytes, found.other_peak_bytes) == (1, 5)
    with pytest.raises(NotRecordedError, match="cuda:7"):
        compare(base, other, device="cuda:7")
    with pytest.raises(NotRecordedError, match="Step 3"):
        compare(base, other, step=3)


def test_a_snapshot_and_a_profile_are_compared():
    profile = trace("alloc 100 a device=cuda:0 category=activation")
    (found,) = compare(BASE, profile)
    assert rows(found) == [("activation", "added", 0, 100, 100), ("unknown", "removed", 35, 0, -35)]
