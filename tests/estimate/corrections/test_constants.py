"""Tests that small tensors of the program's own numbers keep their values, as real ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tb_memplugin import MemPluginError
from tests.estimate.fake_runs import estimated


@pytest.mark.parametrize(
    ("program", "value"),
    [
        (lambda: torch.linspace(0, 1, 3).tolist(), [0.0, 0.5, 1.0]),
        (lambda: torch.tensor([2, 3]).tolist(), [2, 3]),
        (lambda: (torch.arange(4) * 2).flip(0)[1].item(), 4),
        (lambda: torch.full((3,), 5).sum().item(), 15),
        (lambda: [one.tolist() for one in torch.zeros(4).split([1, 3])], [[0.0], [0.0, 0.0, 0.0]]),
        (lambda: bool((torch.ones(3) > 0).all()), True),
    ],
)
def test_numbers_on_the_cpu_are_known(program: Callable[[], Any], value: Any) -> None:
    read: list[Any] = []
    assert not any("1.0" in note for note in estimated(lambda: read.append(program())).estimate().notes)
    assert read == [value]


def test_what_is_written_into_them_is_known_or_forgotten() -> None:
    def run() -> None:
        known = torch.zeros(3)
        known += 2
        read.append(known.tolist())
        known += torch.randn(3)
        read.append(known.tolist())

    read: list[Any] = []
    estimated(run)
    assert read == [[2.0] * 3, [1.0] * 3]  # unknown numbers are assumed to be 1.0


def test_large_ones_and_those_on_the_gpu_are_not() -> None:
    with pytest.raises(MemPluginError, match="a whole number"):
        estimated(lambda: torch.arange(5000).sum().item())
    with pytest.raises(MemPluginError, match="a whole number"):
        estimated(lambda: torch.arange(5, device="cuda").sum().item())
