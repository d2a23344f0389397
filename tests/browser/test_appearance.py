"""Light and dark as TensorBoard is, narrow as the window is; and the pictures for the README."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.test_timeline import point

MOST_BYTES = 200_000
CHOSEN = {"run": "baseline", "worker": "rank0", "step": 6}
PAIR = {**CHOSEN, "run": "checkpointed", "base_run": "baseline", "base_worker": "rank0", "base_step": 6}

PIXELS = """async (png) => {
    const image = new Image();
    image.src = `data:image/png;base64,${png}`;
    await image.decode();
    const { width, height } = image;
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    return [1, image.width / 2, image.width - 2].map((x) => String(context.getImageData(x, 3, 1, 1).data));
}"""
"""The colors at the left, in the middle and at the right of a picture, near its top."""


def ground(tab):
    """The brightness of the page behind everything, 0 to 255."""
    color = tab.frame.locator("body").evaluate("(body) => getComputedStyle(body).backgroundColor")
    red, green, blue = (int(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3])
    return (red + green + blue) / 3


def test_it_is_dark_where_tensorboard_is_and_follows_its_switch(open_tab, server):
    tab = open_tab(server.url).open(query="?darkMode=true", **CHOSEN)
    assert ground(tab) < 60
    tab.page.get_by_role("button", name="Menu for changing light or dark theme").click()
    tab.page.get_by_role("menuitem", name="Light").click()
    tab.wait_until(lambda: ground(tab) > 200, "the light theme")
    tab.page.get_by_role("button", name="Menu for changing light or dark theme").click()
    tab.page.get_by_role("menuitem", name="Dark").click()
    tab.wait_until(lambda: ground(tab) < 60, "the dark theme")
    expect(tab("headline")).to_contain_text("Step 6 peaked")


def test_colors_that_mean_something_stay_where_the_system_forces_its_own(open_tab, server):
    tab = open_tab(server.url).open(**CHOSEN)
    tab.settle()
    marks = tab.frame.locator(".swatch, .share-bar i")
    drawn = "all => all.map((one) => getComputedStyle(one).background)"
    before = marks.evaluate_all(drawn)
    assert len(set(before)) >= 6  # categories
    tab.page.emulate_media(forced_colors="active")
    assert marks.evaluate_all(drawn) == before


def test_a_narrow_window_needs_no_sideways_scrolling(open_tab, server):
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 700, "height": 900})
    tab.open("overview", **PAIR)
    for view in ("overview", "timeline", "modules", "compare"):
        tab(f"tab-{view}").click()
        tab(f"view-{view}").wait_for()
        tab.settle()
        widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
        assert widths[0] <= widths[1] == 700, view
    for name in ("picker-run", "picker-step", "picker-base", "tab-compare"):
        box = tab(name).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 700


def test_in_a_narrow_window_what_is_read_first_is_in_sight(open_tab, server):
    """At 800 pixels: both buttons and all figures in a row each, and a moment below its picture."""
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 800, "height": 900})
    tab.open("overview", **PAIR).settle()
    tops = "all => [...new Set(all.map((one) => Math.round(one.getBoundingClientRect().top)))]"
    assert len(tab.frame.locator("[data-testid=copy-link], [data-testid=export]").evaluate_all(tops)) == 1
    assert len(tab.frame.locator(".tile").evaluate_all(tops)) == 1
    cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"
    assert tab.frame.locator(".tile *").evaluate_all(cut) == []
    tab.open_anew("timeline", **PAIR).settle()
    picture, panel = tab("timeline-canvas").bounding_box(), tab("moment-panel").bounding_box()
    assert picture is not None
    assert panel is not None
    assert panel["y"] > picture["y"] + picture["height"]
    assert tab("moment-panel").locator("table *").evaluate_all(cut) == []


def test_a_phone_shows_every_choice_and_the_open_views_tab(open_tab, server):
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 320, "height": 700})
    for view in ("timeline", "fleet"):
        tab.open_anew(view, **PAIR)
        tab.settle()
        outside = tab.frame.locator(f"html, .segmented button, [data-testid=tab-{view}]").evaluate_all(
            "all => all.filter((one) => one.getBoundingClientRect().right > 321 || one.scrollWidth > 320)"
            ".map((one) => one.outerHTML.slice(0, 80))"
        )
        assert outside == [], view


def test_a_shadow_at_an_edge_tells_of_more_views_behind_it(open_tab, server):
    """As on a phone: views are hidden at the right, then, scrolled to the end, at the left."""
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 390, "height": 700})
    tab.open("overview", **PAIR)
    tabs = tab.frame.get_by_role("navigation", name="Views")
    for scrolled, shaded in ((0, "right"), (10_000, "left")):
        tabs.evaluate("(tabs, left) => { tabs.scrollLeft = left; }", scrolled)
        left, middle, right = tab.page.evaluate(PIXELS, base64.b64encode(tabs.screenshot()).decode())
        assert (left != middle, right != middle) == (shaded == "left", shaded == "right")


def test_the_tabs_scroll_by_no_height(open_tab, server):
    """Else a bar that scrolls nothing stands beside them where scrollbars take room."""
    tab = open_tab(server.url).open(**CHOSEN)
    heights = "(tabs) => [tabs.scrollHeight, tabs.clientHeight]"
    content, shown = tab.frame.locator(".tabs").evaluate(heights)
    assert content == shown


def test_at_twice_the_size_all_views_are_in_one_line_and_rows_stay_one_line_high(open_tab, server):
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 640, "height": 500})  # what 1280 pixels at 200 % leave
    tab.open("overview", **PAIR)
    tab.settle()
    box = tab("tab-advice").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 640
    rows = tab("largest").locator("tbody tr").evaluate_all("rows => rows.map((row) => row.offsetHeight)")
    assert len(rows) == 8
    assert max(rows) < 36


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Where the pictures go: `make docs` names a folder."""
    named = os.environ.get("TB_MEMPLUGIN_PICTURES")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_of_every_view_are_taken(open_tab, server, pictures, theme):
    tab = open_tab(server.url)
    tab.open(query=f"?darkMode={'true' if theme == 'dark' else 'false'}", **CHOSEN)
    for view in ("overview", "timeline", "modules", "compare"):
        tab.open_anew(view, **(PAIR if view == "compare" else CHOSEN))
        if view == "timeline":
            expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
            tab.page.mouse.move(*point(tab, 0.28))
            expect(tab("moment-panel").locator("h2")).not_to_contain_text("At the peak")
            expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
        if view == "modules":
            tab("module-row", key="blocks").get_by_role("button").click()
            tab("module-row", key="blocks.0").get_by_role("button").click()
            expect(tab("module-row", key="blocks.0.attn")).to_be_visible()
            tab.page.mouse.move(0, 0)
        tab.settle()
        picture = pictures / f"{view}-{theme}.png"
        tab.page.screenshot(path=picture, animations="disabled")
        assert 20_000 < picture.stat().st_size < MOST_BYTES, picture
