"""Overview: one line says how the window's bytes agree with the allocator's."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Cause, Counter, CounterReading, Moment
from tests.browser.conftest import FAST, watched
from tests.tensorboard.process import tensorboard
from tests.traces import trace

ALLOCATED = {"exact": 500, "missing": 625, "old": None}
"""What the allocator has at the peak, where each run has 500 bytes."""

RED = "rgb(200, 71, 43)"


@pytest.fixture(scope="module")
def accounts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accounts")
    for name, allocated in ALLOCATED.items():
        reading = CounterReading(
            0,
            Moment.PEAK,
            Counter.CALLS,
            allocated,
            causes=((Cause.UNSEEN, 100),) if name == "missing" else (),
        )
        counters = () if allocated is None else (reading,)
        RunWriter(str(folder / name), "rank0").write(trace("step 1", "alloc 500 a", counters=counters))
    return folder


@pytest.fixture(scope="module")
def running(accounts):
    with tensorboard(accounts, FAST) as server:
        server.wait_for("runs", lambda answer: len(answer["runs"]) == len(ALLOCATED))
        yield server


@pytest.fixture
def tab(running, kept_tabs):
    yield from watched(kept_tabs(running.url))


def test_what_is_missing_is_red_with_its_cause_and_its_numbers_on_hover(tab):
    tab.open_anew(run="missing", worker="rank0")
    line = tab("account")
    expect(line).to_have_text(
        "Account of the window: accounts for 80.00 % of the allocator's bytes: 125 B missing at the peak "
        "(100 B allocated or freed where the recorder does not see it; 25 B for no known reason)"
    )
    expect(line).to_have_css("color", RED)
    assert line.get_attribute("title") == "peak: 500 bytes recorded, 625 bytes by the counter"


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ("exact", "accounts for 100.00 % of the allocator's bytes"),
        ("old", "not recorded: no counter was read"),
    ],
)
def test_what_agrees_and_what_was_not_recorded_is_not_red(tab, run, text):
    tab.open_anew(run=run, worker="rank0")
    expect(tab("account")).to_contain_text(text)
    assert tab("account").evaluate("line => getComputedStyle(line).color") != RED
