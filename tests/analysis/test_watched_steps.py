"""Growth in figures of steps alone, without a recorded window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tb_memplugin.analysis.advice_rules import advice_on_steps
from tests.analysis.histories import M
from tests.step_figures import figures


def watched(peaks: Any) -> tuple[str, int]:
    """The verdict of growth on figures whose steps leave half of their peak, and its bytes per step."""
    advised = advice_on_steps(figures(peaks))
    (judgement,) = [one for one in advised.judgements if one.kind == "growth"]
    return judgement.verdict, sum(finding.bytes for finding in advised.findings)


def test_watched_steps_that_leave_2_mib_more_each_time() -> None:
    assert watched(2 * (100 * M + 2 * M * np.arange(1000))) == ("found", 2 * M)


@pytest.mark.parametrize(
    ("peaks", "verdict"),
    [
        (np.full(1000, 100 * M), "fine"),
        (100 * M + 2 * M * np.minimum(np.arange(1000), 500), "fine"),
        (100 * M + 2 * M * (np.arange(1000) % 50), "fine"),
        (100 * M + 2 * M * np.arange(20), "not judged"),
    ],
    ids=["level", "a queue that is full", "cycles", "too few steps"],
)
def test_watched_steps_that_show_no_growth(peaks: np.ndarray, verdict: str) -> None:
    assert watched(peaks) == (verdict, 0)
