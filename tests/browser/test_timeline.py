"""Timeline: the curve is drawn, and every moment that it is pointed at is the recording's, to the byte."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.recorded import recorded
from tests.browser.tab import assert_rounds, bytes_in, colors, exact


def moment_shown(tab):
    """(event, bytes, parts) of the panel, once the server has answered; "rest" is what it sums up."""
    panel = tab("moment-panel")
    expect(panel).to_have_attribute("data-exact", "true")
    title = panel.locator("h2").inner_text()
    found = re.search(r"event ([0-9,]+)", title)
    assert found is not None, title
    rows = tab("moment-row").evaluate_all(
        "rows => rows.map((row) => [row.dataset.key, row.querySelector('td').title])"
    )
    total = bytes_in(panel.locator(".big").get_attribute("title") or "")
    rest = tab("moment-rest").locator("td[title]").evaluate_all("cells => cells.map((cell) => cell.title)")
    parts = {key: bytes_in(title) for key, title in [*rows, *(("rest", title) for title in rest)]}
    return int(found.group(1).replace(",", "")), total, parts


def span(tab):
    canvas = tab("timeline-canvas")
    return float(canvas.get_attribute("data-t0") or 0), float(canvas.get_attribute("data-t1") or 0)


def point(tab, share, testid="timeline-canvas"):
    """A place on the canvas, in the page's pixels: `share` of the plot's width, between its margins."""
    box = tab(testid).bounding_box()
    assert box is not None
    left, right = box["x"] + 78, box["x"] + box["width"] - 12
    return left + (right - left) * share, box["y"] + box["height"] / 2


def ready(tab, **route):
    tab.open_anew("timeline", **{"step": 2, **route})
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    return tab


def test_the_curve_is_drawn_in_the_colors_of_its_categories(tab, logdir):
    ready(tab)
    for canvas in ("timeline-canvas", "lanes-canvas", "overview-strip"):  # drawn a frame after the panel
        tab.wait_until(lambda canvas=canvas: len(colors(tab(canvas))) > 4, f"{canvas} drawn")
    counts = colors(tab("timeline-canvas"))
    parts = recorded(logdir).parts("category")
    for key, size in parts.items():
        if size < 0.02 * sum(parts.values()):
            continue
        name = f"--cat-{key}"
        wanted = tab("timeline-canvas").evaluate(
            """(canvas, name) => {
                const pen = document.createElement("canvas").getContext("2d");
                pen.fillStyle = getComputedStyle(canvas).getPropertyValue(name).trim();
                pen.fillRect(0, 0, 1, 1);
                return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
            }""",
            name,
        )
        assert counts.get(tuple(wanted), 0) > 500, (key, wanted)


def test_it_opens_at_the_peak(each_tab, logdir):
    there = recorded(logdir)
    ready(each_tab)
    event, total, parts = moment_shown(each_tab)
    assert (event, total) == (there.stats.peak_event, there.stats.peak_bytes)
    assert parts == there.parts("category")
    assert_rounds(each_tab("moment-panel").locator(".big").inner_text(), total)


def test_the_largest_lead_to_themselves_among_the_allocations(tab, logdir):
    ready(tab)
    largest = recorded(logdir).state().largest[1]  # without a word the view shows the first
    row = tab("moment-panel").locator(".large-list tr").nth(1)
    assert bytes_in(row.locator("td").first.get_attribute("title") or "") == largest.bytes
    row.get_by_role("link").click()
    tab("view-allocations").wait_for()
    expect(tab("allocation-panel")).to_have_attribute("data-row", str(largest.row))
    expect(tab("allocation-panel")).to_have_attribute("data-exact", "true")
    assert exact(tab("allocation-bytes")) == largest.bytes


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_hovering_shows_the_exact_state_under_the_pointer(each_tab, logdir, share):
    there = recorded(logdir)
    ready(each_tab)
    t0, t1 = span(each_tab)
    x, y = point(each_tab, share)
    each_tab.page.mouse.move(x, y)
    heading = each_tab("moment-panel").locator("h2")
    expect(heading).not_to_contain_text("At the peak")
    event, total, parts = moment_shown(each_tab)
    at = bytes_in((heading.locator("span").first.get_attribute("title") or "").replace(" ns", " bytes"))
    assert at == pytest.approx((t1 - t0) * share, abs=(t1 - t0) / 400)
    assert event == there.trace.event_at(round(there.epoch_ns + t0 + at))
    assert total == there.state(event).bytes
    assert parts == {key: size for key, size in there.parts("category", event).items() if size}
    each_tab.page.mouse.move(5, 5)
    expect(heading).to_contain_text("At the peak")


def test_the_arrow_keys_step_through_events(tab, logdir):
    there = recorded(logdir)
    ready(tab)
    tab("timeline-canvas").focus()
    peak = there.stats.peak_event
    for key, event in (("ArrowLeft", peak - 1), ("ArrowLeft", peak - 2), ("ArrowRight", peak - 1)):
        expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
        tab.page.keyboard.press(key)
        expect(tab("moment-panel").locator("h2")).to_contain_text(f"event {event:,}")
        assert moment_shown(tab)[:2] == (event, there.state(event).bytes)
    tab("to-peak").click()
    expect(tab("moment-panel").locator("h2")).to_contain_text(f"event {peak:,}")


def test_a_marked_moment_is_what_others_are_held_against(tab, logdir):
    """What came and stayed minus what went is the difference, and so is the sum of the parts' changes."""
    there = recorded(logdir)
    ready(tab)
    mark, event = there.stats.peak_event - 60, there.stats.peak_event - 10
    tab.open_anew("timeline", step=2, event=mark)
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    tab("timeline-canvas").press("m")
    expect(tab("since-mark")).to_contain_text("This is the mark")
    tab.wait_until(lambda: f"mark={mark}" in tab.page.url, "the mark in the address")
    for shown in (event, mark - 10):
        tab.open_anew("timeline", step=2, event=shown, mark=mark)
        tab("mark-line").wait_for()
        expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
        more = there.state(shown).bytes - there.state(mark).bytes
        assert exact(tab("since-mark").locator(".amount")) == more
        tab.settle()
        changes = tab("moment-panel").locator("table.compared td:last-child .amount")
        titles = changes.evaluate_all("all => all.map((one) => one.title)")
        assert sum(map(bytes_in, titles)) == more
    expect(tab("since-mark")).to_contain_text("against the mark")  # no allocation is since a later moment
    tab.open_anew("timeline", step=2, event=event, mark=mark)
    assert exact(tab("kept")) - exact(tab("freed")) == there.state(event).bytes - there.state(mark).bytes
    newest = there.trace.allocations.born[there.trace.allocations.alive_at(event, 0)] > mark
    expect(tab("kept")).to_have_attribute("title", re.compile(f"bytes in {newest.sum():,} allocation"))
    tab("flip-mark").click()
    expect(tab("since-mark")).to_have_count(0)
    tab.wait_until(lambda: "mark=" not in tab.page.url, "no mark in the address")


def test_a_mark_that_is_no_event_is_no_mark(tab):
    for mark in ("99999999", "nonsense"):
        ready(tab, mark=mark)
        expect(tab("since-mark")).to_have_count(0)
        expect(tab("mark-line")).to_have_count(0)
    tab.wrong = [told for told in tab.wrong if "status of 400" not in told]


def test_dragging_zooms_and_a_double_click_shows_the_whole_step_again(tab):
    ready(tab)
    whole, place = span(tab), point(tab, 0.5)
    drag(tab, 0.25, 0.5)
    tab.wait_until(lambda: span(tab) != whole, "the zoom")
    assert point(tab, 0.5) == place  # nothing moves under the pointer
    width = whole[1] - whole[0]
    wanted = (whole[0] + 0.25 * width, whole[0] + 0.5 * width)
    assert span(tab) == pytest.approx(wanted, abs=width / 300)
    expect(tab("reset-zoom")).to_be_visible()
    tab.wait_until(lambda: "t0=" in tab.page.url and "t1=" in tab.page.url, "the zoom in the address")
    tab.page.mouse.dblclick(*point(tab, 0.5))
    tab.wait_until(lambda: span(tab) == whole, "the whole step")
    expect(tab("reset-zoom")).to_have_count(0)
    hint = tab.frame.locator(".hint.in-line")
    assert hint.evaluate("(hint) => hint.scrollHeight <= hint.clientHeight"), "words are cut off"


def drag(tab, start, end):
    mouse = tab.page.mouse
    mouse.move(*point(tab, start))
    mouse.down()
    mouse.move(*point(tab, (start + end) / 2))
    mouse.move(*point(tab, end))
    mouse.up()


def test_over_events_all_are_as_wide_and_the_axes_lead_to_one_another(each_tab, logdir):
    there = recorded(logdir)
    first, end = there.trace.step_events(there.trace.step_row(there.step))
    ready(each_tab)
    each_tab("over-event").click()
    each_tab.wait_until(lambda: span(each_tab) == (first, end), "the axis of events")
    assert moment_shown(each_tab)[:2] == (there.stats.peak_event, there.stats.peak_bytes)
    each_tab.page.mouse.move(*point(each_tab, 0.6))
    expect(each_tab("moment-panel").locator("h2")).not_to_contain_text("At the peak")
    event, total, parts = moment_shown(each_tab)
    assert event == pytest.approx(first + 0.6 * (end - first), abs=(end - first) / 300)
    assert (total, sum(parts.values())) == (there.state(event).bytes, total)
    drag(each_tab, 0.25, 0.5)
    each_tab.wait_until(lambda: span(each_tab) != (first, end), "the zoom")
    e0, e1 = map(int, span(each_tab))
    assert (e0, e1) == pytest.approx((first + 0.25 * (end - first), first + 0.5 * (end - first)), abs=5)
    each_tab.page.mouse.click(*point(each_tab, 0.4))
    each_tab.wait_until(lambda: "event=" in each_tab.page.url, "the pinned event in the address")
    at = int(each_tab.page.url.partition("event=")[2].partition("&")[0])
    assert at == pytest.approx(e0 + 0.4 * (e1 - e0), abs=2)
    drawn = each_tab.frame.locator(".chart-card[aria-busy=false]")
    drawn.wait_for()
    each_tab("over-time").click()
    happened = there.trace.events.time_ns
    times = happened[[e0, e1 - 1]] - there.epoch_ns
    each_tab.wait_until(lambda: span(each_tab) == tuple(times), "the same stretch by time")
    expect(each_tab("moment-panel").locator("h2")).to_contain_text(f"event {at:,}")
    drawn.wait_for()
    each_tab("over-event").click()
    same = (happened.searchsorted(happened[e0]), happened.searchsorted(happened[e1 - 1], side="right"))
    each_tab.wait_until(lambda: span(each_tab) == same, "the same stretch by events")  # with all of its times
    each_tab("timeline-canvas").press("Escape")
    each_tab.wait_until(lambda: span(each_tab) == (first, end), "all events")


def test_a_zoomed_curve_shows_what_is_highest_there(tab, logdir):
    there = recorded(logdir)
    ready(tab)
    drag(tab, 0.1, 0.3)
    expect(tab("reset-zoom")).to_be_visible()
    tab.wait_until(lambda: tab("timeline-canvas").get_attribute("aria-label") is not None, "the words")
    t0, t1 = span(tab)
    assert t0 > there.stats.start_ns - there.epoch_ns
    x, y = point(tab, 0.5)
    tab.page.mouse.move(x, y + 3)
    event, total, _ = moment_shown(tab)
    assert total == there.state(event).bytes
    assert t0 <= there.trace.events.time_ns[event] - there.epoch_ns <= t1


@pytest.mark.parametrize("by", ["category", "module", "phase"])
def test_coloring_by_another_division_divides_the_same_bytes(each_tab, logdir, by):
    there = recorded(logdir)
    ready(each_tab, fold="off")
    each_tab(f"by-{by}").click()
    expect(each_tab(f"by-{by}")).to_have_attribute("aria-pressed", "true")
    event, total, parts = moment_shown(each_tab)
    wanted = {key: size for key, size in there.parts(by, event).items() if size}
    named = {key: size for key, size in parts.items() if key != "rest"}
    assert total == there.stats.peak_bytes == sum(parts.values())
    assert {key: wanted[key] for key in named} == named
    assert by == "module" or named == wanted


def test_phases_keep_their_places_wherever_the_pointer_is(tab):
    ready(tab, by="phase")
    order = ["optimizer", "backward", "forward", "other", "before"]
    for share in (0.2, 0.5, 0.99):
        tab.page.mouse.move(*point(tab, share))
        moment_shown(tab)
        keys = (
            tab("moment-row")
            .or_(tab("moment-gone"))
            .evaluate_all("rows => rows.map((row) => row.dataset.key)")
        )
        assert keys == [key for key in order if key in keys]
        assert len(keys) >= 2


def test_a_moment_in_no_phase_is_told_in_words(tab, logdir):
    there = recorded(logdir)
    ready(tab, t=there.stats.end_ns - there.epoch_ns - 1)  # zero_grad comes last
    expect(tab("moment-panel").locator(".where").first).to_contain_text(
        "outside forward, backward and optimizer"
    )


def test_repeated_layers_fold_on_the_timeline_and_a_click_opens_them(each_tab, logdir):
    there = recorded(logdir)
    ready(each_tab, run="baseline", worker="rank0", by="module")
    own = there.parts("module")
    layers = {key: size for key, size in own.items() if re.fullmatch(r"blocks\.\d\.mlp\.up", key)}
    parts = moment_shown(each_tab)[2]
    assert parts["blocks.*.mlp.up"] == sum(layers.values())
    assert sum(parts.values()) == there.stats.peak_bytes
    each_tab("moment-row", key="blocks.*.mlp.up").get_by_test_id("open-group").press("Enter")
    expect(each_tab("moment-row", key="blocks.0.mlp.up").get_by_role("rowheader")).to_be_focused()
    opened = moment_shown(each_tab)[2]
    assert {key: opened[key] for key in layers} == layers
    assert sum(opened.values()) == there.stats.peak_bytes
    each_tab.wait_until(
        lambda: "opened=blocks.*.mlp.up" in each_tab.page.url, "the opened group in the address"
    )
    each_tab("close-group").press("Enter")
    expect(each_tab("moment-row", key="blocks.*.mlp.up").get_by_test_id("open-group")).to_be_focused()
    assert moment_shown(each_tab)[2] == parts


def test_folded_modules_are_held_against_the_base_and_against_the_peak(tab, logdir):
    there, base = recorded(logdir, "checkpointed"), recorded(logdir)
    ready(tab, run="checkpointed", worker="rank0", base_run="baseline", base_step=2, by="module")
    table = tab("moment-panel").locator("table.compared")
    expect(table.locator("td.number:last-child").first).to_have_text(re.compile("[0-9–]"))
    told = table.locator("td.number:last-child .amount").evaluate_all(
        "cells => cells.map((cell) => cell.title)"
    )
    assert sum(map(bytes_in, told)) == there.stats.peak_bytes - base.stats.peak_bytes
    expect(table.locator("thead")).to_contain_text("vs baseline")
    tab.page.mouse.move(*point(tab, 0.95))
    expect(table.locator("thead")).to_contain_text("vs peak")
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    amounts = table.locator("td.number:last-child .amount")
    total = bytes_in(tab("moment-panel").locator(".big").get_attribute("title") or "")
    tab.wait_until(
        lambda: (
            sum(map(bytes_in, amounts.evaluate_all("cells => cells.map((cell) => cell.title)")))
            == total - there.stats.peak_bytes
        ),
        "changes that sum to the change since the peak",
    )


def test_a_click_on_a_lane_zooms_to_it(tab, logdir):
    there = recorded(logdir)
    ready(tab)
    whole = span(tab)
    box = tab("lanes-canvas").bounding_box()
    assert box is not None
    x, _ = point(tab, 0.3)
    tab.page.mouse.click(x, box["y"] + 30)  # under the lane of steps stands that of phases
    tab.wait_until(lambda: span(tab) != whole, "the zoom into the lane")
    t0, t1 = (int(time) + there.epoch_ns for time in span(tab))
    phases = there.trace.phases
    assert (t0, t1) in zip(phases.start_ns.tolist(), phases.end_ns.tolist(), strict=True)


def counted_in(there, t0, t1):
    """What the recording itself says of a stretch, by a walk through its allocations."""
    time = there.trace.events.time_ns - there.epoch_ns
    inside = [event for event, at in enumerate(time.tolist()) if t0 <= at <= t1]
    first, last = inside[0], inside[-1]
    blocks = there.trace.allocations
    rows = list(zip(blocks.bytes.tolist(), blocks.born.tolist(), blocks.freed.tolist(), strict=True))
    live = [
        sum(size for size, born, freed in rows if born <= at < freed) for at in range(first - 1, last + 1)
    ]
    return {
        "highest": max(live),
        "allocated": sum(size for size, born, _ in rows if first <= born <= last),
        "freed": sum(size for size, _, freed in rows if first <= freed <= last),
        "stayed": sum(size for size, born, freed in rows if first <= born <= last < freed),
    }


def assert_answered(tab, there):
    expect(tab("stretch-panel")).to_have_attribute("data-exact", "true")
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    wanted = counted_in(there, *span(tab))
    assert {name: exact(tab(f"stretch-{name}")) for name in wanted} == wanted
    assert exact(tab("moment-panel").locator(".big")) == wanted["highest"]  # which is in sight


def test_a_range_that_was_dragged_says_its_highest_and_what_came_went_and_stayed(each_tab, logdir):
    ready(each_tab, run="baseline", worker="rank0")
    drag(each_tab, 0.1, 0.3)
    expect(each_tab("reset-zoom")).to_be_visible()
    each_tab.page.mouse.move(0, 0)
    assert_answered(each_tab, recorded(logdir))


def test_a_module_call_answers_by_keyboard(tab, logdir):
    ready(tab, run="baseline", worker="rank0")
    expect(tab("stretch-panel")).to_have_count(0)
    tab("lanes-canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        tab.page.keyboard.press(key)
    name = tab("lanes-walked").inner_text().partition(" · ")[0]
    tab.page.keyboard.press("Enter")
    expect(tab("stretch-panel").locator("h2")).to_have_text(name)
    assert_answered(tab, recorded(logdir))
    tab.page.keyboard.press("Escape")
    expect(tab("stretch-panel")).to_have_count(0)


@pytest.mark.parametrize("by", ["category", "module", "phase"])
def test_every_color_of_the_picture_has_its_name(tab, by):
    """Gradients had none, because no gradient is alive at the peak of a forward."""
    ready(tab, run="baseline", worker="rank0", by=by)
    tab.settle()
    named = (
        tab("timeline-key")
        .locator(".swatch")
        .evaluate_all(
            """swatches => swatches.map((one) =>
            getComputedStyle(one).backgroundColor.match(/[0-9]+/g).slice(0, 3).join())"""
        )
    )
    assert len(set(named)) == len(named) > 3
    drawn = {",".join(map(str, color)): count for color, count in colors(tab("timeline-canvas")).items()}
    neutral = [
        tab("timeline-canvas").evaluate(
            """(canvas, name) => {
                const box = document.body.appendChild(document.createElement("i"));
                box.style.color = `var(${name})`;
                const color = getComputedStyle(box).color.match(/[0-9]+/g).slice(0, 3).join();
                box.remove();
                return color;
            }""",
            name,
        )
        for name in ("--card", "--rule", "--peak", "--muted", "--outline")
    ]
    large = [color for color, count in drawn.items() if count > 2_500 and color not in neutral]
    assert set(large) <= set(named)


def test_other_divisions_leave_the_strip_without_the_colors_of_categories(tab):
    ready(tab, run="baseline", worker="rank0", by="module")
    tab.settle()
    assert tab("moment-panel").locator(".large-list .swatch").count() == 0
    categories = tab("overview-strip").evaluate(
        """(canvas) => [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).flatMap((rule) =>
            [...(rule.style ?? [])].filter((name) => name.startsWith("--cat-"))).map((name) =>
                getComputedStyle(canvas).getPropertyValue(name).trim())"""
    )
    assert len(categories) > 10
    of_categories = {tuple(int(color[at : at + 2], 16) for at in (1, 3, 5)) for color in categories}
    assert not of_categories & set(colors(tab("overview-strip")))
    tab("by-category").click()
    tab.wait_until(lambda: bool(of_categories & set(colors(tab("overview-strip")))), "those of categories")
