"""How soon a browser shows each view of a long recording, and how many frames it draws while somebody zooms.

`python -m benchmarks.browser [EVENTS]` measures another recording than one of a million events.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from itertools import pairwise

from playwright.sync_api import Browser, CDPSession, Frame, sync_playwright

from benchmarks.clients import cpu_of
from benchmarks.figures import Figure
from benchmarks.levels import simulated
from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import NAMES, QUIET
from tests.browser.tab import SIZE, Tab
from tests.tensorboard.process import tensorboard

EVENTS, ROUNDS = 1_000_000, 3
VIEWS = ("overview", "timeline", "modules", "allocations", "stacks", "allocator", "advice")
CHARTS = {"timeline": "timeline-canvas", "allocations": "bands-canvas", "allocator": "reserve-canvas"}
"""The views that the wheel zooms, and their charts."""

SETTLE_MS = {1_000_000: 1_000.0, 10_000_000: 2_000.0}
FRAME_MS, WORST_MS = 1e3 / 55, 100.0

SETTLED = """() => new Promise((done) => {
    let since = 0;
    const look = () => {
        const now = performance.now();
        if (document.querySelector("[aria-busy=true], .loading")) since = 0;
        else since ||= now;
        if (since && now - since > 300) done(since);
        else setTimeout(look, 5);
    };
    look();
})"""
"""Since when nothing more loads, in milliseconds since our page was asked for."""

WHEEL = """(canvas, count) => new Promise((done) => {
    const box = canvas.getBoundingClientRect(), times = [];
    const turn = (now) => {
        times.push(now);
        if (times.length > 4 * count) return done(times);
        const part = Math.floor((times.length - 1) / count);  // in, right, left, out
        const deltaY = [-20, 20, -20, 20][part], shiftKey = part === 1 || part === 2;
        const [clientX, clientY] = [box.left + box.width / 2, box.top + box.height / 2];
        const how = { deltaY, shiftKey, clientX, clientY, bubbles: true, cancelable: true };
        canvas.dispatchEvent(new WheelEvent("wheel", how));
        requestAnimationFrame(turn);
    };
    requestAnimationFrame(turn);
})"""
"""Turns the wheel once in each frame, and returns when the frames were."""
TURNS = 60


def measure(events: int = EVENTS) -> list[Figure]:
    """Measure each view in a TensorBoard that has not read the recording, and then the wheel."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        return []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        RunWriter(f"{folder}/run", "rank0").write(simulated(events))
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        figures = [figure for view in VIEWS for figure in _of_view(browser, folder, view, events)]
        browser.close()
    return figures


def _of_view(browser: Browser, logdir: str, view: str, events: int) -> list[Figure]:
    settled: list[float] = []
    computed: list[float] = []
    frames: list[Figure] = []
    for number in range(ROUNDS):
        with tensorboard(logdir) as server:
            server.wait_for("runs", lambda answer: bool(answer["runs"]))
            tab = Tab(browser.new_page(viewport=SIZE), server.url).open("fleet")
            tab.settle()
            session = tab.page.context.new_cdp_session(tab.page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = cpu_of(server) * 1e3 + _task_ms(session)
            settled.append(_frame(tab.open_anew(view)).evaluate(SETTLED))
            computed.append(cpu_of(server) * 1e3 + _task_ms(session) - before)
            if view in CHARTS and number == ROUNDS - 1:
                frames = _of_frames(tab, session, view, f"{events:,} events: {view}")
            tab.page.close()
    what = f"{events:,} events: first settle of {view}"
    return [
        Figure(what, "ms", settled, SETTLE_MS.get(events)),
        Figure(f"{what}, CPU time of TensorBoard and the page", "ms", computed, SETTLE_MS.get(events)),
        *frames,
    ]


def _of_frames(tab: Tab, session: CDPSession, view: str, what: str) -> list[Figure]:
    canvas, frames, worst, computed = tab(CHARTS[view]), list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        before = _task_ms(session)
        times = canvas.evaluate(WHEEL, TURNS)
        laps = [later - earlier for earlier, later in pairwise(times)]
        computed.append((_task_ms(session) - before) / len(laps))
        frames.append(sum(laps) / len(laps))
        worst.append(max(laps))
        tab.settle()
    return [
        Figure(f"{what}, a frame while the wheel turns", "ms", frames, FRAME_MS),
        Figure(f"{what}, the worst frame", "ms", worst, WORST_MS),
        Figure(f"{what}, CPU time of the page for a frame", "ms", computed, FRAME_MS),
    ]


def _task_ms(session: CDPSession) -> float:
    """Return how long the page's main thread has computed."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(1e3 * float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def _frame(tab: Tab) -> Frame:
    return next(frame for frame in tab.page.frames if "name=tb_memplugin" in frame.url)


if __name__ == "__main__":
    for figure in measure(int(sys.argv[1]) if sys.argv[1:] else EVENTS):
        print(*figure.row(), flush=True)
