"""Ranks: which peaks highest, when and how far above the others; every number is the recordings' own."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.browser.conftest import watched as watching
from tests.browser.tab import bytes_in, exact
from tests.step_figures import figures
from tests.tensorboard.process import tensorboard
from tests.traces import trace

GIB = 1 << 30
RANKS, FIRST, LAST = 8, 30, 53
LONG = 20_000
MANY = range(0, 800, 2)
TOP, TOP_STEP = 3, 47
"""Rank 3 gets an uneven batch in step 47, and peaks highest of all."""


def activations(rank, step):
    """A pipeline: the earlier the stage, the more micro-batches it keeps; batches differ in length."""
    return (RANKS - rank) * GIB // 2 + step % 4 * GIB // 4


def peak(rank, step):
    """6 GiB of parameters and optimizer state, the activations, and a temporary of 256 MiB."""
    return 6 * GIB + activations(rank, step) + GIB // 4 + (3 * GIB if (rank, step) == (TOP, TOP_STEP) else 0)


def steps_of(rank):
    """Rank 6 broke down after step 49."""
    return range(FIRST, 50 if rank == 6 else LAST + 1)


def recording(rank):
    device = "device=cuda:0"
    lines = [
        f"start {2 * GIB} w {device} module=layers.0.attn category=parameter reserved={7 * GIB}",
        f"start {4 * GIB} o {device} module=layers.0.attn category=optimizer_state reserved={7 * GIB}",
    ]
    for step in steps_of(rank):
        kept = f"{device} category=activation phase=forward reserved={peak(rank, step) + GIB}"
        uneven = (rank, step) == (TOP, TOP_STEP)
        lines += [f"step {step}", f"alloc {activations(rank, step)} a{step} {kept} module=layers.1.attn"]
        lines += [f"alloc {3 * GIB} u {kept} module=layers.2.experts"] if uneven else []
        lines += [
            f"alloc {GIB // 4} t{step} {device} category=temporary phase=backward module=head"
            f" reserved={peak(rank, step) + GIB}",
            f"free t{step} {device}",
            f"free a{step} {device} reserved={7 * GIB}",  # and the cache is emptied
        ]
        lines += [f"free u {device}"] if uneven else []
    made = trace(*lines)
    return replace(made, devices=(replace(made.devices[0], capacity=80 * GIB),))


@pytest.fixture(scope="module")
def watched():
    """Of eight ranks the peaks of very many steps, rank 5 by far the highest in step 12,345."""
    random = np.random.default_rng(0)
    peaks = 30 * GIB + random.integers(0, 4000, (RANKS, LONG)) * (1 << 20)
    peaks[5, 12_345] = 50 * GIB
    return peaks


@pytest.fixture(scope="module")
def server(tmp_path_factory, watched):
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(RANKS):
        RunWriter(str(folder / "pipeline"), f"rank{rank}").write(recording(rank))
        StepsWriter(str(folder / "long"), f"rank{rank}", 0).write(figures(watched[rank]))
    RunWriter(str(folder / "alone"), "rank0").write(recording(0))
    lines = [line for n in MANY for line in (f"step {n}", f"alloc {n + 1} a{n}", f"free a{n}")]
    RunWriter(str(folder / "many"), "rank0").write(trace(*lines))
    recorded = sum(len(steps_of(rank)) for rank in (*range(RANKS), 0)) + len(MANY)
    with tensorboard(folder) as running:
        running.wait_for("runs", lambda answer: counts(answer) == (recorded, RANKS * LONG))
        yield running


def counts(answer):
    """Steps that were recorded, and that were watched."""
    workers = [worker for run in answer["runs"] for worker in run["workers"]]
    watched = [device["count"] for worker in workers for device in worker["monitored"].values()]
    return sum(len(worker["steps"]["step"]) for worker in workers), sum(watched)


@pytest.fixture
def tab(server, kept_tabs):
    yield from watching(kept_tabs(server.url))


def shown(tab):
    """Rank -> highest, step, against the median (None: a dash), median rank."""
    rows = tab("rank-row").evaluate_all(
        """rows => rows.map((row) => [row.dataset.key, row.children[2].title, row.children[3].textContent,
            row.children[4].querySelector(".amount").title, row.children[6].textContent])"""
    )
    return {key: (bytes_in(high), int(step), bytes_in(delta), name) for key, high, step, delta, name in rows}


def cell(tab, row, column, columns):
    """The middle of a cell, on the page."""
    tab("ranks-map").scroll_into_view_if_needed()
    left, top, width, height = json.loads(tab("ranks-map").get_attribute("data-box") or "")
    box = tab("ranks-map").bounding_box()
    assert box is not None
    return box["x"] + left + (column + 0.5) * width / columns, box["y"] + top + (row + 0.5) * height


def ready(tab, **route):
    tab.open_anew("ranks", **route)
    tab("rank-row").first.wait_for()
    tab.settle()
    return tab


def test_the_highest_rank_its_step_and_how_far_it_is_above_the_median(tab):
    ready(tab, run="pipeline")
    expect(tab("headline")).to_have_text(
        "rank3 peaks highest: 12.50 GiB at step 47, 3.50 GiB (38.9 %) above the median rank."
    )
    amounts = tab("headline").locator(".amount")
    assert exact(amounts.nth(0)) == peak(TOP, TOP_STEP)
    assert exact(amounts.nth(1)) == peak(TOP, TOP_STEP) - peak(4, TOP_STEP)
    expect(tab("ranks-why")).to_contain_text(
        "3.50 GiB more than step 47 of rank4. New: layers.2.experts +3.00 GiB (activation). "
        "Larger: layers.*.attn +0.50 GiB (activation)."
    )
    rows = shown(tab)
    assert list(rows) == ["rank3", "rank0", "rank1", "rank2", "rank4", "rank5", "rank6", "rank7"]
    for rank in range(RANKS):
        step = max(steps_of(rank), key=lambda step: peak(rank, step))  # the first of equal ones
        ranks = sorted((peak(one, step), one) for one in range(RANKS) if step in steps_of(one))
        median, name = ranks[(len(ranks) - 1) // 2]
        assert rows[f"rank{rank}"] == (peak(rank, step), step, peak(rank, step) - median, f"rank{name}")
    assert set(tab("category-key").locator("li").all_inner_texts()) == {
        *("parameter", "optimizer state", "activation", "temporary"),
    }
    tab("ranks-compare").click()
    expect(tab("headline")).to_contain_text(
        "Step 47 of rank3 peaks 3.50 GiB (38.9 %) above step 47 of rank4."
    )
    assert exact(tab("headline").locator(".amount")) == peak(TOP, TOP_STEP) - peak(4, TOP_STEP)


def test_a_cell_tells_its_bytes_and_is_picked_by_pointer_and_by_keyboard(tab):
    ready(tab, run="pipeline", worker="rank0", step=30)
    columns = LAST - FIRST + 1
    tab.page.mouse.move(*cell(tab, 5, 2, columns))
    for text in ("rank5", "step 32", f"{peak(5, 32):,} bytes", "against the median of 8 ranks"):
        expect(tab("ranks-tip")).to_contain_text(text)
    tab.page.mouse.move(*cell(tab, 6, 22, columns))
    expect(tab("ranks-tip")).to_contain_text("Not recorded on this rank.")
    tab.page.mouse.click(*cell(tab, 5, 2, columns))
    expect(tab("ranks-picked")).to_contain_text("rank5 7.75 GiB in step 32: −0.50 GiB against the median")
    assert tab.picked() == {"run": "pipeline", "worker": "rank5", "step": "32"}
    tab.page.mouse.move(0, 0)
    tab("ranks-map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):  # the first shows where one is
        tab.page.keyboard.press(key)
    expect(tab("ranks-picked")).to_contain_text("rank6")
    assert tab.picked() == {"run": "pipeline", "worker": "rank6", "step": "33"}
    tab("ranks-overview").click()
    assert exact(tab("headline").locator(".amount")) == peak(6, 33)


def test_what_is_colored_and_the_order_are_in_the_address(tab):
    ready(tab, run="pipeline")
    tab("measure-reserved").click()
    expect(tab("headline")).to_contain_text("rank3 reserves most: 13.50 GiB at step 47")
    tab("order-worker").click()
    expect(tab("rank-row").first).to_have_attribute("data-key", "rank0")
    tab("order-worker").click()
    expect(tab("rank-row").first).to_have_attribute("data-key", "rank7")
    tab.wait_until(lambda: "measure=reserved" in tab.page.url and "ordered=-worker" in tab.page.url, "both")
    ready(tab, run="pipeline", measure="reserved", ordered="-worker")
    expect(tab("headline")).to_contain_text("rank3 reserves most")
    assert tab.keys("rank-row") == [f"rank{rank}" for rank in reversed(range(RANKS))]


def numbers(pattern, text):
    """The numbers that the pattern's groups match, without their thousands separators."""
    match = re.search(pattern, text)
    assert match, text
    return [int(group.replace(",", "")) for group in match.groups()]


def test_of_very_many_steps_each_column_names_the_step_of_its_highest(tab, watched):
    ready(tab, run="long")
    expect(tab("headline")).to_contain_text("rank5 peaks highest: 50.00 GiB at step 12345")
    foot = tab("columns-foot").inner_text()
    (columns,) = numbers(r"20,000 steps in (\d+) columns", foot)
    tab.page.mouse.move(*cell(tab, 2, columns // 2, columns))
    expect(tab("ranks-tip")).to_contain_text("the highest of them")
    told = tab("ranks-tip").inner_text()
    first, last = numbers(r"steps (\d+) to (\d+)", told)
    (step,), (size,) = numbers(r"in step (\d+)", told), numbers(r"([\d,]+) bytes", told)
    assert size == watched[2, first : last + 1].max() == watched[2, step]
    x, y = cell(tab, 2, columns // 2, columns)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 10, y, steps=4)
    tab.page.mouse.up()
    tab("all-steps").wait_for()
    expect(tab("columns-foot")).to_have_count(0)  # each step is a column of its own
    tab.wait_until(lambda: f"s0={first}" in tab.page.url, "the zoom in the address")
    expect(tab("headline")).to_contain_text("50.00 GiB at step 12345")
    tab("all-steps").click()
    expect(tab("columns-foot")).to_contain_text("20,000 steps")


def test_one_rank_alone_is_told_what_would_fill_the_view(tab):
    tab.open_anew("ranks", run="alone")
    expect(tab("one-rank")).to_contain_text("Only one rank is here: rank0")
    expect(tab("one-rank")).to_contain_text("memory_trace_handler(FOLDER")
    tab("one-rank").get_by_role("link").click()
    assert exact(tab("headline").locator(".amount")) == peak(0, 51)


def test_of_hundreds_of_recorded_steps_the_number_is_typed(tab):
    tab.open_anew("overview", run="many", step=10)
    expect(tab("picker-step")).to_have_value("10")
    tab("picker-step").fill("301")  # of the even ones that there are, the nearest
    tab("picker-step").press("Enter")
    expect(tab("headline")).to_contain_text("Step 300 peaked at 301 B")
    tab("picker-step").fill("5000")
    tab("picker-step").press("Enter")
    expect(tab("picker-step")).to_have_value("300")
    tab("whole-window").click()
    expect(tab("view-timeline")).to_be_visible()
    expect(tab("whole-window")).to_have_attribute("aria-pressed", "true")
    tab("picker-base").click()
    tab("picker-base-step").fill("7")
    tab("picker-base-step").press("Enter")
    expect(tab("picker-base")).to_have_text("step 6")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_of_ranks_are_taken_and_a_narrow_window_is_wide_enough(server, open_tab, tmp_path, theme):
    tab = open_tab(server.url)
    query = f"?darkMode={'true' if theme == 'dark' else 'false'}"
    tab.open("ranks", query=query, run="pipeline", worker="rank3", step=47)
    expect(tab("ranks-why")).to_contain_text("New: layers.2.experts")
    tab.settle()
    tab.page.mouse.move(*cell(tab, 1, 8, LAST - FIRST + 1))
    expect(tab("ranks-tip")).to_contain_text("step 38")
    folder = Path(os.environ.get("TB_MEMPLUGIN_PICTURES") or tmp_path)
    picture = folder / f"ranks-{theme}.png"
    tab.page.screenshot(path=picture, animations="disabled")
    assert 20_000 < picture.stat().st_size < 200_000
    tab.page.set_viewport_size({"width": 600, "height": 900})
    tab.settle()
    widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1] == 600
