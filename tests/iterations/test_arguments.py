"""Wrong arguments are refused, and nothing is watched then."""

from __future__ import annotations

import pytest
from torch import nn
from torch.utils import _python_dispatch as dispatch

from tb_memplugin import IterationReport, MemPluginError


def is_watched() -> bool:
    return dispatch.is_in_torch_dispatch_mode()


@pytest.fixture
def linear():
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": 3},
        {"print_period": 1.5},
        {"print_period": True},
        {"csv": 3},
        {"optimizer": "adam"},
        {"optimizer": ["adam"]},
        {"max_weights": "all"},
    ],
)
def test_arguments_of_a_wrong_type_are_refused(linear, wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        IterationReport(**{"model": linear, **wrong})
    assert not is_watched()


@pytest.mark.parametrize("wrong", [{"print_period": 0}, {"max_weights": -1}, {"csv": "a.csv"}, {"csv": ""}])
def test_wrong_values_are_refused(linear, wrong):
    with pytest.raises(MemPluginError, match=next(iter(wrong))):
        IterationReport(linear, **wrong)
    assert not is_watched()
