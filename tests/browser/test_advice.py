"""Advice: findings of a real training with their bytes and evidence, and links that lead where told."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from playwright.sync_api import expect
from torch.profiler import profile, schedule

from examples.demo import Config, Transformer, batches, standard_library
from tb_memplugin import memory_trace_handler
from tb_memplugin.analysis import Finding, advice
from tb_memplugin.analysis.advice_rules import RULES
from tb_memplugin.store.reader import load_window, read_recordings
from tests.browser.conftest import FAST, HAS_RUST, SLOW
from tests.browser.tab import Tab, exact
from tests.tensorboard.process import TensorBoard, tensorboard

CONFIG = Config("advised", batch=4, context=64, depth=3)
HOSTILE = "<img src=x onerror=alert(1)>"


def record(logdir: Path, run: str, *, steps: int, keep: bool = False, in_place: bool = False) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8)) if run == "tiny" else Transformer(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handler = memory_trace_handler(logdir / run, "rank0", model=model, optimizer=optimizer)
    kept = []
    with profile(
        schedule=schedule(skip_first=1, wait=0, warmup=1, active=steps, repeat=1),
        profile_memory=True,
        on_trace_ready=handler,
    ) as profiler:
        for tokens, targets in islice(batches(standard_library(), CONFIG), steps + 2):
            loss = model(torch.rand(4, 8)).sum() if run == "tiny" else model(tokens, targets)
            if keep:
                kept.append(model(tokens, targets))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)
            profiler.step()


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`wasteful` keeps graphs and gradients; `tiny` is fine, and too short to judge its growth."""
    logdir = tmp_path_factory.mktemp("advised")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    record(logdir, "wasteful", steps=4, keep=True, in_place=True)
    record(logdir, "tiny", steps=2)
    torch.set_num_threads(threads)
    return logdir


@pytest.fixture(scope="module")
def running(advised: Path) -> Iterator[TensorBoard]:
    with tensorboard(advised, FAST if HAS_RUST else SLOW) as board:
        board.wait_for("runs", lambda answer: len(answer["runs"]) == 2)
        yield board


@pytest.fixture
def opened(open_tab: Callable[[str], Tab], running: TensorBoard) -> Tab:
    return open_tab(running.url)


def findings(logdir: Path, run: str) -> dict[str, Finding]:
    step = read_recordings(str(logdir / run)).steps[0]
    assert step.side_file is not None
    return {found.kind: found for found in advice(load_window(step.side_file), "cpu").findings}


def test_every_finding_is_a_card_with_its_bytes_and_its_evidence(opened: Tab, advised: Path) -> None:
    expected = findings(advised, "wasteful")
    assert {"growth", "kept_gradients", "checkpointing"} >= set(expected) >= {"growth", "kept_gradients"}
    opened.open("advice", run="wasteful")
    expect(opened("headline")).to_contain_text("2 problems to fix")
    assert opened.keys("finding") == list(expected)
    for kind, finding in expected.items():
        card = opened("finding", key=kind)
        size = card.get_by_test_id("finding-bytes")
        assert exact(size) == finding.bytes
        assert card.get_attribute("data-level") == finding.level
        rows = card.get_by_test_id("evidence")
        assert [exact(rows.nth(n).locator(".amount")) for n in range(rows.count())] == [
            row.bytes for row in finding.evidence
        ]
        assert rows.evaluate_all("rows => rows.map((row) => row.dataset.key)") == [
            row.what for row in finding.evidence
        ]
        expect(card).to_contain_text(finding.what_to_do)
    bars = opened("levels").locator(".level")
    assert [exact(bars.nth(n)) for n in range(bars.count())] == list(expected["growth"].levels)


def test_the_link_of_gradients_opens_the_gradients(opened: Tab, advised: Path) -> None:
    finding = findings(advised, "wasteful")["kept_gradients"]
    opened.open("advice", run="wasteful", step=finding.step)
    opened("finding", key="kept_gradients").get_by_test_id("finding-link").click()
    opened("view-allocations").wait_for()
    opened.settle()
    assert opened.picked()["step"] == str(finding.step)
    expect(opened.frame.locator("input[type=search]")).to_have_value("gradient")
    kept = int(finding.evidence[0].detail.partition(",")[0])
    expect(opened("allocations-sum")).to_contain_text(re.compile(rf"^{kept} of "))
    assert exact(opened("allocations-sum")) == finding.evidence[0].bytes


def test_the_links_of_growth_and_checkpointing_open_what_they_name(opened: Tab, advised: Path) -> None:
    expected = findings(advised, "wasteful")
    opened.open("advice", run="wasteful")
    opened("finding", key="growth").get_by_test_id("evidence-link").first.click()
    opened("view-allocations").wait_for()
    expect(opened.frame.locator("input[type=search]")).to_have_value(
        dict(expected["growth"].where.state)["search"]
    )
    if "checkpointing" in expected:
        opened("tab-advice").click()
        opened("finding", key="checkpointing").get_by_test_id("finding-link").click()
        opened("view-modules").wait_for()
        expect(opened("module-filter")).to_have_value(expected["checkpointing"].subject)


def test_where_all_is_well_it_says_what_was_looked_for_and_what_could_not_be_judged(opened: Tab) -> None:
    opened.open("advice", run="tiny")
    expect(opened("headline")).to_have_text("No problem found in steps 2 and 3.")
    expect(opened("finding")).to_have_count(0)
    expect(opened("peak-holders")).to_contain_text("Who fills the peak of step")
    expect(opened("holder").first).to_be_visible()
    expect(opened("peak-holders")).to_contain_text("whichever module allocated them. The rest is by module.")
    expect(opened("judgement")).to_have_count(len(RULES))
    growth = opened("judgement", key="growth")
    expect(growth).to_have_attribute("data-verdict", "not judged")
    expect(growth).to_contain_text("This rule needs 3 whole steps in one recording")
    expect(opened("judgement", key="unused_reserve")).to_have_attribute("data-verdict", "fine")


def test_hostile_words_are_shown_as_words(opened: Tab) -> None:
    """What a server might say of a model with such names."""
    finding = {
        **dict.fromkeys(("title", "subject", "measure", "what_to_do", "price"), HOSTILE),
        "kind": HOSTILE,
        "level": "problem",
        "step": 1,
        "bytes": 5,
        "of_bytes": 7,
        "levels": [1, 2],
        "evidence": [{"what": HOSTILE, "bytes": 5, "detail": HOSTILE, "name": True, "where": None}],
        "where": {"view": HOSTILE, "state": {HOSTILE: HOSTILE}},
    }
    told = {"kind": HOSTILE, "verdict": "fine", "why": HOSTILE}
    answer = {"steps": [1], "findings": [finding], "judgements": [told]}
    opened.page.route("**/tb_memplugin/advice?*", lambda route: route.fulfill(json=answer))
    opened.open("advice", run="tiny")
    expect(opened("finding")).to_contain_text(HOSTILE)
    expect(opened("finding-link")).to_have_count(0)
    assert opened.frame.locator("img").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_narrow_window_and_is_pictured(opened: Tab, theme: str, tmp_path: Path) -> None:
    """Pictures go where `make docs` says."""
    folder = Path(os.environ.get("TB_MEMPLUGIN_PICTURES", tmp_path))
    opened.open("advice", query="?darkMode=true" if theme == "dark" else "", run="wasteful")
    opened.settle()
    opened.page.screenshot(path=folder / f"advice-{theme}.png", animations="disabled")
    opened.page.set_viewport_size({"width": 700, "height": 900})
    opened.settle()
    widths = opened.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1] == 700
