"""What a view asks of the server: each thing once."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.browser.test_accessible import RUNS, VIEWS


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_asks_the_same_twice(tab, view):
    asked: Counter[str] = Counter()
    tab.open_anew("overview", **RUNS["baseline"])
    tab.settle()

    def count(request):
        if "/data/plugin/tb_memplugin/" in request.url:
            asked[request.url.partition("/data/plugin/tb_memplugin/")[2]] += 1

    tab.page.on("request", count)
    try:
        tab.open_anew(view, **RUNS["baseline"])
        tab.settle()
    finally:
        tab.page.remove_listener("request", count)
    answers = {path: times for path, times in asked.items() if not path.startswith("static/")}
    assert len(answers) >= 2
    assert {path: times for path, times in answers.items() if times > 1} == {}
