"""Names from elsewhere are text: whatever they hold, nothing runs, nothing opens, nothing breaks the page."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import count_steps
from tests.tensorboard.process import tensorboard
from tests.traces import trace

SCRIPT = "<script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(1)>"
WORKER = f"{SCRIPT}\n../../etc/passwd\0" + "x" * 10_000
RUNS = [IMAGE, "javascript:alert(1)", "b%2e%2e'&amp;#x"]
"""Folders too. No ", backslash or control character: TensorBoard 2.21's Rust server cannot read them."""

LONG = "m" * 10_000


@pytest.fixture(scope="module")
def hostile(load_fast, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    names = trace(*(f"start 4000 p{n} category=parameter module=m{n}" for n in range(5)), "step 1", *lines())
    for run in RUNS:
        RunWriter(str(folder / run), WORKER).write(names)
    with tensorboard(folder, load_fast) as server:
        server.wait_for("runs", lambda answer: count_steps(answer) == 2 * len(RUNS))
        yield server


def lines():
    """Blocks of modules and operators with names that a line of a trace can hold."""
    modules = [SCRIPT, IMAGE, "../../up", LONG, "{{constructor}}"]
    for number, name in enumerate(modules):
        key = name.replace(" ", "\u00a0")
        yield f"alloc {6000 + number} a{number} module={key} operator={key} category=activation phase=forward"
    yield "step 2"
    yield f"alloc 9000 z module={SCRIPT} operator={SCRIPT} category=temporary phase=backward"


def test_names_are_shown_as_text_in_every_view(hostile, open_tab):
    tab = open_tab(hostile.url).open("overview", run=RUNS[0], step=1)
    for view in ("overview", "timeline", "modules", "compare"):
        tab(f"tab-{view}").click()
        tab(f"view-{view}").wait_for()
        check(tab)
    tab.open_anew("modules", run=RUNS[0], step=1, fold="off", shape="flat")
    expect(tab("module-row").filter(has_text=SCRIPT)).to_have_count(1)
    texts = tab("module-row").locator("th").all_text_contents()
    assert any("../../up" in text for text in texts)
    assert max(map(len, texts)) < 400
    for run in RUNS:
        tab.pick("run", run)
        expect(tab("picker-run")).to_have_attribute("title", run)
        assert tab.picked()["worker"].startswith(SCRIPT[:16])
        check(tab)


def check(tab):
    """Nothing runs, nothing opens (`open_tab` looks for dialogs), nothing breaks out of the page."""
    tab.settle()
    assert tab.frame.locator("main script, header script, img, [onerror]").count() == 0
    widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
    assert widths[0] <= widths[1]
    assert len(tab.page.frames) == 2
