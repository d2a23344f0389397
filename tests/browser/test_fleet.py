"""Fleet: all runs at once; and a run of several ranks, which opens on the one that needs a look."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from tb_memplugin.store.writer import RunWriter, StepsWriter
from tb_memplugin.trace import Kind, MemoryTrace, OutOfMemory
from tests.browser.conftest import watched
from tests.browser.tab import bytes_in, exact
from tests.browser.test_accessible import AXE, judged
from tests.step_figures import figures
from tests.tensorboard.process import tensorboard
from tests.traces import trace

MIB = 1 << 20
CARD = 80 * MIB
FORWARD, LOSS = "attention.py:40 (forward)", "loss.py:7 (cross_entropy)"
WATCHED = 40


def kept(*sizes: int, device: str = "cuda:0", line: str | None = None) -> MemoryTrace:
    """Steps on 12 MiB of parameters that keep so many MiB each; the last request fails at a line."""
    lines = [f"start {12 * MIB} w device={device} category=parameter module=layer reserved={40 * MIB}"]
    for step, size in enumerate(sizes):
        place = f"device={device} module=layer category=activation phase=forward reserved={40 * MIB}"
        lines += [
            f"step {step}",
            f"alloc {max(1, size * MIB)} k{step} {place}",
            f"alloc {4 * MIB} t{step} {place}",
        ]
        lines += [f"free t{step} device={device}"]
    made = trace(*lines)
    made = replace(made, devices=(replace(made.devices[0], capacity=CARD),))
    if line is None:
        return made
    kind, stack, size = made.events.kind.copy(), made.events.stack.copy(), made.events.bytes.copy()
    kind[-1], stack[-1], size[-1] = Kind.OOM, 0, 64 * MIB
    place, _, function = line.partition(" (")
    ooms = (OutOfMemory(len(made.events) - 1, 64 * MIB, MIB),)
    events = replace(made.events, kind=kind, stack=stack, bytes=size)
    return replace(made, events=events, stacks=((f"{function[:-1]} {place}",),), ooms=ooms)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two ranks of which the second grows; nine runs that ran out of memory; forty with figures alone."""
    folder = tmp_path_factory.mktemp("fleet")
    RunWriter(str(folder / "ddp"), "rank0").write(kept(1, 0, 0, 0, 0))
    RunWriter(str(folder / "ddp"), "rank1").write(kept(4, 4, 4, 4, 4))
    for number in range(5):
        RunWriter(str(folder / f"out/{number}"), "rank0").write(kept(2, 3 + number, line=FORWARD))
    for number in range(5, 8):
        RunWriter(str(folder / f"out/{number}"), "rank0").write(kept(2, 3, line=LOSS))
    for number in range(WATCHED):
        peaks = (20 + number % 7) * MIB + np.arange(100) % 5 * MIB
        StepsWriter(str(folder / f"sweep/{number}"), "rank0", 0).write(figures(peaks))
    hostile = '<img src=x onerror="alert(1)">'
    RunWriter(str(folder / "odd"), hostile).write(kept(1, line="a.py:1 (<b onmouseover=alert(1)>x</b>)"))
    with tensorboard(folder) as running:
        running.wait_for("runs", lambda answer: len(answer["runs"]) == 10 + WATCHED)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


def ready(tab, **route):
    tab.open_anew("fleet", **route)
    tab("fleet-row").first.wait_for()
    tab.settle()
    return tab


def test_a_run_of_several_ranks_opens_on_the_worst_and_says_so(tab):
    tab.open_anew("overview", run="ddp")
    assert tab.picked() == {"run": "ddp", "worker": "rank1", "step": "4"}
    assert exact(tab("headline").locator(".amount")) == (12 + 20 + 4) * MIB
    expect(tab("other-ranks")).to_contain_text(
        "This one peaks highest of 2 ranks: 36.00 MiB at step 4, 111.8 % above rank0. "
    )
    expect(tab("other-ranks")).to_contain_text("It grows by 4.00 MiB with every step.")
    tab("all-ranks").click()
    expect(tab("headline")).to_contain_text("rank1 peaks highest: 36.00 MiB")


@pytest.mark.parametrize("view", ["overview", "advice"])
def test_a_rank_where_nothing_is_wrong_names_the_one_that_grows_and_leads_there(tab, view):
    tab.open_anew(view, run="ddp", worker="rank0", step=2)
    expect(tab("other-ranks")).to_contain_text(
        "rank1 peaks highest of 2 ranks: 36.00 MiB at step 4, 111.8 % above rank0. "
        "It grows by 4.00 MiB with every step."
    )
    amounts = tab("other-ranks").locator(".amount")
    assert [exact(amounts.nth(number)) for number in range(2)] == [36 * MIB, 4 * MIB]
    tab("open-rank").click()
    expect(tab(f"view-{view}")).to_be_visible()
    assert tab.picked() == {"run": "ddp", "worker": "rank1", "step": "4"}
    expect(tab("other-ranks")).to_contain_text("This one peaks highest")


def test_another_run_opens_on_its_worst_rank_too(tab):
    tab.open_anew("overview", run="out/0")
    assert tab.picked()["worker"] == "rank0"
    tab.pick("run", "ddp")
    expect(tab("headline")).to_contain_text("Step 4 peaked at 36.00 MiB")  # its highest: 12 + 5 * 4 + 4
    assert tab.picked()["worker"] == "rank1"


def test_what_advice_finds_first_stands_where_a_run_has_no_other_cause(open_tab, start_tensorboard, tmp_path):
    """24 MiB of optimizer state on 12 MiB of parameters: with 8 bits, 6 of its bytes in 8 are less."""
    state = trace(
        f"start {12 * MIB} w category=parameter module=layer",
        f"start {24 * MIB} s category=optimizer_state module=layer",
        "step 0",
        f"alloc {8 * MIB} a category=activation phase=forward module=layer",
        "free a",
    )
    RunWriter(str(tmp_path / "state"), "rank0").write(state)
    RunWriter(str(tmp_path / "out"), "rank0").write(kept(2, 3, line=LOSS))
    StepsWriter(str(tmp_path / "fine"), "rank0", 0).write(figures(20 * MIB + np.arange(100) % 5 * MIB))
    server = start_tensorboard(tmp_path)
    server.wait_for("runs", lambda answer: len(answer["runs"]) == 3)
    tab = ready(open_tab(server.url), ordered="run")
    cause = {run: tab("fleet-row", key=run).locator(".cause") for run in ("state", "out", "fine")}
    assert cause["state"].inner_text() == cause["fine"].inner_text() == ""
    tab("fleet-findings").click()
    expect(cause["state"]).to_contain_text("18.00 MiB less with 8-bit state, at least: Optimizer state takes")
    expect(cause["fine"]).to_have_text("nothing found")
    expect(cause["out"]).to_contain_text("out of memory at")
    tab.wait_until(lambda: "findings=on" in tab.page.url, "the choice in the address")
    tab("fleet-finding").click()
    expect(tab("finding").first).to_contain_text("Optimizer state takes")


def test_what_tensors_take_and_what_the_process_takes_are_two_numbers(open_tab, start_tensorboard, tmp_path):
    """On the CPU: 16 MiB allocated in the steps recorded in full, and a process of 900 MiB in step 7."""
    RunWriter(str(tmp_path / "run"), "rank0").write(kept(0, 0, 0, device="cpu"))
    sizes = [300, 300, 300, 300, 300, 300, 300, 900, 300]
    for run, highest in (("run", 900), ("watched", 500)):
        writer = StepsWriter(str(tmp_path / run), "rank0", 0)
        writer.write(figures([min(size, highest) * MIB for size in sizes], device="process"))
        writer.close()
    server = start_tensorboard(tmp_path)
    server.wait_for("runs", lambda answer: len(answer["runs"]) == 2)
    tab = ready(open_tab(server.url), ordered="resident")
    expect(tab("fleet-highest")).to_contain_text("run peaks highest: 16.00 MiB")
    expect(tab("fleet-highest")).to_contain_text("The process of run is highest: 900.0 MiB resident.")
    assert tab.keys("fleet-row") == ["run", "watched"]
    assert tab("fleet-row", key="run").locator("td.number").all_inner_texts()[:2] == [
        "16.00 MiB",
        "900.0 MiB",
    ]
    assert tab("fleet-row", key="watched").locator("td.number").all_inner_texts()[:2] == ["·", "500.0 MiB"]
    tab.open_anew("overview", run="run")
    expect(tab("card-peak")).to_contain_text("16.00 MiB")
    expect(tab("card-process")).to_contain_text(
        "900.0 MiBin step 7, the highest of 0 to 8; not recorded in full"
    )
    tab("card-process").click()
    expect(tab("headline")).to_have_text("Step 7 peaked at 900.0 MiB of resident memory.")


def test_the_fleet_says_first_what_ran_out_and_where(tab):
    ready(tab)
    expect(tab("headline")).to_have_text(
        f"9 of 50 runs ran out of memory, 5 of them at the same line, {FORWARD}. "
        "1 more grows step after step."
    )
    expect(tab("cause").nth(0)).to_contain_text(FORWARD)
    expect(tab("causes").get_by_role("row").nth(0)).to_contain_text("5 of 50")
    expect(tab("causes").get_by_role("row").nth(1)).to_contain_text("3 of 50")
    assert tab.keys("fleet-row")[:10] == [
        *(f"out/{number}" for number in (4, 3, 2, 1, 0, 5, 6, 7)),
        "odd",
        "ddp",
    ]
    tab("cause").nth(0).click()
    expect(tab("cause").nth(0)).to_have_attribute("aria-pressed", "true")
    assert tab.keys("fleet-row") == [f"out/{number}" for number in range(4, -1, -1)]  # the highest first
    tab.wait_until(lambda: "cause=failed" in tab.page.url, "the cause in the address")


def test_every_number_of_a_row_is_the_runs_own_and_leads_to_it(tab):
    ready(tab, filter="ddp")
    row = tab("fleet-row")
    cells = row.locator("td")
    assert bytes_in(cells.nth(1).get_attribute("title")) == 36 * MIB
    assert bytes_in(cells.nth(2).get_attribute("title")) == CARD - 36 * MIB
    assert bytes_in(cells.nth(3).get_attribute("title")) == 4 * MIB
    assert cells.nth(1).inner_text() == "36.00 MiB"
    expect(cells.nth(5)).to_have_text("2")
    expect(cells.nth(6)).to_have_text("5")
    cells.first.click()  # anywhere in the row
    assert exact(tab("headline").locator(".amount")) == 36 * MIB
    ready(tab, filter="out/7")
    tab("fleet-cause").click()
    expect(tab("view-allocator")).to_be_visible()
    assert tab.picked()["run"] == "out/7"


def test_search_pattern_and_order_are_in_the_address(tab):
    ready(tab)
    tab("fleet-search").fill("LOSS.py")
    expect(tab("fleet-count")).to_have_text("3 of 50 runs")
    expect(tab("headline")).to_have_text(
        f"3 of 3 runs ran out of memory, 3 of them at the same line, {LOSS}."
    )
    tab("fleet-search").fill("^sweep/.$")
    expect(tab("fleet-count")).to_have_text("0 of 50 runs")
    tab("fleet-pattern").click()
    expect(tab("fleet-count")).to_have_text("10 of 50 runs")
    tab("fleet-order-peak").click()
    expect(tab("fleet-row").first).to_have_attribute("data-key", "sweep/6")
    tab("fleet-search").fill("(")
    expect(tab("pattern-refused")).to_contain_text("is not a valid regular expression")
    tab.wrong = [told for told in tab.wrong if "status of 400" not in told]
    tab("fleet-search").fill("^sweep/1")
    expect(tab("fleet-count")).to_have_text("11 of 50 runs")
    tab.wait_until(lambda: "pattern=on" in tab.page.url and "ordered=peak" in tab.page.url, "both")
    ready(tab, filter="^sweep/1", pattern="on", ordered="-peak")
    assert tab.keys("fleet-row")[0] in {"sweep/14"}


def test_tensorboards_own_filter_of_runs_counts_and_can_be_passed(open_tab, server):
    tab = open_tab(server.url)
    tab.open("fleet", query="?runFilter=OUT%2F%5B0-2%5D")
    expect(tab("host-filter")).to_contain_text("OUT/[0-2]: 3 of 50 runs are shown")
    assert tab.keys("fleet-row") == ["out/2", "out/1", "out/0"]
    tab("host-filter").get_by_role("button").click()
    expect(tab("fleet-count")).to_have_text("50 runs")


def test_rows_are_walked_and_opened_by_keyboard(tab):
    ready(tab)
    links = tab("fleet-row").locator("th a")
    links.first.focus()
    tab.page.keyboard.press("ArrowDown")
    expect(links.nth(1)).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(tab("view-overview")).to_be_visible()
    assert tab.picked()["run"] == "out/3"


def test_of_many_runs_the_wanted_one_is_found_by_typing(tab):
    tab.open_anew("overview", run="ddp")
    tab("picker-run").click()
    search, options = tab("picker-run-search"), tab("picker-run-option")
    expect(search).to_be_focused()
    expect(options).to_have_count(10 + WATCHED)
    search.fill("1 SWEEP")
    expect(options).to_have_count(13)  # 1, 10 to 19, 21 and 31
    assert judged(tab) == [] if AXE.is_file() else True
    tab.page.keyboard.press("ArrowDown")
    expect(search).to_have_attribute("aria-activedescendant", "picker-run-choice-1")
    tab.page.keyboard.press("Enter")
    expect(tab("picker-run")).to_have_text("sweep/10")
    expect(tab("picker-run")).to_be_focused()
    expect(tab("picker-run-search")).to_have_count(0)
    tab("picker-run").click()
    search.fill("nothing like it")
    expect(options).to_have_count(0)
    tab.page.keyboard.press("Escape")
    expect(tab("picker-run")).to_be_focused()
    assert tab.picked()["run"] == "sweep/10"


def test_in_a_narrow_window_the_cause_is_in_sight(server, open_tab):
    """The curve of peaks gives way."""
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 800, "height": 900})
    tab.open("fleet").settle()
    causes = tab.frame.locator(".fleet-table td.cause").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().left)"
    )
    assert causes
    assert max(causes) + 60 < 800
    expect(tab.frame.locator(".fleet-table .spark").first).to_be_hidden()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_of_the_fleet_are_taken_and_axe_finds_nothing(server, open_tab, tmp_path, theme):
    tab = open_tab(server.url)
    query = f"?darkMode={'true' if theme == 'dark' else 'false'}"
    tab.open("fleet", query=query)
    tab("fleet-row").first.wait_for()
    tab.settle()
    folder = Path(os.environ.get("TB_MEMPLUGIN_PICTURES") or tmp_path)
    picture = folder / f"fleet-{theme}.png"
    tab.page.screenshot(path=picture, animations="disabled")
    assert 20_000 < picture.stat().st_size < 300_000
    if AXE.is_file():
        assert judged(tab) == []
    tab.page.set_viewport_size({"width": 600, "height": 900})
    tab.settle()
    widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1] == 600
