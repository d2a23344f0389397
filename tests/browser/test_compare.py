"""Compare: two steps side by side; every delta and status is the analysis's, and they sum to the change."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

import pytest
from playwright.sync_api import expect

from tb_memplugin.analysis.comparison import compare_parts
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace.tables import Spans, Step
from tests.browser.recorded import recorded
from tests.browser.tab import UNITS, bytes_in, colors, exact
from tests.recorded_program import program
from tests.traces import EPOCH, trace


def shown(tab):
    """Key -> (status, base, other, delta)."""
    rows = tab("compare-row").evaluate_all(
        """rows => rows.map((row) => [row.dataset.key, row.dataset.status,
            [...row.querySelectorAll("td.number")].map((cell) => cell.title || cell.firstChild.title)])"""
    )
    return {key: (status, *map(bytes_in, cells)) for key, status, cells in rows}


def wanted(base, other, by):
    deltas = compare_parts(base.state().parts(by), other.state().parts(by))
    return {row.key: (row.status, row.base_bytes, row.other_bytes, row.delta_bytes) for row in deltas}


def ready(tab, **route):
    sides = {"run": "checkpointed", "step": 2, "base_run": "baseline", "base_worker": "rank0", "base_step": 2}
    tab.open_anew("compare", **{**sides, **route})
    tab("compare-row").first.wait_for()
    return tab


@pytest.mark.parametrize("by", ["category", "module", "operator"])
def test_two_runs_differ_as_their_recordings_do(each_tab, logdir, by):
    base, other = recorded(logdir, "baseline"), recorded(logdir, "checkpointed")
    ready(each_tab, what=by, fold="off")
    expect(each_tab(f"what-{by}")).to_have_attribute("aria-pressed", "true")
    rows, there = shown(each_tab), wanted(base, other, by)
    assert len(rows) > 4
    assert rows == {key: there[key] for key in rows}  # of a long table, the rows in sight
    delta = other.stats.peak_bytes - base.stats.peak_bytes
    assert delta < 0
    assert sum(row[3] for row in there.values()) == delta == exact(each_tab("delta-sum"))
    assert abs(delta) == abs(exact(each_tab("headline").locator(".amount")))
    expect(each_tab("headline")).to_contain_text("below")


AMOUNT = re.compile(r"([+−])([0-9.]+) (B|KiB|MiB)")


@pytest.mark.parametrize("testid", ["compare-detail", "reasons-category"])
def test_words_say_why_a_step_takes_less_and_sum_to_it(tab, logdir, testid):
    """Recomputing in backward keeps fewer activations of forward."""
    base, other = recorded(logdir, "baseline"), recorded(logdir, "checkpointed")
    ready(tab)
    words = tab(testid)
    expect(words).to_contain_text(re.compile("Smaller: .*activation"))
    signed = [
        (1 if sign == "+" else -1) * float(size) * UNITS[unit]
        for sign, size, unit in AMOUNT.findall(words.inner_text())
    ]
    assert 2 <= len(signed) <= 5
    assert sum(signed) == pytest.approx(
        other.stats.peak_bytes - base.stats.peak_bytes, abs=0.03 * UNITS["MiB"]
    )


STACKS = {
    name: (f"{name} /work/model.py:{line}", "main train.py:3")
    for name, line in (("up", 1), ("act", 2), ("norm", 3))
}


def test_words_name_the_source_lines_and_sum_to_the_change(open_tab, start_tensorboard, tmp_path):
    """4 MiB of `act` are gone, `up` takes 4 MiB less, and 1 MiB of `norm` is new: 7 MiB less."""
    plain = program(f"alloc {4 << 20} a at=act", f"alloc {6 << 20} b at=up", stacks=STACKS)
    less = program(f"alloc {2 << 20} b at=up", f"alloc {1 << 20} c at=norm", stacks=STACKS)
    RunWriter(str(tmp_path / "plain"), "rank0").write(plain)
    RunWriter(str(tmp_path / "less"), "rank0").write(less)
    server = start_tensorboard(tmp_path)
    server.wait_for("runs", lambda answer: len(answer["runs"]) == 2)
    tab = open_tab(server.url).open("compare", run="less", base_run="plain")
    expect(tab("headline")).to_contain_text("Recording less peaks 7.00 MiB (70.0 %) below recording plain.")
    expect(tab("reasons-line")).to_have_text(
        "By source line: Gone: act model.py:2 −4.00 MiB. Smaller: up model.py:1 −4.00 MiB. "
        "New: norm model.py:3 +1.00 MiB."
    )
    tab("swap").click()
    expect(tab("reasons-line")).to_have_text(
        "By source line: New: act model.py:2 +4.00 MiB. Larger: up model.py:1 +4.00 MiB. "
        "Gone: norm model.py:3 −1.00 MiB."
    )


def test_the_other_way_round_every_sign_and_status_turns(tab, logdir):
    base, other = recorded(logdir, "checkpointed"), recorded(logdir, "baseline")
    ready(tab, run="baseline", base_run="checkpointed", what="category")
    assert shown(tab) == wanted(base, other, "category")
    assert {"added", "removed"} & {row[0] for row in shown(tab).values()}
    expect(tab("headline")).to_contain_text("above")


def test_the_sides_can_be_swapped(tab, logdir):
    base, other = recorded(logdir, "checkpointed"), recorded(logdir, "baseline")
    ready(tab, what="category")
    tab("swap").click()
    expect(tab("headline")).to_contain_text("Step 2 of baseline peaks")
    expect(tab("picker-base")).to_have_text("step 2 of checkpointed")
    tab.settle()
    assert shown(tab) == wanted(base, other, "category")
    tab("swap").click()
    expect(tab("headline")).to_contain_text("Step 2 of checkpointed peaks")


def test_both_sides_say_in_one_unit_how_long_they_took(open_tab, start_tensorboard, tmp_path):
    """Steps of 14 and 12 events, one every 80 ms: 1.12 s and 0.96 s."""
    blocks = [(f"alloc 100 a{n}", f"free a{n}") for n in range(13)]
    made = trace("step 0", *chain(*blocks[:7]), "step 1", *chain(*blocks[7:]))
    slow = replace(made.events, time_ns=EPOCH + (made.events.time_ns - EPOCH) * 80_000)
    ends = [EPOCH + events * 80_000_000 for events in (0, 14, 26)]
    steps = tuple(Step(number, *ends[number : number + 2]) for number in (0, 1))
    RunWriter(str(tmp_path / "run"), "rank0").write(replace(made, events=slow, steps=steps, phases=Spans()))
    server = start_tensorboard(tmp_path)
    server.wait_for("runs", lambda answer: len(answer["runs"]) == 1)
    tab = open_tab(server.url).open("compare", run="run", step=1, base_step=0)
    for side, took in enumerate(("1.12 s", "0.96 s")):
        expect(tab.frame.locator(".pair h2").nth(side)).to_contain_text(f"took {took}")


def test_only_rows_that_have_a_category_get_a_column_of_them(tab):
    ready(tab, what="module")
    head = tab.frame.get_by_role("columnheader", name="category")
    expect(head).to_have_count(1)
    tab("what-phase").click()
    expect(tab("compare-row", key="forward")).to_be_visible()
    expect(head).to_have_count(0)


def test_what_to_compare_with_is_picked_in_the_page(tab, logdir):
    tab.open_anew("compare", run="baseline", worker="rank0", step=6)
    expect(tab("picker-base")).to_have_text("step 5")
    tab("picker-base").click()
    tab("picker-base-run").select_option(label="checkpointed")
    expect(tab("picker-base")).to_have_text("step 6 of checkpointed")
    tab("picker-base-step").select_option(label="3")
    expect(tab("picker-base")).to_have_text("step 3 of checkpointed")
    delta = (
        recorded(logdir, step=6).stats.peak_bytes - recorded(logdir, "checkpointed", step=3).stats.peak_bytes
    )
    tab.wait_until(lambda: exact(tab("delta-sum")) == delta, "the delta of the new pair")
    tab("picker-base-reset").click()
    expect(tab("picker-base")).to_have_text("step 5")


def test_the_curves_stand_side_by_side_or_one_over_the_other(tab):
    ready(tab)
    expect(tab("curve-side")).to_have_count(2)
    for side in tab("curve-side").all():
        tab.wait_until(lambda canvas=side: len(colors(canvas)) > 4, "both curves")
    tab("curves-over").click()
    over = tab.frame.locator("canvas[data-testid=curves-over]")
    tab.wait_until(lambda: len(colors(over)) > 2, "the curves over one another")
    expect(tab("curve-side")).to_have_count(0)


def test_folds_that_were_opened_are_in_the_address(tab):
    ready(tab, what="module")
    fold = tab("compare-row", key="blocks.*.mlp.up").get_by_role("button")
    fold.click()
    tab("compare-row", key="blocks.3.mlp.up").wait_for()
    tab.wait_until(lambda: "opened=blocks.*.mlp.up" in tab.page.url, "the open fold in the address")
    tab.page.reload()
    tab("compare-row", key="blocks.3.mlp.up").wait_for()
    fold.click()
    expect(tab("compare-row", key="blocks.3.mlp.up")).to_have_count(0)
    tab.wait_until(lambda: "opened=" not in tab.page.url, "the closed fold gone from the address")


def test_only_what_changed_is_shown_on_demand(tab, logdir):
    ready(tab, what="category")
    there = wanted(recorded(logdir, "baseline"), recorded(logdir, "checkpointed"), "category")
    tab("only-changed").click()
    changed = {key: row for key, row in there.items() if row[0] != "same"}
    expect(tab("compare-row")).to_have_count(len(changed))
    assert shown(tab) == changed
