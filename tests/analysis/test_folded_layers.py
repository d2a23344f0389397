"""One table of cases for the two that fold layers: this package and, in frontend/tests/state, the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tb_memplugin.analysis.folded_layers import folds, shared_rows

CASES = json.loads(Path(__file__).with_name("folded_layers.json").read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"])
def test_layers_that_repeat_share_a_row(case):
    assert shared_rows(case["keys"]) == case["rows"]


def test_lists_within_layers_fold_by_the_same_rule():
    keys = ["stages.0.0.conv", "stages.0.1.conv", "stages.1.0.conv", "stages.1.1.conv", "net.0", "net.2"]
    assert list(folds(keys).values()) == [*["stages.*.*.conv"] * 4, "net.0", "net.2"]
