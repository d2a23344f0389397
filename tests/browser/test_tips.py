"""Words beside the pointer stay in sight where box or window end."""

from __future__ import annotations

import pytest

from tb_memplugin.store.writer import RunWriter
from tests.browser.conftest import count_steps
from tests.tensorboard.process import tensorboard
from tests.traces import trace

CHARTS = [
    ("modules", "icicle", {"fold": "off", "shape": "icicle"}, 13),
    ("timeline", "lanes", {}, 13),
    ("allocations", "bands", {}, 60),
]
"""View, what its test ids begin with, its state, and how far above its lower edge something is drawn."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A step in which one module, whose name is long, holds all there is."""
    folder = tmp_path_factory.mktemp("tips")
    key = "inner_" * 12
    line = f"alloc 1000 a module={key} category=activation phase=forward"
    made = trace("step 1", line, "alloc 1 b", "alloc 1 c", calls=[(key, 0, 2, "forward")])
    RunWriter(str(folder / "run"), "rank0").write(made)
    with tensorboard(folder) as server:
        server.wait_for("runs", lambda answer: count_steps(answer) == 1)
        yield server


@pytest.mark.parametrize(("view", "chart", "state", "drawn"), CHARTS)
def test_a_tip_is_above_the_pointer_at_the_lower_edge_and_left_of_it_at_the_right(
    server, open_tab, view, chart, state, drawn
):
    """The pointer is 5 pixels from the lower edge of the window, and 25 from the chart's right one."""
    tab = open_tab(server.url)
    tab.page.set_viewport_size({"width": 700, "height": 400})
    tab.open(view, run="run", step=1, **state)
    canvas = tab(f"{chart}-canvas")
    canvas.wait_for()
    tab.settle()
    canvas.evaluate(
        "(canvas, below) => scrollBy(0, canvas.getBoundingClientRect().bottom - innerHeight - below)",
        drawn - 5,
    )
    box = canvas.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] - 25, 395
    tab.page.mouse.move(x, y)
    tip = tab(f"{chart}-tip").bounding_box()
    assert tip is not None
    assert tip["y"] + tip["height"] < y
    assert box["x"] <= tip["x"] <= box["x"] + box["width"] - tip["width"] + 1
