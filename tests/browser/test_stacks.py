"""Stacks: the flame graph, the tables and the rules are the recording's, to the byte."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.lines import line_table
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.analysis.stacks import flame, stack_table
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.store.reader import load_window
from tests.browser.conftest import count_steps, watched
from tests.browser.stacked_runs import SCRIPT, SIDE, write_runs
from tests.browser.tab import assert_rounds, bytes_in, colors, exact
from tests.browser.test_appearance import pictures  # noqa: F401  # a fixture
from tests.tensorboard.process import tensorboard

LEVEL = 21
"""Pixels of a level of the flame graph."""


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stacks")
    write_runs(folder)
    return folder


@pytest.fixture(scope="module")
def server(windows, load_fast):
    with tensorboard(windows, load_fast) as running:
        running.wait_for("runs", lambda answer: count_steps(answer) == 5)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


@pytest.fixture(scope="module")
def made(windows):
    return load_window(str(windows / "made" / SIDE))


def ready(tab, run="made", **route):
    tab.open_anew("stacks", run=run, worker="rank0", **route)
    tab("flame-canvas").wait_for()
    tab.settle()
    return tab


def peak_of(made):
    return step_stats(made, 0)[0].peak_event


def point(tab, share, level):
    """A place in the flame graph, in the page's pixels."""
    box = tab("flame-canvas").bounding_box()
    assert box is not None
    return box["x"] + share * box["width"], box["y"] + level * LEVEL + 9


def rows(tab, testid):
    found = tab(testid).evaluate_all(
        "rows => rows.map((row) => [row.dataset.key, Number(row.dataset.bytes)])"
    )
    return [tuple(row) for row in found]


def test_it_opens_at_the_peak_and_says_what_made_it(tab, made):
    ready(tab)
    top = line_table(made, 0, peak_of(made))[0]
    sizes = [
        bytes_in(title)
        for title in tab("headline").locator("strong").evaluate_all("s => s.map((x) => x.title)")
    ]
    assert sizes == [made.live(0)[peak_of(made) + 1], top.bytes]
    expect(tab("headline")).to_contain_text("optimizer.py:57 adamw")
    assert top.key == "/home/made/optimizer.py:57 (adamw)"


def test_the_graph_has_the_colors_of_whose_code_it_is(tab):
    ready(tab)
    counts = colors(tab("flame-canvas"))
    assert counts.get(color(tab, "--flame-root"), 0) > 5_000
    assert painted(tab, counts, "user", 4) > 10_000
    tab("frames-all").click()
    tab.settle()
    counts = colors(tab("flame-canvas"))
    assert painted(tab, counts, "library", 3) > 5_000
    assert painted(tab, counts, "native", 2) > 5_000


def painted(tab, counts, kind, tones):
    return sum(counts.get(color(tab, f"--flame-{kind}-{tone}"), 0) for tone in range(tones))


def color(tab, name):
    return tuple(
        tab("flame-canvas").evaluate(
            """(canvas, name) => {
                const pen = document.createElement("canvas").getContext("2d");
                pen.fillStyle = getComputedStyle(canvas).getPropertyValue(name).trim();
                pen.fillRect(0, 0, 1, 1);
                return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
            }""",
            name,
        )
    )


@pytest.mark.parametrize("frames", ["folded", "all", "user"])
def test_the_graph_has_the_levels_of_the_analysis(tab, made, frames):
    ready(tab, frames=frames)
    tree = flame(stack_table(made, 0, peak_of(made)), frames)
    levels = max(len(tree.path(node)) for node in range(len(tree.runs)))
    canvas = tab("flame-canvas")
    expect(canvas).to_have_attribute("data-levels", str(levels))
    places, omitted = tree.in_sight(0, float(tree.bytes[0]) / 3200)
    assert int(canvas.get_attribute("data-nodes")) == len(places)
    assert omitted == 0 or f"{omitted} narrower" in tab.frame.locator(".flame-card .foot").inner_text()


def test_pointing_at_a_frame_tells_it_to_the_byte(tab, made):
    ready(tab, frames="all")
    tree = flame(stack_table(made, 0, peak_of(made)), "all")
    tab.page.mouse.move(*point(tab, 0.2, 1))
    expect(tab("flame-tip")).to_contain_text(f"{tree.bytes[1]:,} bytes")
    expect(tab("flame-tip")).to_contain_text("<module>")
    expect(tab("flame-tip")).to_contain_text(f"{100 * tree.bytes[1] / tree.bytes[0]:.1f} % of all alive")
    expect(tab("flame-tip")).to_contain_text(f"{tree.count[1]:,} allocations")
    tab.page.mouse.move(5, 5)
    expect(tab("flame-tip")).to_have_count(0)


def test_a_click_zooms_and_escape_shows_everything_again(tab, made):
    ready(tab, frames="user")
    tree = flame(stack_table(made, 0, peak_of(made)), "user")
    tab.page.mouse.click(*point(tab, 0.2, 3))
    node = next(n for n in range(len(tree.runs)) if len(tree.path(n)) == 4)
    expect(tab("flame-canvas")).to_have_attribute("data-node", str(node))
    tab.wait_until(lambda: f"node={node}" in tab.page.url, "the zoom in the address")
    tab.page.mouse.move(*point(tab, 0.9, 3))
    expect(tab("flame-tip")).to_contain_text(f"{tree.bytes[node]:,} bytes")
    tab.page.reload()
    tab("flame-canvas").wait_for()
    expect(tab("flame-canvas")).to_have_attribute("data-node", str(node))
    tab("flame-canvas").focus()
    tab.page.keyboard.press("Escape")
    expect(tab("flame-canvas")).to_have_attribute("data-node", "0")


def test_the_keyboard_walks_from_frame_to_frame_and_zooms(tab, made):
    ready(tab, frames="user")
    tree = flame(stack_table(made, 0, peak_of(made)), "user")
    tab("flame-canvas").focus()
    for _ in range(4):
        tab.page.keyboard.press("ArrowDown")
    expect(tab("flame-tip")).to_have_attribute("data-id", "3")
    expect(tab("flame-tip")).to_contain_text(f"{tree.bytes[3]:,} bytes")
    tab.page.keyboard.press("ArrowUp")
    expect(tab("flame-tip")).to_have_attribute("data-id", "2")
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("ArrowRight")
    expect(tab("flame-tip")).not_to_have_attribute("data-id", "3")
    right = int(tab("flame-tip").get_attribute("data-id") or 0)
    assert (len(tree.path(right)), tree.parent[right]) == (4, 2)
    tab.page.keyboard.press("ArrowLeft")
    expect(tab("flame-tip")).to_have_attribute("data-id", "3")
    tab.page.keyboard.press("Enter")
    expect(tab("flame-canvas")).to_have_attribute("data-node", "3")


def test_a_search_marks_frames_tells_their_sum_and_filters_the_table(tab, made):
    ready(tab)
    table = stack_table(made, 0, peak_of(made))
    wanted = [row for row in table if any("model.py" in text for text in row.frames)]
    tab("stack-search").fill("MODEL.py")
    found = tab("stack-found")
    expect(found).to_contain_text(f"in {sum(row.calls for row in wanted):,} allocations")
    assert exact(found) == sum(row.bytes for row in wanted)
    tab.settle()
    assert [size for _, size in rows(tab, "stack-row")] == [row.bytes for row in wanted]
    assert exact(tab("stacks-sum")) == sum(row.bytes for row in wanted)
    tab.wait_until(lambda: "search=MODEL.py" in tab.page.url, "the search in the address")
    tab("stack-search").fill("no such frame")
    expect(tab("no-match")).to_be_visible()


def test_the_table_of_stacks_is_the_analysis_and_sums_to_the_peak(tab, made):
    ready(tab)
    table = stack_table(made, 0, peak_of(made))
    assert [size for _, size in rows(tab, "stack-row")] == [row.bytes for row in table]
    assert exact(tab("stacks-sum")) == sum(row.bytes for row in table) == made.live(0)[peak_of(made) + 1]
    first = tab("stack-row").first.locator("td.number")
    assert_rounds(f"{first.first.inner_text()} GiB", table[0].bytes)


def test_a_line_of_the_overview_leads_to_its_stacks(tab):
    tab.open_anew("overview", run="made", worker="rank0")
    tab("line-row", key="/home/made/optimizer.py:57 (adamw)").get_by_role("link").click()
    expect(tab("stack-search")).to_have_value("optimizer.py:57")
    expect(tab("stack-row", key="/home/made/optimizer.py:57 (adamw)").first).to_be_visible()


def test_stacks_of_one_line_are_told_apart_by_what_ran_in_each(tab):
    ready(tab, run="twice")
    expect(tab("stack-row")).to_have_count(2)
    assert {row.locator(".folder").inner_text() for row in tab("stack-row").all()} == {"→ gelu", "→ linear"}


def test_a_row_opens_to_all_of_its_frames(tab):
    ready(tab)
    row = tab("stack-row", key="/home/made/model.py:92 (mlp)")
    row.get_by_role("button").click()
    frames = tab("stack-frames").locator("li.frame")
    expect(frames.first).to_contain_text("linear")
    expect(frames.nth(1)).to_contain_text("mlp")
    count = frames.count()
    tab("native-frames").click()
    expect(frames).to_have_count(count + 3)
    expect(frames.first).to_contain_text("torch::unwind::unwind()")


def test_a_stack_can_be_copied(tab):
    ready(tab)
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab("stack-row", key="/home/made/graphs.py:19 (capture)").get_by_role("button").click()
    tab("copy-stack").click()
    expect(tab("copy-stack")).to_have_text("copied")
    text = tab.page.evaluate("navigator.clipboard.readText()")
    assert text.splitlines()[-2:] == ["main /home/made/train.py:121", "<module> /home/made/train.py:140"]


def test_source_lines_are_the_analysis_with_their_medians(tab, made):
    ready(tab, table="lines")
    wanted = line_table(made, 0, peak_of(made))
    assert rows(tab, "line-row") == [(row.key, row.bytes) for row in wanted]
    median = tab("line-row").first.locator("td.number").last
    assert exact(median) == wanted[0].median_bytes
    tab("rank-count").click()
    tab.settle()
    assert rows(tab, "line-row")[0][0] == max(wanted, key=lambda row: row.calls).key
    tab.wait_until(lambda: "ranked=count" in tab.page.url, "the order in the address")


def test_rules_give_sums_and_stay_in_the_address(tab, made):
    ready(tab, table="rules")
    text = "attention=attention|softmax\nmodel=model\\.py\noptimizer=optim"
    tab("rules").fill(text)
    expect(tab("rule-row")).to_have_count(4)
    shown = tab("rule-row").evaluate_all(
        "rows => rows.map((row) => [row.dataset.key, row.querySelector('td.number').title])"
    )
    parts = {
        part.key: part.bytes for part in breakdown(made, 0, peak_of(made), read_rules(text.splitlines()))
    }
    assert {key: bytes_in(title) for key, title in shown} == {**dict.fromkeys(["unknown"], 0), **parts}
    tab.wait_until(lambda: "rules=attention" in tab.page.url, "the rules in the address")
    tab.page.reload()
    expect(tab("rule-row")).to_have_count(4)
    expect(tab("rules")).to_have_value(text)


def test_a_rule_that_cannot_be_is_named_while_the_page_goes_on(open_tab, server):
    """The browser itself writes the refused request to its console."""
    tab = open_tab(server.url).open("stacks", run="made", table="rules")
    tab("rules").fill("broken=(")
    expect(tab("rules-failure")).to_contain_text("'broken' is not a valid regular expression")
    tab("rules").fill("fine=model")
    expect(tab("rules-failure")).to_have_count(0)
    expect(tab("rule-row", key="fine")).to_be_visible()
    assert all("400" in told for told in tab.wrong)
    tab.wrong.clear()


def test_all_that_the_step_allocated(tab, made):
    ready(tab)
    tab("when-step").click()
    tab.settle()
    whole = sum(row.bytes for row in stack_table(made, 0))
    assert exact(tab("headline").locator("strong").first) == whole
    assert exact(tab("stacks-sum")) == whole
    tab.wait_until(lambda: "of=step" in tab.page.url, "the choice in the address")


def test_a_moment_is_chosen_on_the_strip_and_walked_by_the_arrow_keys(tab, made):
    ready(tab)
    box = tab("moment-strip").bounding_box()
    assert box is not None
    tab.page.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 20)
    expect(tab("when-moment")).to_have_attribute("aria-pressed", "true")
    tab.settle()
    event = int(tab("moment-strip").get_attribute("data-event") or -2)
    assert 0 < event < peak_of(made)
    assert exact(tab("headline").locator("strong").first) == made.live(0)[event + 1]
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        tab("moment-strip").focus()
        tab.page.keyboard.press(key)
        expect(tab("moment-strip")).to_have_attribute("data-event", str(event + step))
        tab.settle()
    assert exact(tab("stacks-sum")) == made.live(0)[event + 2]
    tab("when-peak").click()
    expect(tab("moment-strip")).to_have_attribute("data-event", str(peak_of(made)))


def test_a_profile_with_stacks_shows_the_lines_of_the_program(tab, windows):
    there = load_window(str(windows / "profiled" / SIDE))
    ready(tab, run="profiled", table="lines")
    wanted = {row.key: row.bytes for row in line_table(there, 0, peak_of(there))}
    assert dict(rows(tab, "line-row")) == wanted
    assert any("stacked_runs.py" in key and "multiply" in key for key in wanted)


def test_a_window_without_stacks_says_how_to_record_them_and_shows_what_it_knows(tab):
    tab.open_anew("stacks", run="plain", worker="rank0")
    expect(tab("no-stacks")).to_contain_text("recorded without call stacks")
    expect(tab("no-stacks")).to_contain_text("with_stack=True")
    expect(tab("stacks-code")).to_contain_text("snapshot=True")
    expect(tab("division-row", key="aten::mm")).to_be_visible()
    titles = tab("division-row").locator("td.strong").evaluate_all("cells => cells.map((cell) => cell.title)")
    assert sum(map(bytes_in, titles)) == 2430
    tab("division-by-category").click()
    expect(tab("division-row", key="parameter")).to_be_visible()


def test_hostile_frames_are_text(tab):
    ready(tab, run="names", frames="all")
    for table in ("stacks", "lines", "rules"):
        tab(f"table-{table}").click()
        tab.settle()
        quiet(tab)
    tab("table-stacks").click()
    for row in tab("stack-row").all():
        row.get_by_role("button").click()
    expect(tab("stack-frames")).to_have_count(3)
    quiet(tab)
    assert SCRIPT in tab("stack-frames").filter(has_text="onerror").inner_text()
    tab.page.mouse.move(*point(tab, 0.1, 2))
    expect(tab("flame-tip")).to_be_visible()
    quiet(tab)
    tab("stack-search").fill(SCRIPT)
    expect(tab("stack-row")).to_have_count(1)
    for view in ("timeline", "compare", "allocations", "overview"):
        tab.open_anew(view, run="names", worker="rank0", by="stack", what="line", colour="line")
        tab.settle()
        quiet(tab)


def quiet(tab):
    """Nothing runs, nothing breaks out of the page."""
    assert tab.frame.locator("main script, header script, img, [onerror]").count() == 0
    widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1]


def test_the_timeline_divides_by_line_and_sums_to_the_peak(tab, made):
    tab.open_anew("timeline", run="made", worker="rank0", by="line")
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    expect(tab("by-line")).to_have_attribute("aria-pressed", "true")
    assert tab("by-operator").count() == 0  # this trace knows none
    tab.settle()
    shown = tab("moment-row").evaluate_all(
        "rows => rows.map((r) => [r.dataset.key, r.querySelector('td').title])"
    )
    wanted = {row.key: row.bytes for row in line_table(made, 0, peak_of(made))}
    for key, title in shown:
        assert bytes_in(title) == wanted[key]
    rest = tab("moment-rest").locator("td.number").evaluate_all("cells => cells.map((cell) => cell.title)")
    assert sum(bytes_in(title) for title in (*(t for _, t in shown), *rest)) == sum(wanted.values())


def test_the_overview_of_a_trace_without_modules_shows_its_lines(tab, made, windows):
    tab.open_anew("overview", run="names", worker="rank0")
    expect(tab("by-line")).to_be_visible()
    expect(tab("by-module")).to_have_count(0)
    titles = tab("by-line").locator("td.number").evaluate_all("cells => cells.map((cell) => cell.title)")
    there = load_window(str(windows / "names" / SIDE))
    assert sum(map(bytes_in, titles)) == there.live(0)[peak_of(there) + 1]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_are_taken(open_tab, server, pictures, theme):  # noqa: F811
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 1280, "height": 1000})
    tab.open("stacks", query=f"?darkMode={'true' if theme == 'dark' else 'false'}", run="made", frames="all")
    tab("flame-canvas").wait_for()
    tab.settle()
    tab.page.mouse.move(*point(tab, 0.2, 4))
    expect(tab("flame-tip")).to_be_visible()
    picture = pictures / f"stacks-{theme}.png"
    tab.page.screenshot(path=picture, animations="disabled")
    assert 20_000 < picture.stat().st_size < 300_000


def test_a_frame_in_the_address_that_is_not_here_is_told(tab, made):
    ready(tab, node="zzz")
    expect(tab("missing-frame")).to_contain_text("frame zzz")
    expect(tab("flame-canvas")).to_have_attribute("data-node", "0")
    tab("missing-frame").get_by_role("button").click()
    expect(tab("missing-frame")).to_have_count(0)
    tab.wait_until(lambda: "node=" not in tab.page.url, "the address without it")
