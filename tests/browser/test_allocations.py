"""Allocations: bands, panel and table are the recording's, to the byte."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from playwright.sync_api import expect

import tb_memplugin
from tb_memplugin.analysis.allocations import bands, in_order, lifetimes, rows_with_text, versions
from tb_memplugin.analysis.columns import event_cuts, time_cuts
from tb_memplugin.analysis.reasons import why
from tb_memplugin.store.reader import load_window
from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import count_steps, watched
from tests.browser.made_snapshot import made_snapshot
from tests.browser.made_stacks import stacked_snapshot
from tests.browser.tab import SIZE, assert_rounds, bytes_in, colors, exact
from tests.browser.test_appearance import pictures  # noqa: F401  # a fixture
from tests.tensorboard.process import tensorboard
from tests.traces import trace

SIDE = "rank0/plugins/tb_memplugin/window-000000.mem"
TOP, BELOW, LEFT, RIGHT = 6, 34, 78, 12
"""From the canvas' edges to the plot's, in pixels."""

MANY = 100_000
MIB = 1 << 20


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """A made snapshot, one without modules, more allocations than a page could hold, two, and brief ones."""
    folder = tmp_path_factory.mktemp("allocations")
    RunWriter(str(folder / "made"), "rank0").write(tb_memplugin.load(stacked_snapshot()))
    nameless = tmp_path_factory.mktemp("nameless") / "snapshot.pickle"
    nameless.write_bytes(pickle.dumps(made_snapshot()))
    RunWriter(str(folder / "nameless"), "rank0").write(tb_memplugin.load(nameless))
    RunWriter(str(folder / "many"), "rank0").write(
        trace(*(f"alloc {1000 + number} b{number} operator=aten::op{number % 7}" for number in range(MANY)))
    )
    passing = ("alloc 1000 large", "free large", "alloc 100 small", "free small")
    RunWriter(str(folder / "sizes"), "rank0").write(trace(f"alloc {4 * MIB} large", f"alloc {MIB} small"))
    RunWriter(str(folder / "brief"), "rank0").write(
        trace("alloc 4096 kept", *passing, *(f"alloc 200 b{number}" for number in range(2900)))
    )
    return folder


@pytest.fixture(scope="module")
def server(windows, load_fast):
    with tensorboard(windows, load_fast) as running:
        running.wait_for("runs", lambda answer: count_steps(answer) >= 5)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


@pytest.fixture(scope="module")
def made(windows):
    return load_window(str(windows / "made" / SIDE))


def ready(tab, run="made", **route):
    tab.open_anew("allocations", run=run, worker="rank0", **route)
    tab("allocation-row").first.wait_for()
    tab.settle()
    return tab


def point(tab, share, height):
    """A place in the plot, in the page's pixels: shares of its width and of its height from the top."""
    box = tab("bands-canvas").bounding_box()
    assert box is not None
    width = box["width"] - LEFT - RIGHT
    return box["x"] + LEFT + share * width, box["y"] + TOP + height * (box["height"] - BELOW - TOP)


def listed(tab):
    found_rows = tab("allocation-row").evaluate_all(
        "rows => rows.map((row) => [Number(row.dataset.row), Number(row.dataset.bytes)])"
    )
    return [tuple(row) for row in found_rows]


def largest_first(made):
    return in_order(made, np.arange(len(made.allocations)), "bytes")


def test_the_bands_are_drawn_in_the_colors_of_their_categories(tab):
    ready(tab)
    counts = colors(tab("bands-canvas"))
    assert len(counts) > 20
    expect(tab("bands-key")).to_contain_text("optimizer state")
    expect(tab("bands-sum")).to_contain_text("drawn one by one: these are all")


def test_it_says_how_many_live_too_briefly_to_be_drawn(tab):
    """`small` lives within the first column, which is drawn as it was while `large` was there."""
    ready(tab, "brief")
    expect(tab("bands-sum")).to_have_text(
        "2,902 allocations are drawn one by one; 1 other lives too briefly to show here."
    )


def test_a_size_has_the_unit_of_the_peak_in_sentence_table_and_panel(tab):
    ready(tab, "sizes", block=1)
    expect(tab("headline")).to_have_text(
        "One allocation makes up half of the 5.00 MiB alive at the peak of the recording."
    )
    expect(tab("allocation-row").last.locator("td.number").first).to_have_text("1.00")
    expect(tab("allocation-bytes")).to_have_text("1.00 MiB")


def test_only_where_memory_is_reserved_a_segment_is_offered(tab):
    ready(tab)
    expect(tab("allocation-panel").get_by_role("link", name="in its segment")).to_be_visible()
    ready(tab, "brief")
    expect(tab("allocation-panel").get_by_role("link", name="in the Timeline")).to_be_visible()
    expect(tab("allocation-panel").get_by_role("link", name="in its segment")).to_have_count(0)


def test_a_narrow_table_shows_the_line_and_no_column_of_dashes(tab):
    tab.page.set_viewport_size({"width": 800, "height": 600})
    try:
        ready(tab, "nameless")
        place = tab("allocation-row").first.locator(".place")
        assert re.fullmatch(r"\w+\.py:\d+", place.inner_text())
        assert place.evaluate("(one) => one.scrollWidth <= one.clientWidth")
        expect(tab("allocation-rows").get_by_role("columnheader", name="what")).to_have_count(0)
    finally:
        tab.page.set_viewport_size(SIZE)


def test_it_says_how_many_make_half_of_the_peak(tab, made):
    ready(tab)
    event = int(np.argmax(made.live(0))) - 1
    sizes = sorted(made.allocations.bytes[made.allocations.alive_at(event, 0)].tolist(), reverse=True)
    half = int(np.searchsorted(np.cumsum(sizes), sum(sizes) / 2)) + 1
    expect(tab("headline")).to_contain_text(f"{half} allocations make up half of the")
    told = [bytes_in(t) for t in tab("headline").locator("strong").evaluate_all("s => s.map((x) => x.title)")]
    assert told == [sum(sizes), sizes[0]]


@pytest.mark.parametrize("over", ["time", "event"])
@pytest.mark.parametrize("share", [0.15, 0.7])
def test_pointing_tells_the_allocation_under_the_pointer(tab, made, over, share):
    ready(tab, over=over)
    canvas = tab("bands-canvas")
    t0, t1 = (int(canvas.get_attribute(f"data-{edge}")) for edge in ("t0", "t1"))
    box = canvas.bounding_box()
    assert box is not None
    columns = round(box["width"] - LEFT - RIGHT)
    epoch = made.steps[0].start_ns
    cuts = (
        event_cuts(made, t0, t1, columns)
        if over == "event"
        else time_cuts(made, epoch + t0, epoch + t1, columns)
    )
    drawn = bands(made, 0, cuts, 3_000)
    column = int(share * columns)
    alive = [i for i in range(len(drawn.rows)) if drawn.first[i] <= column <= drawn.last[i]]
    chosen = max(alive, key=lambda i: made.allocations.bytes[drawn.rows[i]])
    below = sum(int(made.allocations.bytes[drawn.rows[i]]) for i in alive if i < chosen)
    size = int(made.allocations.bytes[drawn.rows[chosen]])
    height = 1 - (below + size / 2) / (drawn.high.max() * 1.1)
    tab.page.mouse.move(*point(tab, (column + 0.5) / columns, height))
    panel = tab("allocation-panel")
    expect(panel).to_have_attribute("data-row", str(drawn.rows[chosen]))
    expect(panel).to_have_attribute("data-exact", "true")
    assert exact(tab("allocation-bytes")) == size
    expect(tab("bands-tip")).to_contain_text(f"{size:,} bytes")
    assert_rounds(tab("allocation-bytes").inner_text(), size)


def test_a_click_keeps_an_allocation_through_a_reload(tab, made):
    ready(tab)
    tab.page.mouse.click(*point(tab, 0.5, 0.9))
    tab.page.mouse.move(5, 5)
    panel = tab("allocation-panel")
    tab.wait_until(lambda: "block=" in tab.page.url, "the allocation in the address")
    row = int(re.findall(r"block=(\d+)", tab.page.url)[0])
    expect(panel).to_have_attribute("data-row", str(row))  # the mouse may be over another until then
    tab.page.reload()
    expect(panel).to_have_attribute("data-row", str(row))
    address, version = int(made.allocations.address[row]), int(versions(made)[row])
    expect(tab("allocation-address")).to_have_text(f"{address:#x}_{version}")
    expect(tab("bands-marks")).not_to_have_attribute("data-band", "-1")
    tab("let-go").click()
    expect(panel).to_have_attribute("data-row", "")


def test_until_one_is_picked_the_panel_tells_of_the_largest_at_the_peak(tab, made):
    ready(tab)
    panel = tab("allocation-panel")
    expect(panel).to_have_attribute("data-largest", re.compile(r"^\d+$"))
    expect(panel).to_have_attribute("data-exact", "true")
    live = made.allocations.alive_at(int(np.argmax(made.live(0))) - 1, 0)
    assert exact(tab("allocation-bytes")) == made.allocations.bytes[live].max()
    expect(panel).to_contain_text("the largest at the peak")


def test_the_panel_tells_all_that_is_known(tab, made):
    blocks = made.allocations
    row = int(np.flatnonzero((blocks.stack >= 0) & (blocks.freed < len(made.events)))[-1])
    ready(tab, block=row)
    facts = tab("allocation-facts")
    expect(facts).to_contain_text(f"event {blocks.born[row]:,}")
    expect(facts).to_contain_text(f"event {blocks.freed[row]:,}")
    expect(facts).to_contain_text("default, default stream")
    expect(tab("allocation-why")).to_have_text(why(made, row))
    assert exact(tab("allocation-bytes")) == blocks.bytes[row]
    expect(tab("frames")).to_be_visible()
    kept = int(np.flatnonzero(blocks.rounded >= 0)[0])
    ready(tab, block=kept)
    assert blocks.rounded[kept] == blocks.bytes[kept]
    expect(tab("allocation-panel")).to_contain_text(f"{blocks.bytes[kept]:,} bytes requested and taken")


def test_the_table_lists_the_largest_first(tab, made):
    ready(tab)
    wanted = largest_first(made)[: tab("allocation-row").count()]
    assert listed(tab) == [(int(row), int(made.allocations.bytes[row])) for row in wanted]
    total = int(made.allocations.bytes.sum())
    assert exact(tab("allocations-sum")) == total
    expect(tab("allocations-sum")).to_contain_text(f"{len(made.allocations):,} allocations")


@pytest.mark.parametrize("sort", ["born", "lifetime", "address"])
def test_the_server_sorts_the_table(tab, made, sort):
    ready(tab)
    tab(f"list-{sort}").click()
    tab.settle()
    every = np.arange(len(made.allocations))
    wanted = in_order(made, every, sort)[: tab("allocation-row").count()]
    assert [row for row, _ in listed(tab)] == wanted.tolist()
    tab(f"list-{sort}").click()
    tab.settle()
    wanted = in_order(made, every, f"-{sort}")[: tab("allocation-row").count()]
    assert [row for row, _ in listed(tab)] == wanted.tolist()
    tab.wait_until(lambda: f"listed=-{sort}" in tab.page.url, "the order in the address")
    assert lifetimes(made, wanted).min() >= 0


@pytest.mark.parametrize("text", ["softmax", "optimizer_state", "0x7f00"])
def test_a_search_filters_the_table(tab, made, text):
    ready(tab)
    tab("allocation-search").fill(text)
    wanted = rows_with_text(made, np.arange(len(made.allocations)), text, versions(made))
    assert len(wanted) > 0
    expect(tab("allocations-sum")).to_contain_text(f"{len(wanted):,} of {len(made.allocations):,}")
    tab.settle()
    assert exact(tab("allocations-sum")) == made.allocations.bytes[wanted].sum()
    rows = [row for row, _ in listed(tab)]
    assert rows == in_order(made, wanted, "bytes")[: len(rows)].tolist()
    tab("allocation-search").fill("nothing like that")
    expect(tab("no-match")).to_be_visible()


def test_a_click_on_a_row_shows_it_in_the_panel_and_in_the_bands(tab, made):
    ready(tab)
    row = int(largest_first(made)[3])
    tab("allocation-row", row=str(row)).click()
    expect(tab("allocation-panel")).to_have_attribute("data-row", str(row))
    expect(tab("allocation-row", row=str(row))).to_have_attribute("aria-selected", "true")
    expect(tab("bands-marks")).not_to_have_attribute("data-band", "-1")


def test_dragging_zooms_both_and_escape_shows_the_whole_step(tab, made):
    ready(tab, over="event")
    everything = len(made.allocations)
    tab.page.mouse.move(*point(tab, 0.6, 0.5))
    tab.page.mouse.down()
    tab.page.mouse.move(*point(tab, 0.7, 0.5))
    tab.page.mouse.move(*point(tab, 0.8, 0.5))
    tab.page.mouse.up()
    tab("reset-zoom").wait_for()
    tab.settle()
    canvas = tab("bands-canvas")
    t0, t1 = (int(canvas.get_attribute(f"data-{edge}")) for edge in ("t0", "t1"))
    count = len(made.events)
    assert (t0, t1) == pytest.approx((0.6 * count, 0.8 * count), abs=count / 200)
    blocks = made.allocations
    inside = int(((blocks.born < t1) & (blocks.freed >= t0)).sum())
    assert inside < everything
    expect(tab("allocations-sum")).to_contain_text(f"{inside:,} allocations")
    tab.wait_until(lambda: "e0=" in tab.page.url, "the zoom in the address")
    canvas.focus()
    tab.page.keyboard.press("Escape")
    expect(tab("allocations-sum")).to_contain_text(f"{everything:,} allocations")


def test_the_keyboard_keeps_one_allocation_after_the_other(tab, made):
    ready(tab)
    tab("bands-canvas").focus()
    tab.page.keyboard.press("ArrowRight")
    first = int(largest_first(made)[0])
    expect(tab("allocation-panel")).to_have_attribute("data-row", str(first))
    tab.page.keyboard.press("ArrowRight")
    expect(tab("allocation-panel")).not_to_have_attribute("data-row", str(first))
    tab.page.keyboard.press("ArrowLeft")
    expect(tab("allocation-panel")).to_have_attribute("data-row", str(first))


def test_other_colors_tell_the_same_bytes(tab):
    ready(tab)
    expect(tab("color").locator("option")).to_contain_text(["Category", "Source line", "Stack"])
    tab("color").select_option("line")
    expect(tab("bands-key")).to_contain_text("adamw optimizer.py:57")
    tab.wait_until(lambda: "colour=line" in tab.page.url, "the color in the address")


def test_a_hundred_thousand_scroll_like_ten(tab):
    ready(tab, run="many", listed="-bytes")
    expect(tab("allocations-sum")).to_contain_text(f"{MANY:,} allocations")
    assert tab("allocation-row").count() < 80
    tab("allocation-rows").evaluate("(box) => box.scrollTo(0, box.scrollHeight / 2)")
    middle = 1000 + MANY // 2
    tab("allocation-row").first.wait_for()
    tab.wait_until(lambda: any(abs(size - middle) < 60 for _, size in listed(tab)), "the rows in the middle")
    tab("allocation-rows").evaluate("(box) => box.scrollTo(0, box.scrollHeight)")
    tab.wait_until(lambda: (listed(tab) or [(0, 0)])[-1][1] == 1000 + MANY - 1, "the last row")
    expect(tab("bands-sum")).to_contain_text(
        f"3,000 allocations are drawn one by one; {MANY - 3000:,} others"
    )
    tab.page.mouse.move(*point(tab, 0.9, 0.5))
    expect(tab("bands-tip")).to_contain_text("bytes) in small allocations")  # a pile goes by what it is of
    expect(tab("bands-tip")).to_contain_text("unknown: ")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_taken(open_tab, server, pictures, theme):  # noqa: F811
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 1280, "height": 1180})
    query = f"?darkMode={'true' if theme == 'dark' else 'false'}"
    tab.open("allocations", query=query, run="made", over="event")
    tab("allocation-row").first.wait_for()
    tab.settle()
    tab.page.mouse.click(*point(tab, 0.62, 0.24))
    expect(tab("allocation-panel")).to_have_attribute("data-exact", "true")
    tab.settle()
    picture = pictures / f"allocations-{theme}.png"
    tab.page.screenshot(path=picture, animations="disabled")
    assert 20_000 < picture.stat().st_size < 300_000
