"""All steps of a window as one (`span=window`), and curves by folded modules."""

from __future__ import annotations

import numpy as np
import pytest

from tb_memplugin.store.writer import RunWriter
from tests.server.tab import Tab
from tests.traces import trace

TWO_STEPS = trace(
    "start 400 w category=parameter module=layers.0",
    "step 5",
    "alloc 100 a module=layers.0.mlp",
    "alloc 20 b module=layers.1.mlp",
    "free b",
    "step 6",
    "alloc 300 c module=layers.1.mlp",
    "alloc 7 d module=layers.2.mlp",
    "free a",
)
"""Live: 400, 500, 520, 500 in step 5; 800, 807, 707 in step 6."""

STEP = {"run": "r", "worker": "rank0", "step": 5, "device": "cpu"}
WINDOW = {**STEP, "span": "window"}


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logdir")
    RunWriter(str(folder / "r"), "rank0").write(TWO_STEPS)
    return Tab(folder)


def test_bands_of_the_window_hold_its_peak_and_every_step(tab):
    answer = tab.get("allocation_bands", **WINDOW, over="event", px=6)
    assert answer["max"] == [500, 520, 520, 800, 807, 807]
    assert (answer["first_event"], answer["last_event"], answer["peak"]["event"]) == (0, 5, 4)
    assert tab.get("allocation_bands", **STEP, over="event", px=3)["max"] == [500, 520, 520]


def test_the_list_of_the_window_has_what_either_step_made(tab):
    assert tab.get("allocations", **WINDOW)["rows_found"] == 5
    assert tab.get("allocations", **STEP)["rows_found"] == 3


def test_a_stretch_has_what_came_and_went_in_it_and_what_stayed(tab):
    """Events 1 to 4: b and its free, then c and d; before them w and a are alive."""
    answer = tab.get("stretch", **WINDOW, over="event", t0=1, t1=5)
    assert (answer["start_bytes"], answer["end_bytes"]) == (500, 807)
    assert (answer["highest_bytes"], answer["highest_event"]) == (807, 4)
    assert answer["allocated"] == {"bytes": 327, "count": 3}
    assert answer["freed"] == {"bytes": 20, "count": 1}
    assert answer["stayed"] == {"bytes": 307, "count": 2}
    assert [row["bytes"] for row in answer["largest"]] == [300, 7]
    last = tab.get("stretch", **WINDOW, over="event", t0=5, t1=6)
    assert (last["highest_bytes"], last["highest_event"], last["stayed"]["count"]) == (807, 4, 0)
    assert last["freed"] == {"bytes": 100, "count": 1}


def test_a_moment_since_an_event_has_what_came_and_what_went(tab):
    """After b live are w, a and b; at the end w, c and d."""
    answer = tab.get("moment", **STEP, event=5, since=1)
    assert answer["bytes"] - tab.get("moment", **STEP, event=1)["bytes"] == 707 - 520 == 307 - 120
    since = answer["since"]
    assert (since["event"], since["kept_bytes"], since["kept"]) == (1, 307, 2)
    assert (since["freed_bytes"], since["freed"]) == (120, 2)
    assert since["time_ns"] == tab.get("moment", **STEP, event=1)["time_ns"]
    assert [block["bytes"] for block in answer["largest"]] == [300, 7]
    assert answer["by_category"] == tab.get("moment", **STEP, event=5)["by_category"]


def test_since_the_start_everything_from_before_stays_out(tab):
    answer = tab.get("moment", **STEP, event=0, since=-1)
    assert (answer["since"]["kept_bytes"], answer["since"]["freed_bytes"]) == (100, 0)
    assert [block["bytes"] for block in answer["largest"]] == [100]


def test_a_moment_is_not_since_a_later_one(tab):
    for later in (1, 5):
        answer = tab.get("moment", **STEP, event=1, since=later)
        assert "since" not in answer
        assert answer == tab.get("moment", **STEP, event=1)
    assert tab.refused("moment", **STEP, event=1, since=6)[0] == 400


def test_stacks_of_the_window_are_of_its_peak_or_of_all_that_it_allocated(tab):
    peak, made = tab.get("stack_table", **WINDOW), tab.get("stack_table", **WINDOW, of="step")
    assert (peak["event"], peak["bytes"], peak["count"]) == (4, 807, 4)
    assert (made["bytes"], made["count"]) == (427, 4)
    assert tab.get("stack_table", **STEP, of="step")["bytes"] == 120  # not what was kept of the window
    assert tab.get("stack_table", **STEP)["bytes"] == 520


def test_the_allocators_curve_of_the_window_marks_its_peak(tab):
    answer = tab.get("allocator_curve", **WINDOW, over="event", px=6)
    assert (answer["t0"], answer["t1"], answer["peak"]["event"], answer["peak"]["bytes"]) == (0, 6, 4, 807)
    assert tab.get("allocator_curve", **STEP, over="event", px=3)["peak"]["bytes"] == 520


def test_the_curve_of_the_window_is_the_same_by_either_name(tab):
    one = tab.get("curve", **WINDOW, px=50)
    assert one == tab.get("curve", **{**STEP, "step": "all"}, window_step=5, px=50)
    assert one["peak"]["bytes"] == 807


def test_folded_modules_sum_to_the_curve_and_to_every_moment(tab):
    asked = {"by": "module", "fold": 1}
    curve = tab.get("curve", **WINDOW, **asked, px=9)
    assert curve["keys"] == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.*", "(other modules)"]
    assert np.array(curve["stacks"]).sum(axis=0).tolist() == curve["max"]
    assert [group["modules"] for group in curve["groups"]] == [1, 1, 1, 3, 2]
    assert [group["opens"] for group in curve["groups"]] == [False, False, False, True, False]
    for event in range(-1, 6):
        moment = tab.get("moment", **STEP, **asked, event=event)
        assert sum(part["bytes"] for part in moment["parts"]) == moment["bytes"]
        assert "by_module" not in moment  # thousands of rows that nobody asked for


def test_a_zoom_keeps_the_groups_and_opening_one_divides_it(tab):
    asked = {**WINDOW, "by": "module", "fold": 1, "px": 9}
    keys = tab.get("curve", **asked)["keys"]
    assert tab.get("curve", **asked, t0=0, t1=1_500)["keys"] == keys
    opened = tab.get("curve", **asked, open="layers.*\nno such group")
    assert {"layers.0", "layers.1", "layers.2"} <= set(opened["keys"])
    assert "layers.*" not in opened["keys"]
    assert np.array(opened["stacks"]).sum(axis=0).tolist() == opened["max"]


BASE = trace(
    "start 400 w category=parameter module=layers.0",
    "alloc 90 a module=layers.0.mlp",
    "alloc 5 b module=layers.7.mlp",
    "alloc 60 c module=adapter",
)
"""Another recording: a layer and a module that the first one lacks."""


def test_folded_modules_of_two_recordings_compare_group_by_group(tmp_path):
    RunWriter(str(tmp_path / "r"), "rank0").write(TWO_STEPS)
    RunWriter(str(tmp_path / "base"), "rank0").write(BASE)
    base = {"base_run": "base", "base_worker": "rank0", "base_step": 0, "base_device": "cpu"}
    asked = {**STEP, "step": 6, "by": "module", "fold": 1}
    other = Tab(tmp_path).get("moment", **asked, event=4)
    answer = Tab(tmp_path).get("compare", **asked, **base)
    rows = {row["key"]: (row["base_bytes"], row["other_bytes"]) for row in answer["rows"]}
    assert {key: bytes_ for key, (_, bytes_) in rows.items() if bytes_} == {
        part["key"]: part["bytes"] for part in other["parts"]
    }
    assert rows["layers.0.mlp"] == (90, 100)
    assert rows["(other modules)"] == (60, 0)
    assert rows["layers.*"] == (405, 400)
    assert sum(row["delta_bytes"] for row in answer["rows"]) == answer["delta_bytes"] == 807 - 555
