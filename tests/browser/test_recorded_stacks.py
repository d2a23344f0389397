"""Stacks of a training that the handler recorded with the profiler's `with_stack=True`."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.analysis.lines import line_table
from tb_memplugin.analysis.stacks import flame, stack_table
from tb_memplugin.store.reader import load_window
from tests.browser.conftest import FAST, HAS_RUST, SLOW, count_steps, watched
from tests.browser.stacked_runs import SIDE, record_live
from tests.browser.tab import exact
from tests.browser.test_stacks import peak_of, ready, rows
from tests.tensorboard.process import tensorboard


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    record_live(folder / "live")
    return folder


@pytest.fixture(scope="module")
def there(logdir):
    return load_window(str(logdir / "live" / SIDE))


@pytest.fixture(scope="module")
def server(logdir):
    with tensorboard(logdir, FAST if HAS_RUST else SLOW) as running:
        running.wait_for("runs", lambda answer: count_steps(answer) == 1)
        yield running


@pytest.fixture
def tab(server, kept_tabs):
    yield from watched(kept_tabs(server.url))


@pytest.mark.parametrize("frames", ["folded", "all", "user"])
def test_the_flame_has_the_levels_of_the_analysis(tab, there, frames, tmp_path):
    ready(tab, run="live", frames=frames)
    tree = flame(stack_table(there, 0, peak_of(there)), frames)
    levels = max(len(tree.path(node)) for node in range(len(tree.runs)))
    expect(tab("flame-canvas")).to_have_attribute("data-levels", str(levels))
    tab.page.screenshot(path=tmp_path / "stacks.png", animations="disabled")
    assert (tmp_path / "stacks.png").stat().st_size > 20_000


def test_the_table_sums_to_the_peak_and_what_was_alive_before_has_no_stack(tab, there):
    ready(tab, run="live")
    peak = peak_of(there)
    table = stack_table(there, 0, peak)
    assert [size for _, size in rows(tab, "stack-row")] == [row.bytes for row in table]
    assert exact(tab("stacks-sum")) == there.live(0)[peak + 1] == sum(row.bytes for row in table)
    blocks = there.allocations
    alive = blocks.alive_at(peak, 0)
    before = blocks.bytes[alive[alive < len(there.start)]].sum()
    assert sum(row.bytes for row in table if not row.frames) == before > 0


def test_a_shape_keeps_its_distance_from_the_line_before_it(tab):
    ready(tab, run="live")
    shapes = tab("stack-row").locator(".fold > .approx")
    gaps = shapes.evaluate_all(
        """all => all
          .map((shape) => [shape, shape.previousSibling].map((part) => part.getBoundingClientRect()))
          .map(([shape, line]) => shape.x - line.right)"""
    )
    assert min(gaps) >= 6


def test_a_row_of_backward_opens_to_the_frames_of_the_forward_too(tab, there):
    ready(tab, run="live")
    assert any(
        "forward_pass" in frame for row in stack_table(there, 0, peak_of(there)) for frame in row.forward
    )
    for row in tab("stack-row").all():
        row.get_by_role("button").click()
    forward = tab("stack-frames").filter(has_text="run_backward").filter(has_text="forward_pass")
    expect(forward.first).to_be_visible()


def test_lines_are_those_of_the_program(tab, there):
    ready(tab, run="live", table="lines")
    wanted = {row.key: row.bytes for row in line_table(there, 0, peak_of(there))}
    assert dict(rows(tab, "line-row")) == wanted
    assert any("stacked_runs.py" in key and "forward_pass" in key for key in wanted)
