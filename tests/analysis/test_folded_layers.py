"""One table of cases for the two that fold layers: this package and, in frontend/tests/state, the page."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tb_memplugin.analysis.folded_layers import layer_paths

CASES = json.loads(Path(__file__).with_name("folded_layers.json").read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"])
def test_layers_that_repeat_share_a_row(case):
    rows = [path.folded for path in layer_paths(case["keys"])]
    times = Counter(rows)
    assert [row if times[row] > 1 else key for row, key in zip(rows, case["keys"], strict=True)] == case[
        "rows"
    ]
