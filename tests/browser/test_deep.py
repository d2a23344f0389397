"""Modules many levels deep: every row can be read and opened, and what is not drawn is said."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import count_steps
from tests.tensorboard.process import tensorboard
from tests.traces import trace

LEVELS = 30
KEYS = [".".join(["inner"] * (level + 1)) for level in range(LEVELS)]
"""inner, inner.inner, ...: each holds 1000 bytes, and calls the next."""

CODERS = [f"{name}coder_{'x' * 60}" for name in ("en", "de")]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    lines = (
        f"alloc 1000 a{n} module={key} category=activation phase=forward"
        for n, key in enumerate([*KEYS, *CODERS])
    )
    calls = [(key, n, LEVELS - 1, "forward") for n, key in enumerate(KEYS)]
    RunWriter(str(folder / "run"), "rank0").write(trace("step 1", *lines, calls=calls))
    with tensorboard(folder) as server:
        server.wait_for("runs", lambda answer: count_steps(answer) == 1)
        yield server


def test_a_row_of_any_depth_has_a_name_that_can_be_read_and_clicked(deep, open_tab):
    tab = open_tab(deep.url).open("modules", run="run", step=1, find=KEYS[0])
    expect(tab("module-row")).to_have_count(LEVELS)
    names = (
        tab("module-row")
        .locator("th .name")
        .evaluate_all(
            """names => names.map((name) => {
            const { left, right } = name.getBoundingClientRect();
            return [right - left, name.closest("th").getBoundingClientRect().right - right];
        })"""
        )
    )
    assert [width for width, room in names if width < 30 or room < 0] == []


def test_where_there_is_little_room_names_keep_the_first_letters_in_which_they_differ(deep, open_tab):
    tab = open_tab(deep.url)
    tab.page.set_viewport_size({"width": 390, "height": 844})
    tab.open("modules", run="run", step=1, find="coder_")
    heads = tab("module-row").locator("th .head")
    expect(heads).to_have_count(2)
    assert min(heads.evaluate_all("heads => heads.map((head) => head.clientWidth)")) > 20


def test_lanes_that_are_not_drawn_are_counted(deep, open_tab):
    tab = open_tab(deep.url).open("timeline", run="run", step=1)
    expect(tab("deeper-lanes")).to_have_text("The outermost 8 of 30 levels of modules are drawn.")


def test_half_a_level_at_the_bottom_of_the_icicle_says_that_there_is_more(deep, open_tab):
    tab = open_tab(deep.url).open("modules", run="run", step=1, fold="off", shape="icicle")
    canvas = tab("icicle-canvas")
    expect(canvas).to_have_attribute("data-levels", str(LEVELS + 1))
    box = canvas.bounding_box()
    assert box is not None
    assert box["height"] == 21.5 * 28
