"""Modules: the tree is the recording's, its roots sum to the peak, and it sorts, folds and filters."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tb_memplugin.analysis.modules import module_table
from tb_memplugin.trace import Category
from tests.browser.recorded import recorded
from tests.browser.tab import assert_rounds, bytes_in, exact

GROUPS = {
    "parameters": {Category.PARAMETER, Category.BUFFER},
    "gradients": {Category.GRADIENT},
    "optimizer": {Category.OPTIMIZER_STATE},
    "activations": {Category.ACTIVATION, Category.AUTOGRAD_DETAIL, Category.RECOMPUTED},
    "temporaries": {Category.TEMPORARY, Category.WORKSPACE},
    "other": {Category.INPUT, Category.COMMUNICATION, Category.UNKNOWN},
}
COLUMNS = {
    "peak": ["bytes", *GROUPS, "in-forward", "in-backward", "allocations"],
    "highest": ["bytes", "when", *GROUPS, "in-forward", "in-backward", "allocations"],
}


def shown(tab, at="peak"):
    """Key -> the exact numbers of its row, None for a dash."""
    rows = tab("module-row").evaluate_all(
        """rows => rows.map((row) => [row.dataset.key, [...row.querySelectorAll("td.number")].map(
            (cell) => [cell.title, cell.innerText.trim()])])"""
    )
    return {key: dict(zip(COLUMNS[at], map(_number, cells), strict=False)) for key, cells in rows}


def _number(cell):
    title, text = cell
    if "bytes" in title:
        return bytes_in(title)
    if title.endswith(" ns"):
        return int(title.removesuffix(" ns").replace(",", ""))
    return None if text == "–" else int(text.replace(",", "")) if text.replace(",", "").isdigit() else text


def wanted(there, highest=False):
    """The same of every owner, from the analysis."""
    row = there.trace.step_row(there.step)
    table = module_table(there.trace, 0, row, there.stats.peak_event, with_highest=True)
    assert table.highest is not None
    assert table.highest_event is not None
    cells = table.highest if highest else table.inclusive
    start = there.trace.steps[row].start_ns
    found = {}
    for place, module in enumerate(table.rows.tolist()):
        key = there.trace.modules[module].key if module >= 0 else "(not named)"
        groups = {name: int(cells[place, sorted(group)].sum()) for name, group in GROUPS.items()}
        inside = [None if most < 0 else most for most in table.inside[place].tolist()]
        when = {"when": there.trace.time_of(int(table.highest_event[place])) - start} if highest else {}
        found[key] = {
            "bytes": int(cells[place].sum()),
            **when,
            **groups,
            **dict(zip(("in-forward", "in-backward"), inside, strict=True)),
            "allocations": int(table.allocations[place]),
        }
    return found


def ready(tab, **route):
    tab.open_anew("modules", **{"run": "baseline", "worker": "rank0", "step": 2, **route})
    tab("module-row").first.wait_for()
    return tab


@pytest.mark.parametrize("at", ["peak", "highest"])
def test_every_number_is_the_recordings(each_tab, logdir, at):
    there = wanted(recorded(logdir), highest=at == "highest")
    ready(each_tab, fold="off")
    if at == "highest":
        each_tab("at-highest").click()
        expect(each_tab("modules-caption")).to_contain_text("each module at its own highest moment in step 2")
    rows = shown(each_tab, at)
    assert len(rows) > 5
    assert rows == {key: there[key] for key in rows}


def test_nothing_is_shown_that_never_was(tab, logdir):
    """The sum of each category's own maximum was shown as memory that a step had; it was above the peak."""
    there = recorded(logdir)
    ready(tab, at="highest")
    folded = [row["bytes"] for row in shown(tab, "highest").values()]
    assert max(folded) <= there.stats.peak_bytes
    tab("shape-icicle").click()
    tab("icicle-canvas").wait_for()
    expect(tab("at")).to_have_count(0)
    expect(tab("icicle-canvas")).to_have_attribute(
        "aria-label", re.compile(f"{there.stats.peak_bytes:,} bytes")
    )


@pytest.mark.parametrize(("phase", "column"), [("forward", 0), ("backward", 1)])
def test_a_layers_highest_moment_in_a_phase_is_one_click_away(tab, logdir, phase, column):
    there = recorded(logdir)
    row = there.trace.step_row(there.step)
    table = module_table(there.trace, 0, row, there.stats.peak_event)
    keys = [there.trace.modules[module].key for module in table.rows.tolist() if module >= 0]
    place = keys.index("blocks.3.mlp")
    ready(tab, find="blocks.3.mlp")
    tab("module-row", key="blocks.3.mlp").get_by_test_id(f"in-{phase}").click()
    expect(tab("stretch-panel")).to_have_attribute("data-exact", "true")
    name = r"blocks\.3\.mlp$" if phase == "forward" else r"blocks\.3\.mlp.* \(backward\)$"
    expect(tab("stretch-panel").locator("h2")).to_have_text(re.compile(name))
    expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    highest = int(table.inside[place, column])
    assert exact(tab("stretch-highest")) == exact(tab("moment-panel").locator(".big")) == highest


def test_the_outermost_rows_sum_to_the_peak(each_tab, logdir):
    there = recorded(logdir)
    ready(each_tab)
    assert sum(
        row["bytes"]
        for key, row in shown(each_tab).items()
        if key in ("", "(not named)") or key.startswith("outside:")
    ) == (there.stats.peak_bytes)
    total = each_tab("modules-sum").inner_text().rpartition("sum to ")[2]
    assert_rounds(total, there.stats.peak_bytes)


def test_in_the_flat_list_every_row_counts_its_own_and_all_sum_to_the_peak(tab, logdir):
    there = recorded(logdir)
    ready(tab, fold="off")
    tab("shape-flat").click()
    expect(tab("modules-sum")).to_contain_text("all rows")
    rows = shown(tab)
    own = there.parts("module")
    assert {key: row["bytes"] for key, row in rows.items() if row["bytes"]} == {
        key: own[key] for key in rows if key in own
    }
    assert_rounds(tab("modules-sum").inner_text().rpartition("sum to ")[2], there.stats.peak_bytes)


@pytest.mark.parametrize("column", ["activations", "allocations"])
def test_a_click_on_a_column_sorts_by_it(tab, column):
    ready(tab, shape="flat", fold="off")
    tab(f"sort-{column}").click()
    head = tab(f"sort-{column}").locator("..")
    expect(head).to_have_attribute("aria-sort", "descending")
    values = [row[column] for row in shown(tab).values()]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]
    tab(f"sort-{column}").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    values = [row[column] for row in shown(tab).values()]
    assert values == sorted(values)


def test_a_filter_with_stars_finds_the_same_part_of_every_layer(tab, logdir):
    ready(tab, fold="off")
    tab("module-filter").fill("blocks.*.attn")
    expect(tab("modules-sum")).to_contain_text("4 rows match")
    layers = [f"blocks.{n}.attn" for n in range(4)]
    assert [key for key in sorted(tab.keys("module-row")) if key.endswith(".attn")] == layers
    assert not any("mlp" in key for key in tab.keys("module-row"))
    there = wanted(recorded(logdir))
    together = tab("modules-sum").inner_text().partition("match, ")[2].partition(" together")[0]
    assert_rounds(together, sum(there[key]["bytes"] for key in layers))
    tab("module-filter").fill("no such module")
    expect(tab("no-match")).to_be_visible()


def test_layers_unfold_and_fold_on_a_click(tab):
    ready(tab)
    row = tab("module-row", key="blocks").get_by_role("button")
    expect(row).to_contain_text("×4")
    expect(row).to_have_attribute("aria-expanded", "false")
    assert "blocks.0" not in tab.keys("module-row")
    row.click()
    expect(tab("module-row", key="blocks.3")).to_be_visible()
    tab.wait_until(lambda: "flipped=" in tab.page.url, "what is open in the address")
    address = tab.page.url
    inner = tab("module-row", key="blocks.3").get_by_role("button")
    inner.click()
    expect(tab("module-row", key="blocks.3.attn")).to_be_visible()
    tab.wait_until(lambda: tab.page.url != address, "both that are open in the address")
    tab.page.reload()
    tab("module-row", key="blocks.3.attn").wait_for()
    row.click()
    expect(tab("module-row", key="blocks.3")).to_have_count(0)


@pytest.mark.parametrize("shape", ["tree", "flat"])
def test_the_root_has_one_name_in_all_views_with_its_class_beside_it(tab, shape):
    ready(tab, shape=shape)
    row = tab("module-row", key="").locator("th")
    expect(row.locator(".name")).to_have_text("(root)")
    expect(row.locator(".class")).to_have_text("Transformer")


def test_the_colors_of_the_bars_have_names_below_and_no_column_is_cut(tab):
    tab.open_anew("modules", run="baseline", step=6)
    tab("module-row").first.wait_for()
    tab.settle()
    words = tab("module-row").locator(".bar").evaluate_all("bars => bars.map((bar) => bar.title)")
    drawn = {re.sub(r" (< )?[0-9.,]+ \w+$", "", part) for text in words for part in text.split(", ") if part}
    assert set(tab("category-key").locator("li").all_inner_texts()) == drawn != set()
    box = tab("module-table")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
