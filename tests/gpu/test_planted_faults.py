"""Snapshots of small trainings with a planted fault: advice finds it, by the allocator's own counter.

The truth is `requested_bytes.all.peak` of the training with the fault minus that of the same without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tb_memplugin import load
from tb_memplugin.analysis import Finding, advice
from tests.planted_faults import ALLOWED, KINDS, NEEDS_OPERATORS, PER_STEP, PROGRAMS, record_snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


def recorded(name: str, broken: bool, stacks: str, path: Path) -> tuple[int, dict[str, Finding]]:
    peak = record_snapshot(name, broken, stacks, path)
    return peak, {finding.kind: finding for finding in advice(load(path), "cuda:0").findings}


@pytest.mark.parametrize(
    ("name", "stacks"),
    [(name, "all") for name in PROGRAMS if name != "undetached"]
    + [(name, "python") for name in PROGRAMS if name not in NEEDS_OPERATORS],
)
def test_a_planted_fault_is_found_in_a_snapshot(name: str, stacks: str, tmp_path: Path) -> None:
    broken, found = recorded(name, True, stacks, tmp_path / "broken.pickle")
    fixed, others = recorded(name, False, stacks, tmp_path / "fixed.pickle")
    kind = KINDS.get(name, name)
    assert found[kind].bytes == pytest.approx(PER_STEP.get(name) or broken - fixed, rel=ALLOWED)
    assert kind not in others
    problems = [one for one in others.values() if one.level == "problem" and one.bytes > 0.01 * fixed]
    assert [one.kind for one in problems] == []
