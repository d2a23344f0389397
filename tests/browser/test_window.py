"""All steps of a recorded window as one Timeline: its peak and every moment are the recording's."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.moments import moment
from tests.browser.recorded import recorded
from tests.browser.tab import bytes_in, exact
from tests.browser.test_timeline import moment_shown, point, span

WINDOW = "5 to 6, the whole window"


def opened(tab, **route):
    tab.open_anew("timeline", run="baseline", worker="rank0", **{"step": 6, "span": "window", **route})
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    tab.settle()
    return tab


def parts_at(there, event, by: By = "category"):
    return {part.key: part.bytes for part in moment(there.trace, 0, event).parts(by) if part.bytes}


def test_the_step_picker_offers_the_window_and_goes_back_to_a_step(tab):
    tab.open_anew("overview", run="baseline", worker="rank0", step=6)
    tab.pick("step", WINDOW)
    tab("view-timeline").wait_for()
    tab.wait_until(lambda: "span=window" in tab.page.url, "the window in the address")
    assert tab.picked()["step"] == WINDOW
    tab("tab-overview").click()
    expect(tab("headline")).to_contain_text("Step 6 peaked")
    assert tab.picked()["step"] == "6"  # this view has no windows
    tab("tab-timeline").click()
    assert tab.picked()["step"] == WINDOW
    tab.pick("step", "6")
    tab.wait_until(lambda: "span=" not in tab.page.url, "the step in the address")


def test_it_shows_all_steps_and_the_highest_moment_of_all(each_tab, logdir):
    there = recorded(logdir, step=6)
    opened(each_tab)
    first, last = there.trace.steps[0], there.trace.steps[-1]
    assert span(each_tab) == (first.start_ns - there.epoch_ns, last.end_ns - there.epoch_ns)
    live = there.trace.live(0)
    event, total, parts = moment_shown(each_tab)
    assert total == int(live.max()) == sum(parts.values())
    assert parts == parts_at(there, event)
    expect(each_tab("moment-panel").locator("h2")).to_contain_text("step 6")


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_every_moment_of_it_is_exact_and_names_its_step(tab, logdir, share):
    there = recorded(logdir, step=6)
    opened(tab)
    tab.page.mouse.move(*point(tab, share))
    expect(tab("moment-panel").locator("h2")).not_to_contain_text("At the peak")
    event, total, parts = moment_shown(tab)
    assert total == moment(there.trace, 0, event).bytes
    assert parts == parts_at(there, event)
    time = there.trace.events.time_ns[event]
    step = next(step for step in there.trace.steps if step.start_ns <= time <= step.end_ns)
    expect(tab("moment-panel").locator("h2")).to_contain_text(f"step {step.number}")


@pytest.mark.parametrize("view", ["allocations", "stacks"])
def test_other_views_of_time_show_the_window_too(tab, logdir, view):
    there = recorded(logdir, step=6)
    tab.open_anew(view, run="baseline", worker="rank0", step=6, span="window")
    assert tab.picked()["step"] == WINDOW
    tab.settle()
    if view == "stacks":  # nothing of them is recorded here; what the peak held is
        assert sum(map(bytes_in, titles(tab, "division-row"))) == there.trace.live(0).max()
        return
    expect(tab("headline")).to_contain_text("at the peak of steps 5 to 6")
    assert exact(tab("headline").locator("strong").first) == there.trace.live(0).max()
    born = there.trace.allocations.born
    expect(tab("allocations-sum")).to_contain_text(f"{len(born):,} allocations")
    tab.pick("step", "6")
    expect(tab("headline")).to_contain_text("at the peak of step 6")


def titles(tab, row):
    return tab(row).locator("td.strong").evaluate_all("cells => cells.map((cell) => cell.title)")


def test_a_click_on_a_step_of_the_lanes_zooms_to_it(tab, logdir):
    there = recorded(logdir, step=6)
    opened(tab)
    box = tab("lanes-canvas").bounding_box()
    assert box is not None
    x, _ = point(tab, 0.05)
    tab.page.mouse.click(x, box["y"] + 8)
    first = there.trace.steps[0]
    wanted = (first.start_ns - there.epoch_ns, first.end_ns - there.epoch_ns)
    tab.wait_until(lambda: span(tab) == wanted, "the first step")
    tab("reset-zoom").click()
    tab.wait_until(lambda: span(tab) != wanted, "the whole window")
