"""Tests that a dry run knows the values of small tensors, and asks for all others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tb_memplugin import MemPluginError
from tb_memplugin.dryrun.engine import estimate_program
from tb_memplugin.dryrun.values import FINITE
from tb_memplugin.estimate.answer.hints import EVERY_STEP
from tb_memplugin.estimate.answer.script import read_program
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.uncounted import FOURIER, SOLVERS, SPARSE

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's CUDA build")

IDIOMS = Path(__file__).with_name("idioms.py")
LAST_LINE = len(IDIOMS.read_text("utf-8").splitlines()) - 1


def test_small_values_are_computed_and_others_are_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemPluginError, match="whether a condition holds") as caught:
        estimate_program(read_program([str(IDIOMS)]), GpuSpec.named("h100"), steps=1000)
    assert caught.value.where == f"{IDIOMS}:{LAST_LINE}"
    assert f"--hint idioms.py:{LAST_LINE}=True" in (caught.value.fix or "")
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("SAID")]
    assert json.loads(line.removeprefix("SAID ")) == {
        "randint": True,
        "isfinite": True,
        "mask": True,
        "maximum": 5,
        "nonzero": [[1], [3]],
        "selected": [1, 2],
        "unique": [0, 1, 2],
        "counts": [2, 1, 1],
        "rows": [[0]],
        "repeated": [1, 3, 3],
        "bincount": [2, 1, 1],
        "equal": [True, False],
        "allclose": True,
        "cumsum": [0, 1, 1, 3],
        "scatter": [2.0, 1.0, 1.0, 0.0],
        "scaled": 65536.0,
        "drawn": 4,
        "fourier": [4.0, 0.0, 0.0],
        "inverse": [1, 3, 0, 2],
        "lengths": [1, 3, 2, 1],
        "some": [1.0, 1.0, 1.0, 1.0],
        "column": [5.0, 5.0, 5.0, 5.0],
        "learns": True,
        "host's numbers stay": True,
        "new memory": [1.0, 1.0],
        "large": [1.0, [[1.0, 1.0]], 0],
        "large is finite": [True, False, False],
        "large rows": [[2048, 2048], [2048, 2048]],
        "counted": [2048 * 2048, 2048],
        "joined": [False, True, False],
        "selected rows": [2, True],
        "printed": "tensor([1., 1.]",
        "normal": [2048, 2048],
        "eigenvalues": [0.0, 0.0, 1.0, 2.0],
        "factors": [[4096, 32, 32], [1, 2048, 2048]],
        "neighbours": [4, 2048],
        "exponential": [4, 1024, 1024],
        "each once": [1],
        "inverted": [2048, 2, 2],
        "steps of unknown gradients": 1,
        "reserve": 134_656 + 22_528 + 3_584 + 384,  # cuDNN's, results, last state; 512s of the input
    }


def test_a_hint_answers_what_was_not_computed() -> None:
    step = estimate_program(
        read_program([str(IDIOMS)]),
        GpuSpec.named("h100"),
        steps=1000,
        hints={f"idioms.py:{LAST_LINE}": False},
    )
    assert step.notes[0] == "The program ran to its end."
    assert any("idioms.py:59 copies values that were not computed" in note for note in step.notes)
    assert {FINITE, FOURIER, SOLVERS, SPARSE} <= set(step.notes)
    assert any(note.startswith(EVERY_STEP) for note in step.notes)
