"""How long Fleet takes for 500 runs of 1,000 steps: its answers, and until a browser shows them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from benchmarks.figures import Figure
from tb_memplugin.store.writer import StepsWriter
from tests.browser.conftest import NAMES, QUIET
from tests.browser.tab import SIZE, Tab
from tests.step_figures import figures
from tests.tensorboard.process import TensorBoard, tensorboard

RUNS, STEPS, ROUNDS = 500, 1_000, 5
MIB = 1 << 20


def measure() -> list[Figure]:
    """Measure two answers, and how long a browser takes to know all rows and show the first."""
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder))
        with tensorboard(folder) as server:
            server.wait_for("runs", _is_complete)
            answers = {
                route: [_lap(partial(server.get, route)) for _ in range(ROUNDS)]
                for route in ("runs", "fleet")
            }
            of_answers = [
                Figure(f"{RUNS} runs: {route}, HTTP", "ms", laps) for route, laps in answers.items()
            ]
            return [*of_answers, *_in_a_browser(server)]


def write_runs(logdir: Path) -> None:
    """Write the figures of runs of which every tenth grows by 3 MiB a step."""
    random = np.random.default_rng(0)
    for run in range(RUNS):
        peaks = (20 << 30) + random.integers(0, 256 * MIB, STEPS)
        growth = np.arange(STEPS) * 3 * MIB * (run % 10 == 0)
        StepsWriter(str(logdir / f"sweep/{run:03}"), "rank0", 0).write(figures(peaks + growth))


def _is_complete(answer: dict[str, Any]) -> bool:
    workers = [worker for run in answer["runs"] for worker in run["workers"]]
    counts: list[int] = [device["count"] for worker in workers for device in worker["monitored"].values()]
    return sum(counts) == RUNS * STEPS


def _in_a_browser(server: TensorBoard) -> list[Figure]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        return []
    laps: dict[str, list[float]] = {
        name: [] for name in ("opened", "reloaded", "switched", "ordered", "searched")
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        for _ in range(ROUNDS):
            tab = Tab(browser.new_page(viewport=SIZE), server.url)
            laps["opened"].append(_lap(partial(_opened, tab.open, tab)))
            laps["reloaded"].append(_lap(partial(_opened, tab.open_anew, tab)))
            tab.open_anew("overview").settle()
            laps["switched"].append(_lap(partial(_clicked, tab, "tab-fleet")))
            laps["ordered"].append(_lap(partial(_clicked, tab, "fleet-order-peak")))
            laps["searched"].append(_lap(partial(_searched, tab, "sweep/07")))
            tab.page.close()
        browser.close()
    return [
        Figure(f"{RUNS} runs: Fleet from its address, TensorBoard's start included", "ms", laps["opened"]),
        Figure(f"{RUNS} runs: Fleet in a TensorBoard that is open", "ms", laps["reloaded"], 2_000),
        Figure(f"{RUNS} runs: Fleet from a click", "ms", laps["switched"], 2_000),
        Figure(f"{RUNS} runs: another order", "ms", laps["ordered"], 200),
        Figure(f"{RUNS} runs: a search", "ms", laps["searched"], 200),
    ]


def _opened(load: Callable[[str], Tab], tab: Tab) -> None:
    load("fleet")
    _wait_for_rows(tab)


def _clicked(tab: Tab, testid: str) -> None:
    tab(testid).click()
    _wait_for_rows(tab)


def _wait_for_rows(tab: Tab) -> None:
    """Wait until the table says how many runs it has, and its first row is there."""
    tab("fleet-count").get_by_text(f"{RUNS} runs").wait_for()
    tab("fleet-row").first.wait_for()


def _searched(tab: Tab, text: str) -> None:
    """Type a text that ten runs have."""
    tab("fleet-search").fill(text)
    tab("fleet-count").get_by_text("10 of").wait_for()


def _lap(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
