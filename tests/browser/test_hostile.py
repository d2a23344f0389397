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
RUNS = [IMAGE, "javascript:alert(1)", 'b%2e%2e"&amp;#x']
"""Folders too. Without quote or control characters: TensorBoard 2.21's Rust server cannot read such runs."""
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


@pytest.mark.parametrize("run", RUNS)
def test_names_are_shown_as_text_in_every_view(hostile, open_tab, run):
    tab = open_tab(hostile.url)
    for view in ("overview", "timeline", "modules", "compare"):
        tab.open(view, run=run, step=1) if view == "overview" else tab.open_anew(view, run=run, step=1)
        tab.settle()
        assert tab.frame.locator("main script, header script, img, [onerror]").count() == 0
        widths = tab.frame.locator("html").evaluate("(page) => [page.scrollWidth, page.clientWidth]")
        assert widths[0] <= widths[1]
    tab.open_anew("modules", run=run, step=1, fold="off")
    texts = tab("module-row").locator("th").all_text_contents()
    assert any(SCRIPT in text for text in texts)
    assert any("../../up" in text for text in texts)
    assert max(map(len, texts)) < 400
    expect(tab("picker-worker").locator("option")).to_contain_text([SCRIPT[:20]])
    assert tab.picked()["worker"].startswith(f"{SCRIPT}⏎../")
    assert len(tab.page.frames) == 2
