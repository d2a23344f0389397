"""Overview: what peaked, and that every number on the page is the recording's own."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.recorded import STEPS, recorded
from tests.browser.tab import SIZE, assert_rounds, bytes_in, exact
from tests.browser.test_export import copied


def test_the_memory_tab_is_in_the_tab_bar_and_opens(each_tab):
    each_tab.page.goto(each_tab.home)
    bar = each_tab.page.get_by_role("tab", name="Memory")
    bar.click()
    expect(each_tab("headline")).to_contain_text("peaked at")
    assert re.search(r"#tb_memplugin\b", each_tab.page.url)


def test_without_a_choice_the_step_with_the_highest_peak_is_shown(tab, logdir):
    tab.open_anew()
    highest = max(STEPS, key=lambda step: recorded(logdir, step=step).stats.peak_bytes)
    expect(tab("headline")).to_contain_text(f"Step {highest} peaked")
    assert tab.picked() == {"run": "baseline", "worker": "rank0", "step": str(highest)}


@pytest.mark.parametrize(
    ("run", "worker", "step"),
    [("baseline", "rank0", 2), ("baseline", "rank1", 3), ("checkpointed", "rank0", 6)],
)
def test_the_headline_says_the_peak_and_hover_says_its_bytes(each_tab, logdir, run, worker, step):
    stats = recorded(logdir, run, worker, step).stats
    each_tab.open_anew(run=run, worker=worker, step=step)
    peak = each_tab("headline").locator(".amount")
    assert exact(peak) == stats.peak_bytes
    assert_rounds(peak.inner_text(), stats.peak_bytes)
    assert each_tab.picked() == {"run": run, "worker": worker, "step": str(step)}


def test_the_cards_show_the_steps_own_numbers(each_tab, logdir):
    stats = recorded(logdir, step=6).stats
    each_tab.open_anew(step=6)
    shown = {"peak": stats.peak_bytes, "window-peak": stats.window_peak_bytes, "left": stats.end_bytes}
    for card, size in shown.items():
        value = each_tab(f"card-{card}").locator(".value .amount")
        assert (card, exact(value)) == (card, size)
        assert_rounds(value.inner_text(), size)
    under = each_tab("card-left").locator(".under")
    expect(under).to_contain_text("since step 5")
    growth = 0 if "no growth" in under.inner_text() else exact(under.locator(".amount"))
    assert growth == stats.end_bytes - recorded(logdir, step=5).stats.end_bytes
    expect(each_tab("card-allocations").locator(".value")).to_have_text(f"{stats.allocations:,}")
    assert exact(each_tab("card-allocations").locator(".under span")) == stats.allocated_bytes


def test_the_sentence_below_says_what_changed_since_the_step_before(each_tab, logdir):
    each_tab.open_anew(step=6)
    change = each_tab("change").locator(".amount").first
    assert (
        exact(change) == recorded(logdir, step=6).stats.peak_bytes - recorded(logdir, step=5).stats.peak_bytes
    )
    each_tab("show-difference").click()
    each_tab("view-compare").wait_for()
    expect(each_tab("picker-base")).to_have_text("step 5")


def test_the_first_step_is_compared_with_the_next(tab, logdir):
    tab.open_anew(run="baseline", step=2)
    expect(tab("picker-base")).to_have_text("step 3")
    delta = recorded(logdir, step=2).stats.peak_bytes - recorded(logdir, step=3).stats.peak_bytes
    assert exact(tab("card-peak").locator(".under .amount")) == delta
    assert exact(tab("change").locator(".amount").first) == delta


def test_where_nothing_differs_no_difference_is_offered(tab):
    tab.open_anew(step=2, base_run="baseline", base_worker="rank0", base_step=2)
    expect(tab("change")).to_contain_text("to the byte.")
    expect(tab("show-difference")).to_have_count(0)
    expect(tab("another-run")).to_be_visible()


def test_another_run_is_one_click_away_and_all_views_then_tell_the_same_change(tab, logdir):
    delta = recorded(logdir, "checkpointed").stats.peak_bytes - recorded(logdir).stats.peak_bytes
    tab.open_anew(run="checkpointed", worker="rank0", step=2)
    tab("another-run").click()
    tab("view-compare").wait_for()
    expect(tab("picker-base")).to_have_text("step 2 of baseline")
    assert exact(tab("delta-sum")) == delta
    tab("tab-overview").click()
    expect(tab("card-peak")).to_contain_text("against step 2 of baseline")
    assert exact(tab("card-peak").locator(".under .amount")) == delta
    assert exact(tab("change").locator(".amount").first) == delta
    tab("card-peak").click()
    changes = tab("moment-panel").locator("table.compared td.number:last-child .amount")
    tab.wait_until(
        lambda: sum(map(bytes_in, changes.evaluate_all("all => all.map((one) => one.title)"))) == delta,
        "changes of the categories that sum to it",
    )


def test_the_categories_are_the_recordings_and_sum_to_the_peak(each_tab, logdir):
    there = recorded(logdir)
    each_tab.open_anew(step=2)
    each_tab("category-row").first.wait_for()
    shown = {
        key: exact(each_tab("category-row", key=key).locator("td.number").first)
        for key in each_tab.keys("category-row")
    }
    assert shown == there.parts("category")
    assert sum(shown.values()) == there.stats.peak_bytes == exact(each_tab("category-sum"))


def test_layers_fold_into_one_row_that_opens_on_its_parts(tab, logdir):
    there = recorded(logdir)
    tab.open_anew(step=2)
    inside = tab("by-module")
    inside.get_by_role("button", name=re.compile("more rows")).click()
    rows = {key: exact(tab("module-row", key=key).locator("td.number")) for key in tab.keys("module-row")}
    assert sum(rows.values()) == there.stats.peak_bytes == exact(tab("module-sum"))
    parts = there.parts("module")
    members = {key: size for key, size in parts.items() if re.fullmatch(r"blocks\.\d\.mlp\.up", key)}
    assert rows["blocks.*.mlp.up"] == sum(members.values())
    tab("module-row", key="blocks.*.mlp.up").get_by_role("button").click()
    for key, size in members.items():
        assert exact(tab("module-row", key=key).locator("td.number")) == size


def test_findings_stand_in_the_overview_and_lead_to_where_they_show(tab):
    tab.open_anew(run="baseline", worker="rank0", step=6)
    line = tab("finding-line", key="checkpointing")
    expect(line).to_contain_text("less at the peak")
    size = exact(line.locator("td").first)
    line.get_by_role("link", name="Modules").click()
    tab("view-modules").wait_for()
    tab("tab-advice").click()
    assert exact(tab("finding", key="checkpointing").get_by_test_id("finding-bytes")) == size


@pytest.mark.parametrize(
    ("view", "finding", "below"),
    [("overview", "finding-line", "by-category"), ("advice", "finding", "peak-holders")],
)
def test_the_first_finding_is_seen_without_scrolling(tab, view, finding, below):
    """On a laptop's screen, below TensorBoard's bar, the pickers and the headline."""
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    try:
        tab.open_anew(view, run="baseline", worker="rank0", step=6)
        box, other = tab(finding).first.bounding_box(), tab(below).bounding_box()
        assert box is not None
        assert other is not None
        assert box["y"] + min(box["height"], 100) < min(900, other["y"])
    finally:
        tab.page.set_viewport_size(SIZE)


def test_findings_have_their_room_before_they_are_known(tab):
    """Else all that stands beside and below would move when they come."""
    tab.page.route("**/advice?**", lambda route: None)
    try:
        tab.open_anew(run="baseline", worker="rank0", step=3)
        expect(tab("findings")).to_contain_text("Looking for what could be saved")
    finally:
        tab.page.unroute("**/advice?**")


def test_where_shapes_were_not_recorded_one_click_copies_how(tab):
    for view in ("overview", "allocations"):
        tab.open_anew(view)
        expect(tab("lacks-shapes")).to_contain_text("shapes of activations were not recorded")
        copied(tab, "copy-shapes", "tb-memplugin run --shapes")


def test_the_curve_of_peaks_tells_each_steps_and_a_click_picks_it(tab, logdir):
    tab.open_anew(step=2)
    left, top, width, height = tab.plot_box("steps-plot")
    place = (left + width * (5 - 2) / (6 - 2), top + height / 2)
    tab.page.mouse.move(*place)
    expect(tab("steps-tip")).to_contain_text("step 5")
    expect(tab("steps-tip")).to_contain_text(f"{recorded(logdir, step=5).stats.peak_bytes:,} bytes")
    tab.page.mouse.click(*place)
    expect(tab("headline")).to_contain_text("Step 5 peaked")


@pytest.mark.parametrize("view", ["overview", "timeline", "modules", "compare"])
def test_switching_run_worker_and_step_keeps_the_view(tab, view):
    tab.open_anew(view, run="baseline", worker="rank0", step=2)
    for picker, label in (("step", "5"), ("worker", "rank1"), ("run", "checkpointed")):
        tab.pick(picker, label)
        tab.wait_until(lambda p=picker, wanted=label: tab.picked()[p] == wanted, f"{picker} {label}")
        tab(f"view-{view}").wait_for()
    assert tab.picked() == {"run": "checkpointed", "worker": "rank0", "step": "5"}
    tab.wait_until(lambda: f"view={view}" in tab.page.url and "step=5" in tab.page.url, "the address says so")
