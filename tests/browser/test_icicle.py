"""Modules as an icicle: every bar stands where the recording puts it, and tells its bytes exactly."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tb_memplugin.analysis.modules import module_table
from tb_memplugin.trace import Category
from tests.browser.recorded import recorded
from tests.browser.tab import bytes_in, colors

LEVEL = 28
"""Pixels of a level."""

CHOSEN = {"run": "baseline", "worker": "rank0", "step": 2, "shape": "icicle"}


@pytest.fixture
def there(logdir):
    """Key -> bytes by category at the peak, all inside a module included; in the model's order."""
    found = recorded(logdir)
    row = found.trace.step_row(found.step)
    table = module_table(found.trace, 0, row, found.stats.peak_event, with_highest=True)
    keys = [found.trace.modules[module].key for module in table.rows.tolist()]
    return dict(zip(keys, table.inclusive.tolist(), strict=True))


def ready(tab, **route):
    tab.open_anew("modules", **{**CHOSEN, **route})
    tab("icicle-canvas").wait_for()
    tab.settle()
    return tab


def point(tab, share, level):
    box = tab("icicle-canvas").bounding_box()
    assert box is not None
    return box["x"] + share * box["width"], box["y"] + level * LEVEL + 9


def hover(tab, share, level, key):
    """The tip of the bar there, which must be the one with this key."""
    tab.page.mouse.move(*point(tab, share, level))
    expect(tab("icicle-tip")).to_have_attribute("data-id", key)
    return tab("icicle-tip")


def told(tip):
    """The bytes that a tip tells, and their parts."""
    parts = tip.locator("dl > div").evaluate_all("rows => rows.map((row) => row.innerText.split('\\n'))")
    whole = tip.locator(".tip-bytes").inner_text().partition(" · ")[2]
    return bytes_in(whole), {name.strip(): bytes_in(size) for name, size in parts}


def by_category(row):
    return {Category(at).key.replace("_", " "): size for at, size in enumerate(row) if size}


def test_every_bar_stands_where_the_recording_puts_it_and_tells_its_bytes(tab, there):
    ready(tab, fold="off")
    whole = sum(sum(row) for key, row in there.items() if key == "" or not _is_module(key))
    assert told(hover(tab, 0.5, 0, ""))[0] == whole
    at = _left(there, "blocks")
    for layer in range(4):
        key = f"blocks.{layer}"
        size = sum(there[key])
        assert told(hover(tab, (at + size / 2) / whole, 3, key)) == (size, by_category(there[key]))
        at += size
    canvas = colors(tab("icicle-canvas"))
    assert max(canvas.values()) > 10_000


def _is_module(key):
    return not key.startswith(("outside:", "("))


def _left(there, key):
    """What stands left of a module of the root: its brothers before it."""
    before = [name for name in list(there)[: list(there).index(key)] if _is_module(name) and name]
    return sum(sum(there[name]) for name in before if "." not in name)


def test_folded_layers_are_one_bar_with_the_sum_of_all_and_zoom_goes_in_and_out(tab, there):
    ready(tab)
    expect(tab("icicle-canvas")).to_have_attribute("data-levels", "5")
    canvas = tab("icicle-canvas")
    canvas.focus()
    outermost = [key for key in there if key and "." not in key and _is_module(key)]
    for key in ("", "(root)", outermost[0]):
        tab.page.keyboard.press("ArrowDown")
        expect(tab("icicle-tip")).to_have_attribute("data-id", key)
    for key in outermost[1 : outermost.index("blocks") + 1]:
        tab.page.keyboard.press("ArrowRight")
        expect(tab("icicle-tip")).to_have_attribute("data-id", key)
    size, parts = told(tab("icicle-tip"))
    layers = [f"blocks.{layer}" for layer in range(4)]
    assert size == sum(parts.values()) == sum(sum(there[key]) for key in layers)
    tab.page.keyboard.press("Enter")
    expect(tab("icicle-zoomed")).to_have_text("blocks ×4")
    size, parts = told(hover(tab, _middle(there, "mlp"), 3, "blocks.*.mlp"))
    assert size == sum(sum(there[f"{key}.mlp"]) for key in layers)
    assert sum(parts.values()) == size
    tab.page.mouse.click(*point(tab, _middle(there, "mlp"), 3))
    expect(tab("icicle-zoomed")).to_have_text("mlp ×4")
    tab.wait_until(lambda: "inside=blocks.*.mlp" in tab.page.url, "the zoom in the address")
    tab.page.reload()
    expect(tab("icicle-zoomed")).to_have_text("mlp ×4")
    tab("icicle-way").last.click()
    expect(tab("icicle-zoomed")).to_have_text("blocks ×4")
    tab("icicle-canvas").focus()
    tab.page.keyboard.press("Escape")
    expect(tab("icicle-zoomed")).to_have_text("all memory")


def _middle(there, part):
    """The middle of a part of all layers, as a share of the layers' width."""
    parts = [key.partition(".")[2].partition(".")[2] for key in there if key.startswith("blocks.0.")]
    size = {name: sum(sum(there[f"blocks.{layer}.{name}"]) for layer in range(4)) for name in parts}
    before = sum(size[name] for name in parts[: parts.index(part)] if "." not in name)
    return (before + size[part] / 2) / sum(sum(there[f"blocks.{layer}"]) for layer in range(4))


def test_a_filter_marks_what_it_finds_and_dims_the_rest(tab):
    ready(tab, fold="off")
    before = colors(tab("icicle-canvas")).get(_match(tab), 0)
    tab("module-filter").fill("blocks.*.attn")
    expect(tab("modules-sum")).to_contain_text("4 rows match")
    tab.wait_until(lambda: colors(tab("icicle-canvas")).get(_match(tab), 0) > before + 100, "the marks")


def _match(tab):
    found = tab("icicle-canvas").evaluate(
        "(canvas) => getComputedStyle(canvas).getPropertyValue('--flame-match').trim()"
    )
    return tuple(int(found[at : at + 2], 16) for at in (1, 3, 5))
