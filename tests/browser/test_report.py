"""The exported page in a real browser: offline, silent, exact."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tb_memplugin.exports import html
from tb_memplugin.exports.html import Division
from tests.analysis.histories import allocator_trace
from tests.browser.tab import SIZE, bytes_in
from tests.browser.test_kinds import RED_NEAR_THE_FLOOR
from tests.traces import trace

SCRIPT = "<script>alert(1)</script>"
RECORDING = trace(
    "start 40000 w category=parameter module=net",
    "step 5",
    "alloc 10000 a category=activation module=net.a phase=forward",
    "alloc 6007 b category=gradient module=net.b phase=backward",
    "free a phase=backward",
    "step 6",
    f"alloc 1003 c category=temporary module={SCRIPT} phase=forward",
    "alloc 70 d device=cuda:0 reserved=2048",
    "free b phase=optimizer",
    calls=[("net", 0, 1, "forward")],
)
LEVELS = RECORDING.live(0).tolist()


class Page:
    """The page on disk, and what it must not do."""

    def __init__(self, page, path):
        self.page = page
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("dialog", self._interrupted)
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri())
        self("moment-panel").wait_for()

    def _interrupted(self, dialog):
        self.wrong.append("dialog")
        dialog.dismiss()

    def __call__(self, testid):
        return self.page.get_by_test_id(testid)

    def exact(self, testid):
        return bytes_in(self(testid).first.get_attribute("title"))

    def parts(self, testid="moment-row"):
        cells = "rows => rows.map((row) => [row.dataset.key, row.querySelector('td').title])"
        return {key: bytes_in(title) for key, title in self(testid).evaluate_all(cells)}

    def point(self, share):
        """A place on the plot, between its margins, once it is laid out and hears the mouse."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)))"
        self.page.evaluate(f"() => new Promise((done) => {frames})")
        box = self("timeline-canvas").bounding_box()
        left, right = box["x"] + 78, box["x"] + box["width"] - 12
        return left + (right - left) * share, box["y"] + 150


@pytest.fixture(params=["light", "dark"])
def report(chromium, tmp_path, request):
    divisions = [Division("category", "Category"), Division("module", "Module"), Division("stack", "Stack")]
    html.write(RECORDING, tmp_path / "report.html", divisions, f"a run {SCRIPT}")
    context = chromium.new_context(viewport=SIZE, color_scheme=request.param, offline=True)
    opened = Page(context.new_page(), tmp_path / "report.html")
    yield opened
    context.close()
    assert opened.wrong == []
    assert {address.partition("#")[0] for address in opened.asked} == {(tmp_path / "report.html").as_uri()}


def test_it_opens_at_the_peak_of_the_fullest_device(report):
    expect(report("moment-panel").locator("h2")).to_contain_text("At the peak")
    assert report.exact("moment-bytes") == max(LEVELS) == 56_007
    assert report.parts() == {"parameter": 40_000, "activation": 10_000, "gradient": 6_007}
    assert report.parts("peak-row") == report.parts()
    assert report.exact("peak-total") == 56_007


def test_names_are_text(report):
    expect(report.page.locator("h1")).to_have_text(f"a run {SCRIPT}")
    report("by-1").click()
    report.page.mouse.move(*report.point(0.75))
    expect(report("moment-panel")).to_contain_text(SCRIPT)
    assert report.page.locator("main script, main img").count() == 0


def test_advice_is_said_as_on_the_command_line(chromium, tmp_path):
    growing = [
        line for step in range(4) for line in (f"step {step}", f"alloc 1024 l{step} operator={SCRIPT}")
    ]
    html.write(
        trace("start 40000 w", *growing), tmp_path / "report.html", [Division("category", "Category")], "t"
    )
    context = chromium.new_context(offline=True)
    page = Page(context.new_page(), tmp_path / "report.html")
    expect(page("advice").locator("h2").first).to_contain_text("Advice: 1 problem, no options; ")
    expect(page("finding")).to_have_attribute("data-key", "growth")
    expect(page("finding-title")).to_contain_text(SCRIPT)
    assert page.exact("finding-bytes") == 1024
    expect(page("finding")).to_contain_text("Find what still holds these tensors after the step")
    context.close()
    assert page.wrong == []


def test_on_paper_tables_have_all_their_rows_and_colors(chromium, tmp_path):
    many = trace("step 0", *(f"alloc {1000 + at} b{at} category=activation" for at in range(60)))
    html.write(many, tmp_path / "report.html", [Division("category", "Category")], "t")
    page = Page(chromium.new_page(), tmp_path / "report.html")
    hidden = "all => Math.max(...all.map((one) => one.scrollHeight - one.clientHeight))"
    assert page.page.locator(".scroller").evaluate_all(hidden) > 100
    page.page.emulate_media(media="print")
    assert page.page.locator(".scroller").evaluate_all(hidden) == 0
    printed = "(swatch) => getComputedStyle(swatch).printColorAdjust"
    assert page.page.locator(".swatch").first.evaluate(printed) == "exact"
    page.page.close()
    assert page.wrong == []


@pytest.mark.parametrize("share", [0.05, 0.3, 0.55, 0.9])
def test_hovering_shows_the_exact_state_under_the_pointer(report, share):
    report.page.mouse.move(*report.point(share))
    event = max(index for index in range(-1, 6) if index + 0.5 <= share * 6 and index != 4)
    expect(report("moment-panel")).to_have_attribute("data-event", str(event))
    assert report.exact("moment-bytes") == LEVELS[event + 1] == sum(report.parts().values())


def test_the_arrow_keys_step_through_the_events_of_the_device(report):
    report("timeline-canvas").focus()
    report.page.mouse.move(5, 5)
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        report.page.keyboard.press(key)
        seen.append(int(report("moment-panel").get_attribute("data-event")))
    assert seen == [2, 3, 5, 3, 2, 1, 0]  # event 4 is another device's
    report("to-peak").click()
    assert report.exact("moment-bytes") == 56_007


def test_dragging_zooms_and_a_double_click_shows_everything(report):
    mouse = report.page.mouse
    mouse.move(*report.point(0.25))
    mouse.down()
    mouse.move(*report.point(0.4))
    mouse.move(*report.point(0.5))
    mouse.up()
    expect(report("reset-zoom")).to_be_visible()
    canvas = report("timeline-canvas")
    assert float(canvas.get_attribute("data-t0")) == pytest.approx(1500, abs=10)
    assert float(canvas.get_attribute("data-t1")) == pytest.approx(3000, abs=10)
    mouse.move(*report.point(0.9))
    assert report.exact("moment-bytes") == LEVELS[3]
    mouse.dblclick(*report.point(0.5))
    expect(report("reset-zoom")).to_have_count(0)


def test_every_division_and_both_axes_show_the_same_bytes(report):
    for by in ("by-1", "by-2", "by-0"):
        report(by).click()
        for axis in ("axis-event", "axis-time"):
            report(axis).click()
            report.page.mouse.move(5, 5)
            assert sum(report.parts().values()) == report.exact("moment-bytes") == 56_007


def test_another_device_can_be_picked(report):
    report("picker-device").select_option(index=1)
    expect(report("moment-bytes")).to_have_attribute("title", re.compile("^70 bytes"))
    assert report.exact("moment-reserved") == 2048


def test_light_and_dark(report):
    def ground():
        return report.page.evaluate("getComputedStyle(document.body).backgroundColor")

    before = ground()
    report("theme").click()
    assert ground() != before
    report("theme").click()
    assert ground() == before


def test_a_narrow_window_needs_no_sideways_scrolling(report):
    report.page.set_viewport_size({"width": 700, "height": 900})
    widths = report.page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert widths[0] <= widths[1] == 700


def test_a_failed_request_is_marked_on_both_axes(chromium, tmp_path):
    made = allocator_trace("alloc 16M 100", "alloc 17M 100", "oom 3M 90M", "free_completed 16M 100")
    html.write(made, tmp_path / "report.html", [Division("category", "Category")], "a run")
    context = chromium.new_context(viewport=SIZE, offline=True)
    report = Page(context.new_page(), tmp_path / "report.html")
    canvas = report("timeline-canvas")
    for axis, at in (("axis-time", "2.00 µs"), ("axis-event", "event 2")):
        report(axis).click()
        expect(canvas).to_have_attribute(
            "aria-label", re.compile(rf"A request of 90\.00 MiB failed at {at}\.")
        )
        assert canvas.evaluate(RED_NEAR_THE_FLOOR) > 100
    context.close()


def test_a_source_line_reads_from_left_to_right(chromium, tmp_path):
    made = allocator_trace("alloc 16M 100 stack=0", stacks=(("step /home/me/train.py:17",),))
    html.write(made, tmp_path / "report.html", [Division("line", "Line")], "a run")
    context = chromium.new_context(viewport=SIZE, offline=True)
    tail = Page(context.new_page(), tmp_path / "report.html").page.locator(".tail").first
    expect(tail).to_have_text(":17 (step)")
    places = tail.evaluate(
        """node => [...node.textContent].map((_, place) => {
            const text = document.createTreeWalker(node, NodeFilter.SHOW_TEXT).nextNode();
            const one = document.createRange();
            one.setStart(text, place);
            one.setEnd(text, place + 1);
            return one.getBoundingClientRect().left;
        })"""
    )
    context.close()
    assert places == sorted(places)
