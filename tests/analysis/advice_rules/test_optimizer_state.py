"""The rule `optimizer_state` on small histories."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis import advice
from tests.analysis.advice_rules.findings import found, stacked
from tests.traces import trace


def test_optimizer_state_of_unknown_dtype_has_at_least_two_bytes_per_element() -> None:
    history = trace("start 100 w category=parameter", "start 100 m category=optimizer_state", "alloc 9 a")
    assert found(history, "optimizer_state").bytes == 50


def test_optimizer_state_beside_parameters_of_half_the_width_is_float32() -> None:
    history = trace("start 100 w category=parameter", "start 200 m category=optimizer_state", "alloc 9 a")
    finding = found(history, "optimizer_state")
    assert finding.bytes == 150
    assert "twice the bytes per element of the parameters" in finding.title


@pytest.mark.parametrize(
    ("parameters", "backward", "is_found"), [(1, True, True), (2, True, False), (1, False, False)]
)
def test_state_of_an_optimizer_that_another_replaced(parameters: int, backward: bool, is_found: bool) -> None:
    """Two blocks of state by one line: of one parameter after the other, of the same, or as loaded."""
    start = [f"start 100 w{n} category=parameter" for n in range(parameters)]
    state = [f"alloc 100 m{n} category=optimizer_state phase=optimizer" for n in range(2)]
    state[1:1] = ["alloc 1 g phase=backward"] * backward
    history = trace(*start, *state)
    history = stacked(history, ("_init_group torch/optim/adam.py:166", "train train.py:9"))
    problems = [one for one in advice(history).findings if one.level == "problem"]
    assert [(one.kind, one.bytes) for one in problems] == [("optimizer_state", 100)] * is_found
