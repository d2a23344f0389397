"""For everybody: axe-core finds nothing, the keyboard reaches everything, motion can be declined."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

import tb_memplugin
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.browser.conftest import watched
from tests.browser.made_snapshot import made_snapshot
from tests.browser.made_stacks import stacked_snapshot
from tests.browser.test_timeline import moment_shown, ready, span
from tests.step_figures import figures
from tests.tensorboard.process import tensorboard

AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = (
    "overview",
    "timeline",
    "modules",
    "allocations",
    "stacks",
    "allocator",
    "compare",
    "ranks",
    "fleet",
    "advice",
)
RUNS: dict[str, dict[str, Any]] = {
    "baseline": {"run": "baseline", "step": 6},
    "snapshot": {"run": "snapshot"},
    "stacks": {"run": "stacks"},
    "figures": {"run": "monitored", "step": 30},
}


@pytest.fixture(scope="module")
def server(logdir, tmp_path_factory):
    """A profile, a snapshot that ends out of memory, one with stacks, and a monitor's figures."""
    folder = tmp_path_factory.mktemp("accessible")
    shutil.copytree(logdir / "baseline", folder / "baseline")
    file = folder / "snapshot.pickle"
    file.write_bytes(pickle.dumps(made_snapshot()))
    RunWriter(str(folder / "snapshot"), "rank0").write(tb_memplugin.load(file))
    RunWriter(str(folder / "stacks"), "rank0").write(tb_memplugin.load(stacked_snapshot()))
    peaks = (6 << 30) + np.arange(100) * (2 << 20)
    StepsWriter(str(folder / "monitored"), "rank0", 0).write(figures(peaks, phases={"forward": peaks}))
    with tensorboard(folder) as running:
        running.wait_for("runs", lambda answer: len(answer["runs"]) == 4)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


def judged(tab):
    """What axe-core finds in our frame, of any impact: rule, how many elements, and the first of them."""
    frame = next(frame for frame in tab.page.frames if "name=tb_memplugin" in frame.url)
    if not frame.evaluate("typeof axe === 'object'"):
        frame.evaluate(AXE.read_text("utf-8"))
    found = frame.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [(rule["id"], len(rule["nodes"]), rule["nodes"][0]["html"][:200]) for rule in found]


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed in frontend/node_modules")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_any_view(open_tab, server, theme):
    tab = open_tab(server.url)
    tab.open(query=f"?darkMode={'true' if theme == 'dark' else 'false'}", **RUNS["baseline"])
    wrong = {}
    for name, route in RUNS.items():
        for view in VIEWS:
            if view == "ranks" and name in ("snapshot", "stacks"):
                continue  # one rank alone, as in `figures`
            tab.open_anew(view, **route)
            tab.settle()
            if found := judged(tab):
                wrong[name, view] = found
    assert wrong == {}


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed in frontend/node_modules")
@pytest.mark.parametrize("view", VIEWS)
def test_what_scrolls_sideways_in_a_narrow_window_is_reached_by_keyboard(open_tab, server, view):
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 390, "height": 844})
    tab.open(view, **RUNS["stacks" if view != "ranks" else "baseline"]).settle()
    assert [rule for rule in judged(tab) if rule[0] == "scrollable-region-focusable"] == []


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed in frontend/node_modules")
def test_nor_in_what_opens_on_a_click(open_tab, server):
    tab = open_tab(server.url).open("allocations", run="stacks")
    tab("allocation-row").first.get_by_role("button").click()
    tab("picker-base").click()
    tab("picker-base-panel").wait_for()
    tab.settle()
    assert judged(tab) == []
    tab("export").click()
    tab("copy-command").or_(tab("copy-link")).first.wait_for()
    assert judged(tab) == []
    tab.open_anew("modules", run="baseline", shape="icicle")
    tab("icicle-canvas").hover()
    tab("icicle-tip").wait_for()
    assert judged(tab) == []


def focused(tab):
    return tab.frame.locator("body").evaluate("() => document.activeElement.dataset.testid ?? ''")


def test_a_picker_is_picked_from_by_keys_and_keeps_the_focus(tab):
    tab.open_anew("overview", run="baseline", step=3)
    tab("picker-step").focus()
    tab.page.keyboard.press("ArrowDown")
    expect(tab("headline")).to_contain_text("Step 5 peaked")
    assert focused(tab) == "picker-step"


def test_compare_with_opens_at_its_first_picker_and_escape_goes_back_to_the_button(tab):
    tab.open_anew("overview", run="baseline", step=3)
    tab("picker-base").focus()
    tab.page.keyboard.press("Enter")
    tab("picker-base-panel").wait_for()
    assert focused(tab) == "picker-base-run"
    tab.page.keyboard.press("Escape")
    expect(tab("picker-base-panel")).to_have_count(0)
    assert focused(tab) == "picker-base"


def test_the_timeline_zooms_moves_and_shows_everything_again_by_keys(tab):
    ready(tab, run="baseline", step=6)
    whole = span(tab)
    canvas = tab("timeline-canvas")
    canvas.focus()
    tab.page.keyboard.press("+")
    tab.wait_until(lambda: span(tab)[1] - span(tab)[0] < 0.6 * (whole[1] - whole[0]), "the zoom")
    before = span(tab)
    tab.page.keyboard.press("Shift+ArrowRight")
    tab.wait_until(lambda: span(tab)[0] > before[0], "the move")
    assert span(tab)[1] - span(tab)[0] == pytest.approx(before[1] - before[0], abs=1)
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.wait_until(lambda: span(tab) == pytest.approx(before, abs=1), "the way back")
    tab.page.keyboard.press("Escape")
    tab.wait_until(lambda: span(tab) == whole, "the whole step")
    tab.page.keyboard.press("ArrowLeft")
    expect(tab("moment-panel").locator("h2")).not_to_contain_text("At the peak")
    event, size, _ = moment_shown(tab)
    expect(tab("moment-panel").get_by_role("status")).to_contain_text(f"after event {event:,}")
    assert size > 0
    tab.page.keyboard.press("Home")
    expect(tab("moment-panel").locator("h2")).to_contain_text("At the peak")


def test_the_focus_ring_of_the_curve_stays_off_the_lanes(tab):
    ready(tab, run="baseline", step=6)
    tab("timeline-canvas").focus()
    tab.page.keyboard.press("Home")  # a ring is shown to those who use keys
    style, width, offset = tab("timeline-canvas").evaluate(
        "one => { const s = getComputedStyle(one); return [s.outlineStyle, s.outlineWidth, s.outlineOffset] }"
    )
    assert (style, width, offset) == ("solid", "2px", "-2px")  # within the canvas; the lanes begin below it


def test_tables_are_sorted_and_walked_by_keys(tab):
    tab.open_anew("modules", run="baseline", step=6)
    tab("sort-allocations").focus()
    tab.page.keyboard.press("Enter")
    expect(tab("sort-allocations").locator("..")).to_have_attribute("aria-sort", "descending")
    assert focused(tab) == "sort-allocations"
    root = tab("module-row", key="").get_by_role("button")
    root.focus()
    tab.page.keyboard.press("ArrowDown")
    key = "() => document.activeElement.closest('tr')?.dataset.key"
    assert tab.frame.locator("body").evaluate(key) == "blocks"
    tab.page.keyboard.press("ArrowUp")
    assert tab.frame.locator("body").evaluate(key) == ""


def second_allocation(tab):
    """Open Allocations and walk to its second row by keys; return the rows."""
    tab.open_anew("allocations", run="stacks")
    rows = tab("allocation-row")
    rows.first.wait_for()
    tab.settle()
    rows.first.get_by_role("button").focus()
    tab.page.keyboard.press("ArrowDown")
    return rows


def test_allocations_are_walked_and_kept_by_keys(tab):
    rows = second_allocation(tab)
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("Enter")
    expect(rows.nth(2)).to_have_attribute("aria-selected", "true")
    chosen = rows.nth(2).get_attribute("data-row")
    tab.wait_until(lambda: f"block={chosen}" in tab.page.url, "the allocation in the address")


def test_the_tab_key_stops_at_one_row_of_a_long_table_and_comes_back_to_it(tab):
    second_allocation(tab)
    row = "() => document.activeElement.closest('tbody tr')?.getAttribute('aria-rowindex') ?? null"
    body = tab.frame.locator("body")
    assert body.evaluate(row) == "3"  # the head is row 1
    tab.page.keyboard.press("Tab")
    assert body.evaluate(row) is None
    tab.page.keyboard.press("Shift+Tab")
    assert body.evaluate(row) == "3"


def test_the_number_of_a_watched_step_can_be_typed(tab):
    tab.open_anew("overview", run="monitored", step=30)
    tab("picker-step").fill("77")
    tab.page.keyboard.press("Enter")
    expect(tab("headline")).to_contain_text("Step 77 peaked")
    tab("picker-step").fill("4000")
    tab.page.keyboard.press("Enter")
    expect(tab("picker-step")).to_have_value("77")


def test_nothing_moves_where_motion_is_declined(open_tab, server):
    tab = open_tab(server.url)
    tab.page.emulate_media(reduced_motion="reduce")
    tab.open("overview", **RUNS["baseline"])
    moving = tab.frame.locator("body").evaluate(
        """() => {
            const box = document.createElement("div");
            box.innerHTML = '<div class="loading"><div class="skeleton"></div></div><p class="stale"></p>';
            document.body.append(box);
            const styles = [...document.querySelectorAll("*")].map((element) => getComputedStyle(element));
            const still = (time) => time.split(",").every((part) => parseFloat(part) === 0);
            const moves = (style) => style.animationName !== "none" || !still(style.transitionDuration);
            const count = styles.filter(moves).length;
            box.remove();
            return count;
        }"""
    )
    assert moving == 0
