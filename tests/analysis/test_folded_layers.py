"""One table of cases for the two that fold layers: this package and, in frontend/tests/state, the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tb_memplugin.analysis.folded_layers import _LONGEST_NUMBER, LayerPath, folds, layer_paths

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


def test_the_path_of_what_does_not_repeat_has_a_step_for_each_part():
    assert layer_paths(["encoder.norm", "outside:aten::add.out"]) == [
        LayerPath(("encoder", "norm"), (None, None)),
        LayerPath(("outside:aten::add.out",), (None,)),
    ]


def test_a_number_right_after_another_is_a_step_of_its_own():
    keys = [f"blocks.{outer}.{inner}.up" for outer in range(4) for inner in range(4)]
    assert layer_paths(keys)[-1] == LayerPath(("blocks.*", "*", "up"), (3, 3, None))


@pytest.mark.parametrize(("digits", "rows"), [(_LONGEST_NUMBER, 1), (_LONGEST_NUMBER + 1, 4)])
def test_longer_numbers_are_names(digits, rows):
    keys = [f"layers.{10 ** (digits - 1) + layer}.up" for layer in range(4)]
    assert len({*folds(keys).values()}) == rows
