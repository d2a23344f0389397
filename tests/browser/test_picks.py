"""What can be picked, and how: many workers, empty recordings, long names, narrow windows, large reserves."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

import tb_memplugin
from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import watched
from tests.browser.tab import exact
from tests.tensorboard.process import tensorboard
from tests.traces import trace

GIB = 1 << 30
LONG = f"{'encoder_of_a_model_' * 8}.layers"


ALIKE = "n" * 79


def on_a_gpu(size: int, module: str = "layer") -> list[str]:
    """One allocation of a module within a reserve of 60 GiB."""
    here = f"device=cuda:0 module={module} reserved={60 * GIB}"
    return [f"alloc {size} {module} {here}"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("picks")
    for rank in (0, 2, 10):
        RunWriter(str(folder / "jobs" / "many"), f"rank{rank}").write(trace(*on_a_gpu(GIB + rank)))
    RunWriter(str(folder / "jobs" / "names"), "rank0").write(
        trace(*(line for layer in range(12) for line in on_a_gpu(GIB, f"{LONG}.{layer}")))
    )
    weights = f"start {2 * GIB} weights device=cuda:0 category=parameter reserved={60 * GIB}"
    RunWriter(str(folder / "another"), "rank0").write(trace(weights, *on_a_gpu(GIB)))
    RunWriter(str(folder / "imported"), "imported").write(trace(weights))
    for end in "AB":  # the last of 80 characters
        RunWriter(str(folder / f"{ALIKE}{end}"), "rank0").write(trace(weights))
    hollow: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    RunWriter(str(folder / "hollow"), "rank0").write(tb_memplugin.load(hollow))
    with tensorboard(folder) as running:
        running.wait_for("runs", lambda answer: sum(len(run["workers"]) for run in answer["runs"]) == 9)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


def test_workers_stand_in_the_order_in_which_people_count(tab):
    tab.open_anew("overview", run="jobs/many")
    labels = tab("picker-worker").evaluate("select => [...select.options].map((option) => option.label)")
    assert labels == ["rank0", "rank2", "rank10"]


def test_a_recording_without_memory_is_no_dead_end(tab):
    tab.open_anew("overview", run="hollow")
    expect(tab("missing")).to_contain_text("run hollow, which recorded no memory of any device")
    expect(tab("headline")).to_contain_text("peaked at")
    tab.pick("run", "jobs/many")
    expect(tab("missing")).to_have_count(0)


def test_a_recording_without_steps_is_its_whole_window(tab):
    tab.open_anew("timeline", run="another")
    assert tab.picked()["step"] == "whole window"
    expect(tab("picker-step")).to_have_value("0")  # as in the address
    tab.open_anew("timeline", run="jobs/many", worker="rank2")
    assert tab.picked()["step"] == "whole window"


def test_a_lone_recording_is_held_against_none_of_another_model_unless_asked(tab):
    tab.open_anew("compare", run="jobs/names", worker="rank0")
    expect(tab("nothing-to-compare")).to_contain_text("same model on the same kind of device")
    tab("picker-base").click()
    tab("picker-base-run").select_option(label="jobs/many")
    expect(tab("headline")).to_contain_text("jobs/many")
    expect(tab("missing")).to_have_count(0)


def test_a_lone_recording_is_held_against_one_of_the_same_model(tab):
    tab.open_anew("compare", run="another")
    expect(tab("headline")).to_contain_text("jobs/many")


def test_the_heads_of_a_comparison_do_not_break_in_a_word(tab):
    tab.open_anew("compare", run="jobs/names", base_run="jobs/many")
    tab("compare-row").first.wait_for()
    broken = tab.frame.locator(".side-head").evaluate_all(
        """heads => heads.flatMap((head) => [...head.childNodes].filter((node) => node.data).flatMap((node) =>
            [...node.data.matchAll(/\\S+/g)].filter((word) => {
                const range = document.createRange();
                range.setStart(node, word.index);
                range.setEnd(node, word.index + word[0].length);
                return new Set([...range.getClientRects()].map((box) => box.top)).size > 1;
            }).map((word) => word[0])))"""
    )
    assert broken == []


def test_a_worker_that_only_repeats_its_runs_name_is_not_shown_twice(tab):
    tab.open_anew("overview", run="imported")
    expect(tab("picker-worker")).to_have_count(0)
    expect(tab("picker-run")).to_have_attribute("title", "imported")
    tab.pick("run", "another")
    expect(tab("picker-worker")).to_be_visible()


def test_a_recording_without_steps_is_called_the_whole_window_everywhere(tab):
    tab.open_anew("advice", run="another")
    expect(tab("view-advice")).not_to_contain_text("step 0")
    expect(tab("peak-holders").locator("h2")).to_contain_text("whole window")
    tab.open_anew("overview", run="jobs/many", worker="rank0", base_run="another")
    expect(tab("picker-base")).not_to_contain_text("step 0")


def test_the_panel_of_what_to_compare_with_stays_within_a_narrow_window(open_tab, server):
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 560, "height": 700})
    tab.open("overview", run="jobs/many")
    tab("picker-base").click()
    box = tab("picker-base-panel").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 560


@pytest.mark.parametrize("fold", ["on", "off"])
def test_names_that_begin_alike_are_told_apart_by_their_ends(tab, fold):
    tab.open_anew("timeline", run="jobs/names", by="module", fold=fold)
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    rows = tab("moment-row")
    cut = rows.locator(".tail").evaluate_all("ends => ends.map((end) => end.scrollWidth - end.clientWidth)")
    assert len(cut) >= (11 if fold == "off" else 8)
    assert max(cut) <= 0  # every end stands there whole
    ends = rows.locator(".tail").all_inner_texts()
    assert len(set(ends)) == len(ends)


def test_a_long_run_is_picked_and_compared_by_its_end(tab):
    tab.open_anew("compare", run=f"{ALIKE}B", base_run=f"{ALIKE}A")
    tab("curve-side").first.wait_for()
    shown, room = tab("picker-run").evaluate(
        """(picker) => {
            const pen = document.createElement("canvas").getContext("2d");
            pen.font = getComputedStyle(picker).font;
            const label = picker.selectedOptions[0].label;
            const { paddingLeft, paddingRight } = getComputedStyle(picker);
            const padding = parseFloat(paddingLeft) + parseFloat(paddingRight);
            return [pen.measureText(label).width, picker.clientWidth - padding];
        }"""
    )
    assert shown <= room + 1
    assert tab.picked()["run"].endswith("nB")
    widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1]


def filled(tab):
    """The share of the plot's height that is filled in its middle."""
    return tab("timeline-canvas").evaluate(
        """(canvas) => {
            const x = Math.floor(canvas.width * 0.5);
            const { data } = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height);
            let count = 0;
            for (let i = 3; i < data.length; i += 4) if (data[i] === 255) count += 1;
            return count / canvas.height;
        }"""
    )


def test_a_reserve_far_above_does_not_flatten_the_curve_unless_asked_for(tab):
    tab.open_anew("timeline", run="another")
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    tab.settle()
    expect(tab("reserve")).to_have_attribute("aria-pressed", "false")
    assert filled(tab) > 0.5  # two of 3.4 GiB
    tab("reserve").click()
    tab.wait_until(lambda: "reserve=on" in tab.page.url, "the reserve in the address")
    tab.wait_until(lambda: filled(tab) < 0.1, "room for 60 GiB")
    assert exact(tab("moment-panel").locator(".big")) == 3 * GIB
