"""Every sum that a view prints is the sum of its rows, to the byte: read off the titles in the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.tab import Tab, bytes_in


@dataclass(frozen=True)
class Sum:
    """Cells (CSS, each with exact bytes in its title) that sum to another one."""

    view: str
    whole: str
    parts: str


def row(testid: str, cell: str = "td.number[title*=bytes]:first-of-type") -> str:
    return f"[data-testid={testid}] {cell}"


SUMS = (
    Sum("overview", "[data-testid=card-peak] .amount", row("category-row", "td[title]")),
    Sum("overview", "[data-testid=category-sum]", row("category-row", "td[title]")),
    Sum(
        "overview",
        "[data-testid=module-sum]",
        f"tr:not(.inner)[data-testid=module-row] td.number[title], {'[data-testid=module-rest]'}",
    ),
    Sum(
        "timeline",
        "[data-testid=moment-panel] .big",
        "[data-testid=moment-row] td[title], [data-testid=moment-rest] td[title]",
    ),
    Sum("modules", "[data-testid=modules-sum]", "[data-depth='0'] td.number.heat:nth-of-type(2)"),
    Sum("stacks", "[data-testid=stacks-sum]", row("stack-row", "td.strong[title]")),
    Sum("stacks", "[data-testid=stacks-sum]", row("division-row", "td.strong[title]")),
    Sum("allocator", "[data-testid=allocator-panel] .big", row("allocator-part", "td[title]")),
    Sum("allocator", "[data-testid=free-blocks] h2", row("free-row", "td[title]")),
    Sum(
        "allocator",
        "[data-testid=pool-sum] [data-column=reserved_bytes]",
        row("pool-row", "[data-column=reserved_bytes]"),
    ),
    Sum(
        "allocator",
        "[data-testid=pool-sum] [data-column=allocated_bytes]",
        row("pool-row", "[data-column=allocated_bytes]"),
    ),
    Sum("compare", "[data-testid=delta-sum]", "[data-testid=compare-row] .amount[title]"),
)


def told(tab: Tab, css: str) -> list[int]:
    titles = tab.frame.locator(css).evaluate_all("cells => cells.map((cell) => cell.title)")
    return [bytes_in(title) for title in titles]


def wrong_sums(tab: Tab, view: str) -> list[str]:
    """Those of the open view that its rows do not make; a view may lack some of them."""
    found = []
    for one in (one for one in SUMS if one.view == view):
        wholes, parts = told(tab, one.whole), told(tab, one.parts)
        if wholes and parts and sum(parts) != wholes[0]:
            found.append(f"{one.whole}: {wholes[0]:,}, and {one.parts}: {sum(parts):,} in {len(parts)}")
    return found


PLACES: list[tuple[str, dict[str, Any]]] = [
    ("overview", {}),
    ("timeline", {}),
    ("timeline", {"by": "module"}),
    ("timeline", {"by": "module", "fold": "off"}),
    ("timeline", {"by": "module", "opened": "blocks.*.mlp", "span": "window"}),
    ("timeline", {"by": "operator"}),
    ("modules", {}),
    ("modules", {"shape": "flat"}),
    ("stacks", {}),
    ("compare", {"what": "category"}),
    ("compare", {"what": "module"}),
]


@pytest.mark.parametrize(("view", "route"), PLACES, ids=lambda part: str(part))
def test_what_a_view_says_it_sums_to_is_what_its_rows_sum_to(tab, view, route):
    tab.open_anew(view, run="baseline", worker="rank0", step=6, **route)
    if view == "timeline":
        expect(tab("moment-panel")).to_have_attribute("data-exact", "true")
    tab.settle()
    mine = [one for one in SUMS if one.view == view]
    assert any(told(tab, one.whole) and told(tab, one.parts) for one in mine) or view == "stacks"
    assert wrong_sums(tab, view) == []


def test_an_open_modules_rows_sum_to_it(tab):
    tab.open_anew("modules", run="baseline", worker="rank0", step=6)
    tab("module-own").wait_for()
    whole = told(tab, "[data-testid=module-row][data-depth='0'][data-key=''] td.number:nth-of-type(2)")
    inside = told(tab, "[data-depth='1'] td.number:nth-of-type(2)")
    assert len(inside) > 3
    assert sum(inside) == whole[0]
