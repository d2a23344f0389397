"""A training that MemoryMonitor watches: the tab shows its steps while it runs, long ones too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.browser.tab import exact
from tests.browser.test_trouble import reload_tensorboard
from tests.step_figures import figures
from tests.tensorboard.process import tensorboard
from tests.traces import trace

ROOT = Path(__file__).resolve().parents[2]
LONG = 100_000
HOSTILE = "<img src=x onerror=alert(1)>"
GIB = 1 << 30


@pytest.fixture
def training(tmp_path):
    """A real training in a process of its own: it trains as many steps as it is told."""
    command = [sys.executable, "-m", "tests.monitored_training", str(tmp_path / "live")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    yield lambda steps: train(process, steps)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def train(process, steps):
    """Train on; gives what the monitor told of all steps so far."""
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def count_of(answer):
    return sum(
        one["count"]
        for run in answer["runs"]
        for worker in run["workers"]
        for one in worker["monitored"].values()
    )


def has_watched(count, answer):
    return count_of(answer) == count


def peaks_of(told):
    return [step["devices"][0]["peak_allocated"] for step in told]


def test_steps_of_a_training_that_runs_show_after_each_reload(
    training, load_fast, start_tensorboard, open_tab, tmp_path
):
    server = start_tensorboard(tmp_path, load_fast)
    tab = open_tab(server.url)
    tab.page.goto(f"{tab.home}/#tb_memplugin")
    tab("empty-state").wait_for()
    told: list[dict] = []
    for steps in (10, 15):
        told = training(steps)
        server.wait_for("runs", partial(has_watched, len(told)))
        reload_tensorboard(tab)
        tab("headline").wait_for()
        expect(tab("among")).to_contain_text(f"{len(told)} steps")
        highest = max(peaks_of(told))
        expect(tab("headline").locator(".amount")).to_have_attribute("title", f"{highest:,} bytes")
    for step in (0, 12, len(told) - 1):
        shows(tab.open_anew(run="live", step=step), told[step])
    take_pictures(tab, Path(os.environ.get("TB_MEMPLUGIN_PICTURES") or tmp_path))
    _, body, _ = server.fetch("data/plugin/scalars/tags")
    assert json.loads(body)["live/rank0.steps"].keys() == {"memory/peak_resident"}
    query = {"run": "live/rank0.steps", "tag": "memory/peak_resident"}
    points = json.loads(server.fetch("data/plugin/scalars/scalars", **query)[1])
    assert [step for _, step, _ in points] == list(range(len(told)))
    assert [value for _, _, value in points] == [np.float32(peak) for peak in peaks_of(told)]


def take_pictures(tab, folder):
    for theme in ("light", "dark"):
        tab.open(query=f"?darkMode={'true' if theme == 'dark' else 'false'}", run="live", step=20)
        tab("steps-plot").wait_for()
        tab.settle()
        picture = folder / f"monitor-{theme}.png"
        tab.page.screenshot(path=picture, animations="disabled")
        assert picture.stat().st_size < 200_000


def shows(tab, told):
    """Every number of a step is what the monitor told the training."""
    device = told["devices"][0]
    assert exact(tab("headline").locator(".amount")) == device["peak_allocated"]
    assert exact(tab("card-peak").locator(".value .amount")) == device["peak_allocated"]
    assert exact(tab("card-left").locator(".value .amount")) == device["allocated"]
    expect(tab("card-time").locator(".value span")).to_have_attribute("title", f"{told['duration_ns']:,} ns")
    assert tab.keys("phase-row") == ["forward", "backward"]
    for phase in told["phases"]:
        numbers = tab("phase-row", key=phase["name"]).locator("td.number")
        assert exact(numbers.nth(0)) == phase["peak_bytes"][0]
        assert exact(numbers.nth(1)) == phase["end_bytes"][0]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run of 100,000 steps, and one of 400 of which three were recorded in full."""
    folder = tmp_path_factory.mktemp("watched")
    random = np.random.default_rng(0)
    peaks = 40 * GIB + random.integers(0, 4000, LONG) * (1 << 20)
    peaks[76_543] = 50 * GIB
    writer = StepsWriter(str(folder / "long"), "rank0", 0)
    for first in range(0, LONG, 1000):
        part = peaks[first : first + 1000]
        writer.write(figures(part, first=first, phases={"forward": part - GIB, "backward": part}))
    short = 6 * GIB + np.arange(400) * (2 << 20)
    retries = np.zeros(400, np.int64)
    retries[[180, 320]] = 1
    phases = {"forward": short - GIB, HOSTILE: short}
    StepsWriter(str(folder / "mixed"), "rank0", 0).write(figures(short, phases=phases, retries=retries))
    lines = [f"start {4 * GIB} w device=cuda:0 module=layer category=parameter reserved={12 * GIB}"]
    for step in (200, 201, 202):
        lines += [
            f"step {step}",
            f"alloc {short[step] - 4 * GIB} a{step} device=cuda:0 module=layer reserved={12 * GIB}",
            f"free a{step} device=cuda:0",
        ]
    RunWriter(str(folder / "mixed"), "rank0").write(trace(*lines))
    with tensorboard(folder) as server:
        server.wait_for("runs", lambda answer: count_of(answer) == LONG + 400)
        yield server, peaks


def test_of_a_hundred_thousand_steps_the_highest_is_found_and_any_can_be_picked(watched, open_tab):
    server, peaks = watched
    tab = open_tab(server.url).open(run="long")
    expect(tab("headline")).to_contain_text("Step 76543 peaked at 50.00 GiB")
    expect(tab("columns-foot")).to_contain_text("100,000 steps in 1,000 columns")
    left, top, width, height = tab.plot_box("steps-plot")
    place = (left + width * 0.25, top + height / 2)
    tab.page.mouse.move(*place)
    told = tab("steps-tip").inner_text()
    found = re.search(r"steps (\d+) to (\d+), highest in step (\d+)\s.* · ([\d,]+) bytes", told)
    assert found is not None, told
    first, last, step, size = (int(number.replace(",", "")) for number in found.groups())
    assert last - first == 99
    assert peaks[first : last + 1].max() == size == peaks[step]
    tab.page.mouse.click(*place)
    expect(tab("headline")).to_contain_text(f"Step {step} peaked")
    assert exact(tab("headline").locator(".amount")) == peaks[step]
    tab("highest-step").click()
    expect(tab("headline")).to_contain_text("Step 76543 peaked")
    tab("step-next").click()
    expect(tab("headline")).to_contain_text("Step 76544 peaked")
    assert exact(tab("headline").locator(".amount")) == peaks[76_544]


def test_a_drag_zooms_until_each_step_is_a_point_of_its_own_and_the_address_keeps_it(watched, open_tab):
    server, peaks = watched
    tab = open_tab(server.url).open(run="long", step=50_000, s0=49_900, s1=50_100)
    tab.settle()
    left, top, width, height = tab.plot_box("steps-plot")
    y = top + height / 2
    tab.page.mouse.move(left + width * 0.5, y)
    tab.page.mouse.down()
    tab.page.mouse.move(left + width * 0.6, y, steps=5)
    tab.page.mouse.up()
    tab.wait_until(lambda: "s0=50000" in tab.page.url, "the zoom in the address")
    expect(tab("columns-foot")).to_have_count(0)
    expect(tab("headline")).to_contain_text("Step 50000 peaked")  # a drag is no click
    tab.settle()
    tab.page.mouse.move(left + 2, y)
    expect(tab("steps-tip")).to_contain_text(f"{peaks[50_000]:,} bytes")
    tab("all-steps").click()
    expect(tab("columns-foot")).to_contain_text("100,000 steps")


def test_recorded_steps_stand_among_the_watched_ones_and_keep_their_views(watched, open_tab):
    server, _ = watched
    tab = open_tab(server.url).open(run="mixed")
    expect(tab("headline")).to_contain_text("Step 202 peaked")
    assert exact(tab("higher-step").locator(".amount")) == 197 * (2 << 20)  # step 399
    expect(tab("higher-step")).to_contain_text("0.38 GiB below step 399, the highest")
    tab("category-sum").wait_for()  # recorded in full: the whole Overview
    tab("peak-of-all-steps").wait_for()
    tab("tab-timeline").click()
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    tab.open_anew("overview", run="mixed", step=30)
    assert exact(tab("headline").locator(".amount")) == 6 * GIB + 30 * (2 << 20)
    expect(tab("card-retries").locator(".under")).to_have_text("2 · 0 in all steps")
    assert tab("picker-base").count() == 0


def test_views_that_need_more_than_figures_say_so_and_what_to_add(watched, open_tab):
    server, _ = watched
    tab = open_tab(server.url).open(run="mixed", step=30)
    for view in ("timeline", "modules", "allocations", "stacks", "allocator", "compare"):
        tab(f"tab-{view}").click()
        expect(tab("only-figures")).to_contain_text("Step 30 on cuda:0 has only the figures")
    code = tab("record-code").inner_text()
    compile(code, "what the page says", "exec")
    assert 'memory_trace_handler(FOLDER, "rank0"' in code
    tab("recorded-steps").get_by_role("link", name="step 201").click()
    expect(tab("only-figures")).to_have_count(0)
    assert tab.picked()["step"] == "201"


def test_advice_judges_the_growth_of_a_run_that_was_only_watched(watched, open_tab):
    server, _ = watched
    tab = open_tab(server.url).open("advice", run="mixed", step=30)
    expect(tab("only-figures")).to_have_count(0)
    expect(tab("headline")).to_contain_text("watched steps")
    expect(tab("finding").first).to_have_attribute("data-key", "growth")
    assert exact(tab("finding-bytes").first) == 1 << 20
    tab("how-to-record").wait_for()
    tab("tab-overview").click()
    expect(tab("finding-line").first).to_have_attribute("data-key", "growth")


def test_a_phase_with_a_hostile_name_is_text(watched, open_tab):
    server, _ = watched
    tab = open_tab(server.url).open(run="mixed", step=30)
    assert tab.keys("phase-row") == ["forward", HOSTILE]
    expect(tab("phase-row", key=HOSTILE)).to_contain_text(HOSTILE)
