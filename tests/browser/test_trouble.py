"""Nothing there yet, files that are broken, files that are gone: the rest works, and the tab says why."""

from __future__ import annotations

import re
import shutil
from functools import partial

import pytest
from playwright.sync_api import Route, expect

from tb_memplugin.store.envelope import HEAD, VERSION
from tb_memplugin.store.paths import HEAD_MAGIC
from tb_memplugin.store.reader import load_window
from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import count_steps
from tests.browser.recorded import recorded
from tests.browser.tab import exact
from tests.browser.test_accessible import VIEWS
from tests.tensorboard.process import tensorboard

SIDE = "rank0/plugins/tb_memplugin/window-000000.mem"
BROKEN = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "foreign": lambda path: path.write_bytes(b"PK\x03\x04 a zip file, say" * 100),
    "newer": lambda path: path.write_bytes(
        HEAD.pack(HEAD_MAGIC, VERSION + 1, 0) + path.read_bytes()[HEAD.size :]
    ),
}
ROUTES = "**/data/plugin/tb_memplugin/*"
REASONS = {
    "truncated": "truncated",
    "foreign": "not a tb_memplugin side file",
    "newer": f"version {VERSION + 1}",
}


@pytest.fixture(scope="module")
def damaged(logdir, load_fast, tmp_path_factory):
    """A good run, and beside it four whose first side file is broken or gone."""
    folder = tmp_path_factory.mktemp("damaged")
    for name in ("good", "missing", *BROKEN):
        shutil.copytree(logdir / "baseline", folder / name)
    for name, damage in BROKEN.items():
        damage(folder / name / SIDE)
    (folder / "missing" / SIDE).unlink()
    with tensorboard(folder, load_fast) as server:
        server.wait_for("runs", lambda answer: count_steps(answer) == 5 * 8)
        yield server


@pytest.fixture
def hurt(damaged, open_tab):
    return open_tab(damaged.url)


def test_files_that_cannot_be_read_are_named_with_the_reason_beside_runs_that_work(hurt, logdir):
    hurt.open("overview", run="good", step=2)
    peak = recorded(logdir).stats.peak_bytes
    assert exact(hurt("headline").locator(".amount")) == peak
    hurt("problems-toggle").click()
    listed = hurt("problems").locator("li").all_inner_texts()
    for name, reason in REASONS.items():
        (item,) = (text for text in listed if f"{name}/{SIDE}" in text)
        assert reason in item
    hurt("tab-timeline").click()
    expect(hurt("moment-panel")).to_have_attribute("data-exact", "true")
    for name in BROKEN:
        hurt.pick("run", name)
        hurt("coarse-notice").wait_for()
    hurt("tab-overview").click()
    assert exact(hurt("headline").locator(".amount")) == peak


def test_without_its_side_file_a_step_still_shows_and_the_file_is_named(hurt, logdir):
    there = recorded(logdir)
    hurt.open("timeline", run="missing", worker="rank0", step=2)
    expect(hurt("coarse-notice")).to_contain_text("window-000000.mem")
    label = hurt("timeline-canvas").get_attribute("aria-label") or ""
    assert f"{there.stats.peak_bytes / 2**20:.2f} MiB" in label
    hurt("tab-overview").click()
    assert exact(hurt("headline").locator(".amount")) == there.stats.peak_bytes
    assert exact(hurt("category-sum")) == there.stats.peak_bytes
    hurt("tab-modules").click()
    expect(hurt("only-figures")).to_contain_text("window-000000.mem")
    row = hurt("module-row", key="(not named)").locator("td.number").first
    assert exact(row) == there.stats.peak_bytes
    hurt.pick("step", "5")  # of the other window, whose side file is there
    hurt("tab-timeline").click()
    expect(hurt("moment-panel")).to_have_attribute("data-exact", "true")


def test_an_empty_logdir_says_what_to_do_and_shows_what_is_written_while_it_runs(
    logdir, load_fast, start_tensorboard, open_tab, tmp_path
):
    server = start_tensorboard(tmp_path, load_fast)
    tab = open_tab(server.url)
    tab.page.goto(f"{tab.home}/#tb_memplugin")
    expect(tab("empty-state")).to_contain_text("No memory has been recorded here yet.")
    expect(tab("record-command")).to_have_text(f"tb-memplugin run --logdir {tmp_path} train.py")
    code = tab("record-code").inner_text()
    assert f'memory_trace_handler("{tmp_path}/first", model=model, optimizer=optimizer)' in code
    for line in (
        "from tb_memplugin import memory_trace_handler",
        "profile_memory=True",
        "on_trace_ready=handler",
    ):
        assert line in code
    compile(code, "what the page says", "exec")
    writer = RunWriter(str(tmp_path / "first"), "rank0")
    for window, steps in enumerate(([2, 3], [5, 6])):
        writer.write(load_window(recorded(logdir, step=steps[0]).side_file))
        server.wait_for("runs", partial(has_steps, 2 * window + 2))
        if window > 0:  # the empty page looks again by itself
            reload_tensorboard(tab)
        recorded_steps = tab("picker-step").locator("option:not([value=window])")
        expect(recorded_steps).to_have_count(2 * window + 2, timeout=15_000)
        tab.pick("step", str(steps[1]))
        expect(tab("headline")).to_contain_text(f"Step {steps[1]} peaked")
        peak = recorded(logdir, step=steps[1]).stats.peak_bytes
        assert exact(tab("headline").locator(".amount")) == peak


def test_a_server_that_went_and_came_back_is_told_and_asked_again(server, open_tab):
    tab = open_tab(server.url)
    tab.page.clock.install()
    tab.open("overview", run="baseline", worker="rank0", step=2)
    tab.settle()
    tab.page.route(ROUTES, lambda route: route.abort("connectionrefused"))
    tab("tab-modules").click()
    expect(tab("error-state")).to_contain_text("TensorBoard did not answer.")
    tab("tab-overview").click()  # what was loaded stays
    expect(tab("headline")).to_contain_text("Step 2 peaked")
    tab.page.unroute(ROUTES)
    tab("tab-modules").click()
    tab.page.clock.fast_forward(5_000)
    tab("module-row").first.wait_for()
    expect(tab("trouble")).to_have_count(0)
    tab.wrong.clear()  # what Chromium says of refused connections


def test_every_view_names_each_route_that_fails_and_has_all_of_it_after_trying_again(server, open_tab):
    """All routes but the runs fail; each click comes after those mend that the page names."""
    tab = open_tab(server.url)
    asked: set[str] = set()
    mended: set[str] = set()
    tab.open("fleet", run="baseline", worker="rank0", step=2)
    tab.settle()
    tab.page.route(ROUTES, lambda route: fail_but(route, {"runs", "index.js", *mended}, asked))
    button = tab.frame.get_by_role("button", name="Try again")  # the one of two that is not hidden
    for view in VIEWS:
        asked.clear()
        mended.clear()
        tab.open_anew(view, run="baseline", worker="rank0", step=2)
        button.wait_for()
        tab.settle()
        while button.count():
            named = set(re.findall(r"\w+", button.locator("xpath=..").inner_text())) & asked
            assert named - mended, (view, asked, mended)
            mended |= named
            button.click()
            tab.settle()
        assert asked == mended, view
    tab.wrong.clear()


def test_a_part_of_a_view_that_never_comes_is_named_and_tried_again(server, open_tab):
    tab = open_tab(server.url)
    tab.page.clock.install()
    broken = ["advice", "fleet"]
    tab.page.route(ROUTES, lambda route: hang_some(route, broken))
    tab.open("overview", run="baseline", worker="rank0", step=2)
    expect(tab("headline")).to_contain_text("Step 2 peaked")
    tab.page.clock.fast_forward(10_000)
    expect(tab("trouble")).to_contain_text("has not answered for 10 seconds")
    for part in broken:
        expect(tab("trouble")).to_contain_text(part)
    expect(tab("headline")).to_contain_text("Step 2 peaked")
    broken.clear()
    tab("trouble").get_by_role("button").click()
    tab("findings").wait_for()
    expect(tab("trouble")).to_have_count(0)
    tab.wrong.clear()


@pytest.mark.parametrize("lasting", [True, False])
def test_runs_that_are_not_answered_are_asked_once_and_anew_by_a_click(server, open_tab, lasting):
    tab = open_tab(server.url)
    tab.page.clock.install()
    asked: list[Route] = []
    tab.page.route(
        "**/data/plugin/tb_memplugin/runs",
        lambda route: route.continue_() if asked else asked.append(route),
    )
    tab.page.goto(tab.address("overview", run="baseline", worker="rank0", step=2))
    tab("loading").wait_for()
    for _ in range(4):
        tab.page.clock.fast_forward(5_000)
    expect(tab("trouble")).to_contain_text("lack parts: runs")
    expect(tab("loading")).to_be_visible()  # a second request would have been answered
    if lasting:
        tab("trouble").get_by_role("button").click()
    else:
        asked[0].continue_()
    expect(tab("headline")).to_contain_text("Step 2 peaked")
    expect(tab("trouble")).to_have_count(0)


def name_of(route):
    return route.request.url.partition("?")[0].rpartition("/")[2]


def hang_some(route, parts):
    if name_of(route) not in parts:
        route.continue_()


def fail_but(route, working, asked):
    if name_of(route) in working:
        route.continue_()
    else:
        asked.add(name_of(route))
        route.fulfill(status=500, body="")


def has_steps(count, answer):
    return count_steps(answer) == count


def reload_tensorboard(tab):
    """What its reload button does."""
    tab.page.locator("app-header-reload").get_by_role("button").click()


def test_under_a_path_prefix_everything_works(logdir, start_tensorboard, open_tab):
    server = start_tensorboard(logdir, "--path_prefix", "/tb")
    tab = open_tab(f"{server.url}/tb")
    route = "tb/data/plugin/tb_memplugin/runs"
    tab.wait_until(lambda: b"checkpointed" in server.fetch(route)[1], "the runs")
    for view in ("overview", "timeline", "modules", "compare"):
        tab.open(view, run="baseline", step=2)
    tab("tab-overview").click()
    assert exact(tab("headline").locator(".amount")) == recorded(logdir).stats.peak_bytes
    assert tab.page.url.startswith(f"{server.url}/tb/#tb_memplugin&")
