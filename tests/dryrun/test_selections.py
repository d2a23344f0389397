"""What both engines answer of masks and whole numbers, known or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tb_memplugin.dryrun.engine import ENGINES
from tb_memplugin.estimate.answer.script import read_program
from tb_memplugin.estimate.gpu_spec import GpuSpec

SELECTIONS = Path(__file__).with_name("selections.py")

# Of a known mask with two of four, one with none of 64, one that is decided to be none, and one not known.
ANSWERS = {
    "sum": [2, 0, 0, 64],
    "long sum": [2, 0, 0, 64],
    "long sum of rows": [1, 0, 0, 32],
    "several": [6, 0, 0, 192],
    "stacked": [3, 1, 1, 65],
    "cumsum": [2, 0, 0, 64],
    "count_nonzero": [2, 0, 0, 64],
    "nonzero": [2, 0, 0, 64],
    "argwhere": [2, 0, 0, 64],
    "where": [2, 0, 0, 64],
    "index": [2, 0, 0, 64],
    "masked_select": [2, 0, 0, 64],
    "largest selected": [2, 0, 0, 63],
    "unique": [2, 0, 0, 64],
    "unique of a mask": [2, 1, 1, 2],
    "bincount": [3, 0, 0, 64],
    "bincount of a mask": [2, 1, 1, 2],
    "repeat_interleave": [2, 0, 0, 64],
    "assigned": [4, 64, 64, 64],
    "filled": [4, 64, 64, 64],
    "range": [2, 0, 0, 64],
    "if any": [1, 0, 0, 1],
    "of true numbers": [1],
    "of many": [32768 * 64, 32768 * 64],
    "first": [3],  # an index that is chosen is 0
    "other": [0],
}


@pytest.mark.parametrize("engine", ["fake", "runtime"])
def test_what_a_mask_selects_and_counts(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    if engine == "runtime" and not torch.__version__.startswith("2.13.0+cu"):
        pytest.skip("needs PyTorch 2.13 with CUDA")
    ENGINES[engine](read_program([str(SELECTIONS)]), GpuSpec.named("h100"), steps=3)
    captured = capfd.readouterr()
    (line,) = [each for each in (captured.out + captured.err).splitlines() if each.startswith("ANSWERS")]
    assert json.loads(line.removeprefix("ANSWERS ")) == ANSWERS
