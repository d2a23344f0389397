"""A recorded logdir, a real TensorBoard over it on each of its data paths, and a real Chromium."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.browser.recorded import record_runs
from tests.browser.tab import SIZE, Tab
from tests.tensorboard.process import TensorBoard, tensorboard

HAS_RUST = sys.platform in {"linux", "darwin"} and platform.machine() in {"x86_64", "AMD64"}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what asks elsewhere gets nowhere
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


FAST, SLOW = "--load_fast=true", "--load_fast=false"
PATHS = [
    pytest.param(FAST, id="rust", marks=pytest.mark.skipif(not HAS_RUST, reason="no Rust data server here")),
    pytest.param(SLOW, id="python"),
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium or Chrome: install one, or set CHROMIUM (make test does)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def context(chromium: Browser) -> Iterator[BrowserContext]:
    """One for all pages, so that TensorBoard's three megabytes of script are compiled once."""
    context = new_context(chromium)
    yield context
    context.close()


def new_context(chromium: Browser) -> BrowserContext:
    return chromium.new_context(viewport=SIZE, locale="en-US")


@pytest.fixture
def start_tensorboard() -> Iterator[Callable[..., TensorBoard]]:
    """A server of the test's own, which outlives the test's pages: these go on asking until they close."""
    with contextlib.ExitStack() as running:
        yield lambda *arguments: running.enter_context(tensorboard(*arguments))


@pytest.fixture
def open_tab(chromium: Browser, start_tensorboard: object) -> Iterator[Callable[[str], Tab]]:
    """A page of a browser that remembers nothing; at the end it must not have done what no page may do."""
    contexts: list[BrowserContext] = []
    tabs: list[Tab] = []

    def open_one(home: str) -> Tab:
        contexts.append(new_context(chromium))
        tabs.append(Tab(contexts[-1].new_page(), home))
        return tabs[-1]

    yield open_one
    for context in contexts:
        context.close()
    assert [told for tab in tabs for told in tab.wrong] == []


@pytest.fixture(scope="session")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded runs. For reading only."""
    folder = tmp_path_factory.mktemp("logdir")
    record_runs(folder)
    return folder


@pytest.fixture(scope="session")
def server(logdir: Path) -> Iterator[TensorBoard]:
    """TensorBoard over the recorded runs, on the data path that people get."""
    with serving(logdir, FAST if HAS_RUST else SLOW) as running:
        yield running


@pytest.fixture(params=PATHS, scope="session")
def each_server(logdir: Path, request: pytest.FixtureRequest) -> Iterator[TensorBoard]:
    """The same on each of its data paths."""
    with serving(logdir, request.param) as running:
        yield running


@pytest.fixture(params=PATHS, scope="module")
def load_fast(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def serving(logdir: Path, load_fast: str) -> Iterator[TensorBoard]:
    with tensorboard(logdir, load_fast) as running:
        running.wait_for("runs", lambda answer: count_steps(answer) == 12)
        yield running


@pytest.fixture(scope="session")
def kept_tabs(context: BrowserContext) -> Callable[[str], Tab]:
    """One page for each address: most tests need a fresh frame, not a fresh TensorBoard around it."""
    tabs: dict[str, Tab] = {}
    return lambda home: (
        tabs.setdefault(home, Tab(context.new_page(), home)) if home not in tabs else tabs[home]
    )


@pytest.fixture
def tab(server: TensorBoard, kept_tabs: Callable[[str], Tab]) -> Iterator[Tab]:
    """On the recorded runs, for what happens in the page alone."""
    yield from watched(kept_tabs(server.url))


@pytest.fixture
def each_tab(each_server: TensorBoard, kept_tabs: Callable[[str], Tab]) -> Iterator[Tab]:
    """On each data path, for what comes from the server."""
    yield from watched(kept_tabs(each_server.url))


def watched(tab: Tab) -> Iterator[Tab]:
    """A test with a tab, which must not have done what no page may do."""
    tab.wrong.clear()
    tab.page.bring_to_front()  # those behind draw once a second
    tab.page.mouse.move(0, 0)
    yield tab
    assert tab.wrong == []


def count_steps(answer: dict) -> int:
    return sum(len(worker["steps"]["step"]) for run in answer["runs"] for worker in run["workers"])
