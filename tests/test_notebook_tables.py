"""Tables for notebooks: exact sizes in their titles, and text that stays text."""

from __future__ import annotations

import re

from tb_memplugin.analysis import Part, advice, compare, moment
from tb_memplugin.notebook import table_html
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tests.traces import trace

SMALL = trace("start 4096 w category=parameter", "alloc 8192 a category=activation")


def shown(result: AnalysisResult) -> str:
    return result._repr_html_() or ""


def test_sizes_have_one_unit_and_bars_for_their_share_of_the_largest() -> None:
    html = table_html(moment(SMALL, 0, 0).parts("category"))
    assert re.findall(r'title="([\d,]+) B">([\d.]+)<', html) == [("8,192", "8.00"), ("4,096", "4.00")]
    assert ">KiB</th>" in html
    assert re.findall(r"transparent ([\d.]+)%", html) == ["100.0", "50.0"]


def test_hostile_names_stay_text() -> None:
    html = table_html(ResultTable([Part("</td><script>alert(1)</script>\x1b", 1, 1)]))
    assert "<script" not in html
    assert "\x1b" not in html


def test_advice_that_finds_nothing_says_what_was_judged() -> None:
    assert re.fullmatch(r"<p>No problem found; \d+ rules could not be judged</p>", shown(advice(SMALL)))


def test_rows_that_are_not_shown_are_counted() -> None:
    html = table_html(ResultTable([Part(str(number), 1, 1) for number in range(130)]))
    assert html.count("<tr>") == 101
    assert "<p>30 more</p>" in html


def test_traces_moments_tables_and_comparisons_are_shown() -> None:
    state = moment(SMALL, 0, 0)
    assert shown(SMALL).startswith("<iframe ")
    assert shown(state).startswith("<p>cpu: 12.00 KiB in step 0, after event 0 (other)</p><table>")
    assert "<iframe " in shown(state)  # the report opens at the peak
    assert "<iframe " not in shown(moment(SMALL, 0, -1))
    assert shown(compare(SMALL, SMALL)[0]).startswith(
        "<p>cpu: 12.00 KiB at the peak, then cpu: 12.00 KiB</p>"
    )
    assert state.parts("category")[0]._repr_html_() is None
    assert table_html(ResultTable()) == "<p>(nothing)</p>"
