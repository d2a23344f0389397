"""One table of cases for the two that fold layers: this package and, in frontend/tests/state, the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tb_memplugin.analysis.folded_layers import LayerPath, folds, layer_paths

CASES = json.loads(Path(__file__).with_name("folded_layers.json").read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"])
def test_layers_that_repeat_share_a_row(case):
    assert [*map(folds(case["keys"]).get, case["keys"])] == case["rows"]


def test_twenty_thousand_experts_are_three_rows():
    keys = [
        f"layers.{layer}.experts.{expert}.{part}"
        for layer in range(52)
        for expert in range(128)
        for part in ("up", "gate", "down")
    ]
    assert {*folds(keys).values()} == {f"layers.*.experts.*.{part}" for part in ("up", "gate", "down")}
    assert layer_paths(keys)[-1] == LayerPath(("layers.*", "experts.*", "down"), (51, 127, None))
