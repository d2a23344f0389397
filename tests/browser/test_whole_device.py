"""Overview: bars and a table of what fills the whole device."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import DevicePart, Moment, WholeDevice
from tb_memplugin.trace.counters import parts_of
from tests.browser.conftest import FAST, watched
from tests.tensorboard.process import tensorboard
from tests.traces import trace

GIB = 1 << 30


def wholes():
    """80 GiB: 20, 40 and 30 of them allocated by PyTorch, of 50 reserved; 1 of the context, 3 of others."""
    rest = {DevicePart.CONTEXT: GIB, DevicePart.OTHER_PROCESSES: 3 * GIB, DevicePart.FREE: 24 * GIB}
    for moment, allocated in ((Moment.START, 20), (Moment.PEAK, 40), (Moment.END, 30)):
        of_pytorch = {DevicePart.ALLOCATED: allocated * GIB, DevicePart.CACHED: (50 - allocated) * GIB}
        read_at = Moment.END if moment is Moment.PEAK else moment
        yield WholeDevice(0, moment, read_at, parts_of(80 * GIB, {**of_pytorch, **rest}))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    event = f"alloc {40 * GIB} a device=cuda:0"
    recorded = {"read": tuple(wholes()), "old": ()}
    for name, whole_devices in recorded.items():
        RunWriter(str(folder / name), "rank0").write(trace("step 1", event, whole_devices=whole_devices))
    with tensorboard(folder, FAST) as server:
        server.wait_for("runs", lambda answer: len(answer["runs"]) == 2)
        yield server


@pytest.fixture
def tab(running, kept_tabs):
    yield from watched(kept_tabs(running.url))


def cells(row):
    return row.locator("th, td").all_text_contents()


def test_the_parts_of_each_moment_sum_to_the_whole(tab):
    tab.open_anew(run="read", worker="rank0")
    rows = tab("whole-part")
    expect(rows).to_have_count(6)
    assert list(map(cells, rows.all())) == [
        ["allocated by PyTorch, with rounding", "20.00", "40.00", "30.00"],
        ["reserved by PyTorch, not allocated", "30.00", "10.00", "20.00"],
        ["CUDA context and libraries", "1.00", "1.00", "1.00"],
        ["other processes", "3.00", "3.00", "3.00"],
        ["not known", "2.00", "2.00", "2.00"],
        ["free", "24.00", "24.00", "24.00"],
    ]
    assert cells(tab("whole-total")) == ["sum: the whole device", "80.00", "80.00", "80.00"]
    expect(tab("whole-device")).to_contain_text("at the peak (what is not PyTorch's: at the window's end)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_bar_is_as_wide_as_its_bytes_in_both_themes(tab, theme):
    query = f"?darkMode={'true' if theme == 'dark' else 'false'}"
    tab.open(query=query, run="read", worker="rank0")
    bar = tab("whole-device").locator(".whole-bar").nth(1).locator(".fill")
    expect(bar).to_be_visible()
    full = bar.bounding_box()["width"]
    for part, share in {"allocated": 40 / 80, "other_processes": 3 / 80, "free": 24 / 80}.items():
        piece = bar.locator(f"[data-part={part}]")
        assert piece.bounding_box()["width"] == pytest.approx(share * full, abs=1)
        assert piece.evaluate("piece => getComputedStyle(piece).backgroundColor") != "rgba(0, 0, 0, 0)"
    free = bar.locator("[data-part=free]")
    assert free.get_attribute("title") == "free: 24.00 GiB, 30.0 %"


def test_a_recording_of_an_older_version_has_no_bar(tab):
    tab.open_anew(run="old", worker="rank0")
    expect(tab("headline")).to_be_visible()
    expect(tab("whole-device")).to_have_count(0)
