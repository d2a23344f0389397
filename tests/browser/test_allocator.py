"""Allocator: the moment, the segments and the failed request are the recording's, to the byte."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from playwright.sync_api import expect

import tb_memplugin
from tb_memplugin.analysis.allocator import levels, pools
from tb_memplugin.analysis.oom import oom_report
from tb_memplugin.analysis.segments import segments_at
from tb_memplugin.store.reader import load_window
from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import count_steps, watched
from tests.browser.made_snapshot import K, made_snapshot
from tests.browser.tab import assert_rounds, bytes_in, colors, exact
from tests.browser.test_appearance import pictures  # noqa: F401  # a fixture
from tests.read.snapshot.test_real import path_of, real
from tests.tensorboard.process import tensorboard
from tests.traces import trace

SIDE = "rank0/plugins/tb_memplugin/window-000000.mem"
SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TALL = {"width": 1280, "height": 1660}
LINE = 21
"""Pixels of a line of the tape; its first line is a heading."""


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """A made snapshot, the same with hostile names, and a recording that knows no segments."""
    folder = tmp_path_factory.mktemp("snapshots")
    made = made_snapshot()
    write(folder / "made", made)
    write(folder / "names", hostile(made))
    RunWriter(str(folder / "baseline"), "rank0").write(
        trace("alloc 2000 a", "alloc 3000 b device=cuda:0 reserved=8192")
    )
    return folder


def write(run, content):
    file = run.parent / f"{run.name}.pickle"
    file.write_bytes(pickle.dumps(content))
    RunWriter(str(run), "rank0").write(tb_memplugin.load(file))
    file.unlink()


def hostile(made):
    """The same blocks, but every name is an attack, and one is very long."""
    entries = [
        {
            **entry,
            "frames": [{**frame, "name": SCRIPT, "filename": f"{SCRIPT}.py"} for frame in entry["frames"]],
        }
        for entry in made["device_traces"][0]
    ]
    settings = {SCRIPT: SCRIPT, "long": "x" * 10_000}
    return {**made, "device_traces": [entries], "allocator_settings": settings}


@pytest.fixture(scope="module")
def server(snapshots, load_fast):
    with tensorboard(snapshots, load_fast) as running:
        running.wait_for("runs", lambda answer: count_steps(answer) == 3)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


@pytest.fixture(scope="module")
def made(snapshots):
    return load_window(str(snapshots / "made" / SIDE))


def ready(tab, run="made", **route):
    tab.open_anew("allocator", run=run, worker="rank0", **route)
    expect(tab("allocator-panel")).to_have_attribute("data-exact", "true")
    return tab


def shown_event(tab):
    expect(tab("allocator-panel")).to_have_attribute("data-exact", "true")
    return int(tab("allocator-panel").get_attribute("data-event") or -2)


def parts(tab):
    rows = tab("allocator-part").evaluate_all(
        "rows => rows.map((row) => [row.dataset.key, row.querySelector('td').title])"
    )
    return {key: bytes_in(title) for key, title in rows}


def place(tab, share):
    """A place on the chart, in the page's pixels: `share` of the plot's width, between its margins."""
    box = tab("reserve-canvas").bounding_box()
    assert box is not None
    left, right = box["x"] + 78, box["x"] + box["width"] - 12
    return left + (right - left) * share, box["y"] + 100


def tape(tab):
    """The canvas of segments and blocks, once they are loaded: before that it hears no key and no pointer."""
    tab("tape-legend").wait_for()
    return tab("tape-canvas")


def point_at_tape(tab, x, line):
    """Move to a place on a line of the tape; gives that place in the page's pixels."""
    tape(tab).scroll_into_view_if_needed()
    box = tape(tab).bounding_box()
    assert box is not None
    at = box["x"] + x, box["y"] + line * LINE + 9
    tab.page.mouse.move(*at)
    return at


def test_it_opens_at_the_request_that_failed_and_says_why(tab, made):
    ready(tab)
    report = oom_report(made)
    assert shown_event(tab) == report.event
    assert exact(tab("oom-requested")) == exact(tab("allocator-headline").locator("strong")) == 300_000 * K
    expect(tab("allocator-headline")).to_contain_text("enough was free, but not in one piece")
    for name, size in (
        ("oom-free", report.free_bytes),
        ("oom-reserved", report.reserved_bytes),
        ("oom-active", report.active_bytes),
        ("oom-reserve-free", report.reserve_free_bytes),
        ("oom-largest", report.largest_usable_bytes),
    ):
        assert exact(tab(name)) == size
        assert_rounds(tab(name).inner_text(), size)
    expect(tab("oom-why")).to_have_text(report.why)
    lines = (
        tab("oom-line").locator("td.number:nth-of-type(2)").evaluate_all("cells => cells.map((c) => c.title)")
    )
    rest = tab("oom-rest").locator("td.number").last
    assert sum(map(bytes_in, lines)) + exact(rest) == report.active_bytes


def test_the_reserves_parts_sum_to_it(tab, made):
    ready(tab)
    for event in (oom_report(made).event, 700, 40):
        ready(tab, event=event)
        now = levels(made, 0)
        assert now.reserved is not None
        found = parts(tab)
        assert found["allocated"] == now.allocated[event + 1]
        assert found.get("pending", 0) == now.pending[event + 1]
        assert sum(found.values()) == now.reserved[event + 1]
        assert exact(tab("allocator-panel").locator(".big")) == now.reserved[event + 1]


def test_pools_are_the_analysis_and_sum_to_the_device(tab, made):
    event = oom_report(made).event
    ready(tab)
    wanted = {f"{pool.pool} · {pool.stream}": pool for pool in pools(made, 0, event)}
    assert len(wanted) == 3
    assert tab.keys("pool-row") == list(wanted)
    for column in ("allocated_bytes", "pending_bytes", "rounded_bytes", "free_bytes", "reserved_bytes"):
        total = 0
        for key, pool in wanted.items():
            title = tab("pool-row", key=key).locator(f"[data-column={column}]").get_attribute("title")
            assert bytes_in(title) == getattr(pool, column)
            total += getattr(pool, column)
        assert bytes_in(tab("pool-sum").locator(f"[data-column={column}]").get_attribute("title")) == total


def test_the_arrow_keys_step_through_events(tab, made):
    ready(tab, event=100)
    tab("reserve-canvas").focus()
    for key, event in (("ArrowLeft", 99), ("ArrowLeft", 98), ("ArrowRight", 99)):
        tab.page.keyboard.press(key)
        expect(tab("allocator-panel")).to_have_attribute("data-event", str(event))
        shown_event(tab)
    assert parts(tab)["allocated"] == levels(made, 0).allocated[100]
    tab.wait_until(lambda: "event=99" in tab.page.url, "the event in the address")
    tab("to-peak").click()
    expect(tab("allocator-panel")).to_have_attribute("data-event", str(int(np.argmax(made.live(0))) - 1))


def test_clicking_and_dragging_over_events_choose_the_moment(tab, made):
    ready(tab, over="event")
    count = len(made.events)
    tab.page.mouse.click(*place(tab, 0.5))
    expect(tab("allocator-panel")).not_to_have_attribute("data-event", str(oom_report(made).event))
    assert shown_event(tab) == pytest.approx(count / 2, abs=2)
    tab.page.mouse.move(*place(tab, 0.2))
    tab.page.mouse.down()
    tab.page.mouse.move(*place(tab, 0.6))
    tab.page.mouse.move(*place(tab, 0.8), steps=5)
    tab.page.mouse.up()
    wanted = re.compile("^10[12]\\d$")  # 0.8 of 1,276 events
    expect(tab("allocator-panel")).to_have_attribute("data-event", wanted)
    event = shown_event(tab)
    assert parts(tab)["allocated"] == levels(made, 0).allocated[event + 1]


def test_clicking_over_time_shows_the_state_then(tab, made):
    ready(tab)
    tab.page.mouse.click(*place(tab, 0.25))
    tab.wait_until(lambda: re.search(r"\bt=\d|\.t=\d", tab.page.url) is not None, "the time in the address")
    event = shown_event(tab)
    span = made.events.time_ns - made.steps[0].start_ns
    whole = made.steps[0].end_ns - made.steps[0].start_ns
    assert span[event] <= whole * 0.26
    assert span[event + 1] >= whole * 0.24


def test_the_wheel_zooms_and_a_double_click_shows_all_again(tab):
    ready(tab, over="event")
    canvas = tab("reserve-canvas")
    tab.page.mouse.move(*place(tab, 0.5))
    tab.page.mouse.wheel(0, -400)
    tab("reset-zoom").wait_for()
    width = float(canvas.get_attribute("data-t1")) - float(canvas.get_attribute("data-t0"))
    assert width < 0.6 * 1276
    tab.wait_until(lambda: "e0=" in tab.page.url, "the zoom in the address")
    tab("reset-zoom").click()
    expect(canvas).to_have_attribute("data-t1", "1276")


def test_the_tape_is_drawn_in_the_colors_of_the_categories(tab):
    ready(tab)
    tab.wait_until(lambda: len(colors(tape(tab))) > 4, "the tape drawn")  # a frame after its legend
    counts = colors(tape(tab))
    for name in ("--cat-parameter", "--cat-optimizer_state", "--cat-activation", "--free"):
        wanted = tape(tab).evaluate(
            """(canvas, name) => {
                const pen = document.createElement("canvas").getContext("2d");
                pen.fillStyle = getComputedStyle(canvas).getPropertyValue(name).trim();
                pen.fillRect(0, 0, 1, 1);
                return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
            }""",
            name,
        )
        assert counts.get(tuple(wanted), 0) > 1000, name


def test_pointing_at_a_block_tells_all_of_it(tab, made):
    ready(tab, order="address")
    first = segments_at(made, 0, oom_report(made).event)[0].blocks[0]
    point_at_tape(tab, 12, 0)
    panel = tab("block-panel")
    expect(panel).to_have_attribute("data-address", hex(first.address))
    expect(panel).to_have_attribute("data-exact", "true")
    assert exact(tab("block-bytes")) == first.bytes
    assert exact(tab("block-rounded")) == first.extent_bytes
    expect(tab("frames")).to_contain_text("model.py:31")
    expect(tab("frames")).not_to_contain_text("empty_cuda")
    tab("block-panel").get_by_role("button", name="C++ frame").wait_for()
    tab.page.mouse.move(5, 5)
    expect(panel).to_have_attribute("data-kind", "none")


def test_a_click_keeps_a_block_through_a_reload_and_its_birth_is_a_link(tab, made):
    ready(tab, order="address")
    at = point_at_tape(tab, 12, 0)
    expect(tab("block-panel")).to_have_attribute("data-exact", "true")
    tab.page.mouse.click(*at)
    tab.page.mouse.move(5, 5)
    expect(tab("block-panel")).to_have_attribute("data-kind", "block")
    tab.wait_until(lambda: "block=" in tab.page.url, "the block in the address")
    (row,) = re.findall(r"block=(\d+)", tab.page.url)
    tab.open("allocator", run="made", block=row, order="address")
    expect(tab("block-panel")).to_have_attribute("data-address", hex(made.allocations.address[int(row)]))
    tab("block-panel").get_by_role("button", name=re.compile("event ")).first.click()
    expect(tab("allocator-panel")).to_have_attribute("data-event", str(made.allocations.born[int(row)]))
    tape(tab).focus()
    tab.page.keyboard.press("Escape")
    expect(tab("block-panel")).to_have_attribute("data-kind", "none")


def test_the_keyboard_goes_from_block_to_block(tab, made):
    ready(tab, order="address")
    blocks = segments_at(made, 0, oom_report(made).event)[0].blocks
    tape(tab).focus()
    tab.page.keyboard.press("ArrowRight")
    expect(tab("block-panel")).to_have_attribute("data-address", hex(blocks[0].address))
    tab.page.keyboard.press("Enter")
    tab.wait_until(lambda: "block=" in tab.page.url, "the block in the address")


def test_color_order_and_scale_are_in_the_address(tab):
    ready(tab)
    lines = int(tape(tab).get_attribute("data-lines"))
    tab("color-line").click()
    tab("order-free").click()
    for _ in range(3):
        tab("tape-in").click()
    tab.wait_until(lambda: "scale=3" in tab.page.url, "the scale in the address")
    assert "colour=line" in tab.page.url
    assert "order=free" in tab.page.url
    tab.page.reload()
    tab("view-allocator").wait_for()
    expect(tab("color-line")).to_have_attribute("aria-pressed", "true")
    expect(tab("order-free")).to_have_attribute("aria-pressed", "true")
    expect(tab("tape-legend")).to_contain_text("optimizer.py:57 (adamw)")
    assert int(tape(tab).get_attribute("data-lines")) > 2 * lines


def test_the_legends_bytes_are_what_is_live(tab, made):
    ready(tab)
    active = levels(made, 0).active[oom_report(made).event + 1]
    for by in ("category", "module", "line", "pool", "stream"):
        tab(f"color-{by}").click()
        expect(tab(f"color-{by}")).to_have_attribute("aria-pressed", "true")
        tab.settle()
        rows = tab("tape-legend").locator("li[data-key]")
        titles = rows.evaluate_all("rows => rows.map((row) => row.title)")
        told = re.findall(r": ([0-9,]+) bytes", "\n".join(titles))
        assert sum(int(number.replace(",", "")) for number in told) == active, by


def test_the_button_goes_back_to_the_failed_request(tab, made):
    ready(tab, event=10)
    tab("to-oom").click()
    expect(tab("allocator-panel")).to_have_attribute("data-event", str(oom_report(made).event))
    expect(tab("to-oom")).to_be_disabled()


def test_settings_are_shown(tab):
    ready(tab)
    expect(tab("settings")).to_contain_text("max_split_size_mb:512")


def test_without_segments_it_says_what_to_record(tab):
    tab.open_anew("allocator", run="baseline", device="cpu")
    expect(tab("no-segments")).to_contain_text("does not keep reserved memory")
    code = tab("snapshot-code").inner_text()
    assert "snapshot=True" in code
    compile(code, "what the page says", "exec")
    tab.open_anew("allocator", run="baseline", device="cuda:0")
    expect(tab("no-segments")).to_contain_text("not where")
    expect(tab("allocator-panel")).to_have_attribute("data-exact", "true")
    assert parts(tab) == {"allocated": 3000, "free": 8192 - 3000}


def test_hostile_names_are_text(tab):
    ready(tab, run="names", order="address", colour="line")
    point_at_tape(tab, 12, 0)
    expect(tab("frames")).to_contain_text("<script>")
    tab.settle()
    expect(tab("settings")).to_contain_text("<script>")
    assert tab.frame.locator("main script, header script, img, [onerror]").count() == 0
    widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1]
    assert len(tab.page.frames) == 2


def test_a_narrow_window_needs_no_sideways_scrolling(open_tab, server):
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 700, "height": 900})
    tab.open("allocator", run="made")
    tab.settle()
    widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1] == 700


@pytest.fixture(scope="module")
def strangers(load_fast, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strangers")
    for number in ("01", "07"):
        RunWriter(str(folder / number), "rank0").write(tb_memplugin.load(path_of(number)))
    with tensorboard(folder, load_fast) as running:
        running.wait_for("runs", lambda answer: count_steps(answer) == 2)
        yield running


@real
@pytest.mark.parametrize(
    ("number", "device", "reserved"), [("01", "cuda:1", 84_202_749_952), ("07", "cuda:0", 61_025_026_048)]
)
def test_real_snapshots_show_their_true_reserve(strangers, open_tab, number, device, reserved):
    tab = open_tab(strangers.url).open("allocator", run=number, device=device)
    expect(tab("allocator-panel")).to_have_attribute("data-exact", "true")
    assert sum(parts(tab).values()) == exact(tab("allocator-panel").locator(".big")) == reserved
    tab.wait_until(lambda: len(colors(tape(tab))) > 2, "the tape drawn")
    assert tab("oom-report").count() == (1 if number == "01" else 0)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_taken(open_tab, server, pictures, theme):  # noqa: F811
    tab = open_tab(server.url)
    tab.page.set_viewport_size(TALL)
    tab.open("allocator", query=f"?darkMode={'true' if theme == 'dark' else 'false'}", run="made")
    tab.settle()
    point_at_tape(tab, 60, 4)
    expect(tab("block-panel")).to_have_attribute("data-kind", "block")
    tab.settle()
    picture = pictures / f"allocator-{theme}.png"
    tab.page.screenshot(path=picture, animations="disabled")
    assert 20_000 < picture.stat().st_size < 300_000, picture
