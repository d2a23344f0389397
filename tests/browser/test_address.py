"""What is shown is in the address: it can be reloaded, shared, gone back to, and reached by keyboard."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.browser.tab import SIZE
from tests.browser.test_export import copied
from tests.browser.test_timeline import drag, span

VIEWS = {
    "overview": {"run": "baseline", "worker": "rank1", "step": 3},
    "timeline": {"run": "checkpointed", "worker": "rank0", "step": 5, "by": "phase"},
    "modules": {
        "run": "baseline",
        "worker": "rank0",
        "step": 6,
        "find": "blocks.*.mlp",
        "sort": "-activations",
    },
    "compare": {"run": "checkpointed", "step": 5, "base_run": "baseline", "base_step": 3, "what": "category"},
}


def page_text(tab):
    """All that our frame says, once it says it exactly."""
    if tab("moment-panel").count():
        expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    return tab.settle()


@pytest.mark.parametrize("view", VIEWS)
def test_a_reload_and_a_fresh_page_show_the_same(tab, open_tab, view):
    tab.open_anew(view, **VIEWS[view])
    before, picked = page_text(tab), tab.picked()
    assert len(before) > 300
    address = tab.page.url
    tab.page.reload()
    tab(f"view-{view}").wait_for()
    tab.wait_until(lambda: page_text(tab) == before, "the same text after a reload")
    other = open_tab(tab.home)
    other.page.goto(address)
    other(f"view-{view}").wait_for()
    other.wait_until(lambda: page_text(other) == before, "the same text on a fresh page")
    assert other.picked() == tab.picked() == picked


def test_what_is_clicked_is_in_the_address_and_comes_back_from_it(tab):
    tab.open_anew("timeline", run="baseline", worker="rank0", step=3)
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    tab.pick("run", "checkpointed")
    tab("by-phase").click()
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    drag(tab, 0.2, 0.6)
    expect(tab("reset-zoom")).to_be_visible()
    zoomed = span(tab)
    parts = (
        "run=checkpointed",
        "step=3",
        "view=timeline",
        "by=phase",
        f"t0={zoomed[0]:.0f}",
        f"t1={zoomed[1]:.0f}",
    )
    tab.wait_until(lambda: all(part in tab.page.url for part in parts), "the address")
    tab.page.reload()
    tab("view-timeline").wait_for()
    assert span(tab) == zoomed
    expect(tab("by-phase")).to_have_attribute("aria-pressed", "true")
    assert tab.picked() == {"run": "checkpointed", "worker": "rank0", "step": "3"}


def test_a_link_holds_the_zoom_the_cursor_and_the_mark(tab, open_tab):
    tab.open_anew("timeline", run="baseline", worker="rank0", step=3)
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    drag(tab, 0.2, 0.6)
    expect(tab("reset-zoom")).to_be_visible()
    tab.page.mouse.move(0, 0)
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    tab("flip-mark").click()
    tab("event-next").click()
    expect(tab("since-mark")).to_contain_text("since")
    expect(tab("stretch-panel")).to_have_attribute("data-exact", "true")
    before = page_text(tab)
    link = copied(tab, "copy-link", tab.home)
    for part in ("t0=", "t1=", "mark=", "event=", "run=baseline", "worker=rank0", "step=3"):
        assert f"p.tb_memplugin.{part}" in link
    other = open_tab(tab.home)
    other.page.goto(link)
    other("view-timeline").wait_for()
    other.wait_until(lambda: page_text(other) == before, "the same text from the link")


def test_a_base_that_is_gone_is_told(tab):
    tab.open_anew("compare", run="baseline", step=3, base_run="gone", base_step=2)
    expect(tab("missing")).to_contain_text("run gone to compare with")
    tab("missing").get_by_role("button").click()
    expect(tab("missing")).to_have_count(0)
    assert "base_run" not in tab.page.url


def test_the_content_is_one_key_away(tab):
    tab.open_anew("modules", run="baseline", step=2)
    tab("skip").focus()
    expect(tab("skip")).to_be_in_viewport()
    tab.page.keyboard.press("Enter")
    assert focused(tab) == "view-modules"


def test_an_address_that_was_typed_is_followed_and_back_returns(open_tab, server):
    tab = open_tab(server.url).open("overview", run="baseline", step=2)
    tab.page.goto(
        tab.address("modules", run="checkpointed", step=5)
    )  # the hash alone differs: nothing is loaded
    tab("view-modules").wait_for()
    assert tab.picked()["run"] == "checkpointed"
    tab.page.go_back()
    tab("view-overview").wait_for()
    expect(tab("headline")).to_contain_text("Step 2 peaked")
    assert tab.picked()["run"] == "baseline"


def test_back_returns_from_view_to_view_and_pick_to_pick_but_not_through_every_zoom(open_tab, server):
    tab = open_tab(server.url).open("overview", run="baseline", worker="rank0", step=2)
    tab.settle()
    entries = tab.page.evaluate("history.length")
    tab("tab-timeline").click()
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    drag(tab, 0.2, 0.6)
    expect(tab("reset-zoom")).to_be_visible()
    zoomed = span(tab)
    tab.pick("run", "checkpointed")
    tab("tab-modules").click()
    tab("view-modules").wait_for()
    assert tab.page.evaluate("history.length") == entries + 3
    tab.page.go_back()
    tab("view-timeline").wait_for()
    assert tab.picked()["run"] == "checkpointed"
    tab.page.go_back()
    tab.wait_until(lambda: tab.picked()["run"] == "baseline", "the run before")
    tab.wait_until(lambda: span(tab) == zoomed, "the zoom as it was left")
    tab.page.go_back()
    tab("view-overview").wait_for()
    expect(tab("headline")).to_contain_text("Step 2 peaked")
    tab.page.go_forward()
    tab("view-timeline").wait_for()


def test_a_frame_loaded_after_back_shows_what_the_address_says(tab):
    """TensorBoard itself remembers the address as it was at the last Back."""
    tab.open_anew("overview", run="baseline", worker="rank0", step=2)
    tab("tab-timeline").click()
    tab("view-timeline").wait_for()
    tab.page.go_back()
    tab("view-overview").wait_for()
    tab.open_anew("modules", step=3)
    tab.settle()
    expect(tab("view-modules")).to_be_visible()
    assert tab.picked()["step"] == "3"


def test_another_tab_of_tensorboard_keeps_what_was_shown(open_tab, server):
    tab = open_tab(server.url).open("modules", run="checkpointed", step=5)
    tab.page.get_by_role("tab", name="Time Series").click()
    tab.wait_until(lambda: "timeseries" in tab.page.url, "the other tab")
    tab.page.get_by_role("tab", name="Memory").click()
    tab("view-modules").wait_for()
    assert tab.picked() == {"run": "checkpointed", "worker": "rank0", "step": "5"}


def test_an_address_that_asks_for_what_is_not_there_shows_the_nearest_and_says_so(tab):
    name = "<img src=x onerror=alert(1)>"
    tab.open_anew("overview", run=name, step=99)
    expect(tab("missing")).to_contain_text(f"run {name}, step 99")
    assert quote(name, safe="") in tab.page.url
    expect(tab("headline")).to_contain_text("peaked at")


def test_every_view_is_reached_by_the_keyboard_alone(tab):
    tab.open_anew("overview", step=2)
    tab("picker-run").focus()
    for view in ("timeline", "modules", "compare", "overview"):
        for _ in range(30):
            if focused(tab) == f"tab-{view}":
                break
            tab.page.keyboard.press("Shift+Tab" if view == "overview" else "Tab")
        assert focused(tab) == f"tab-{view}"
        tab.page.keyboard.press("Enter")
        tab(f"view-{view}").wait_for()


def focused(tab):
    return tab.frame.locator("body").evaluate("() => document.activeElement.dataset.testid ?? ''")


def test_back_returns_to_where_the_view_was_scrolled_to(tab):
    tab.page.set_viewport_size({"width": 1280, "height": 500})
    try:
        tab.open_anew("overview", run="baseline", worker="rank0", step=6)
        tab.settle()
        tab("category-row").last.get_by_role("link").scroll_into_view_if_needed()
        height = "(page) => page.ownerDocument.defaultView.scrollY"
        left = tab.frame.locator("html").evaluate(height)
        assert left > 100
        tab("category-row").last.get_by_role("link").click()
        tab("view-timeline").wait_for()
        assert tab.frame.locator("html").evaluate(height) == 0
        focused = "(page) => page.ownerDocument.activeElement.dataset.testid"
        assert tab.frame.locator("html").evaluate(focused) == "view-timeline"
        tab.page.go_back()
        tab("view-overview").wait_for()
        tab.wait_until(lambda: tab.frame.locator("html").evaluate(height) == left, "the place that was left")
    finally:
        tab.page.set_viewport_size(SIZE)


def test_a_run_at_the_top_goes_by_its_folder(logdir, start_tensorboard, open_tab):
    server = start_tensorboard(logdir / "baseline")
    server.wait_for("runs", lambda answer: len(answer["runs"]) == 1)
    tab = open_tab(server.url).open("overview")
    assert tab.picked()["run"] == "baseline"
    tab("tab-modules").click()
    tab("view-modules").wait_for()
    assert "p.tb_memplugin.run=.&" in tab.page.url
