"""What depends on values: hints answer, the rest is an upper bound, noted, or refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tb_memplugin import MemoryEstimator, MemPluginError
from tests.estimate.fake_runs import estimated, sizes

KIB = 1 << 10


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", **options)


def test_a_float_is_taken_to_be_one_and_noted() -> None:
    read: list[float] = []
    done = estimated(lambda: read.append(ones(3).sum().item()))
    assert read == [1.0]
    assert any("test_values.py:" in note and "1.0" in note for note in done.estimate().notes)


def test_a_constant_keeps_its_value() -> None:
    read: list[float] = []
    estimated(lambda: read.append(torch.tensor(7.5).item()))
    assert read == [7.5]


def test_a_truth_is_refused_with_its_line_and_what_to_do() -> None:
    with pytest.raises(MemPluginError, match=r"(?s)whether a condition holds.*hints="):
        estimated(lambda: bool((ones(3) > 0).any()))


def test_a_whole_number_is_refused() -> None:
    with pytest.raises(MemPluginError, match="a whole number"):
        estimated(lambda: ones(3).long().sum().item())


def test_a_hint_answers_by_line_or_by_kind() -> None:
    line = inspect.currentframe().f_lineno + 4  # type: ignore[union-attr]

    def run() -> list[int]:
        return [
            int(ones(3).long().sum().item()),
            int(ones(3).long().max().item()),
        ]

    read: list[list[int]] = []
    estimated(lambda: read.append(run()), hints={f"test_values.py:{line}": 5, "count": 9})
    assert read == [[5, 9]]


def test_a_hint_may_be_a_function_of_the_question() -> None:
    read: list[bool] = []
    estimated(
        lambda: read.append(bool((ones(3) > 0).all())),
        hints=lambda asked: asked.kind == "truth" and asked.dtype is torch.bool,
    )
    assert read == [True]


@pytest.mark.parametrize("hints", [["number"], {"nothing": 1}, 3])
def test_hints_that_belong_to_nothing_are_refused(hints: Any) -> None:
    with pytest.raises(MemPluginError, match="hint"):
        MemoryEstimator(hints=hints)


def select() -> torch.Tensor:
    tensor = ones(KIB)
    return tensor[tensor > 0]


def test_a_mask_selects_everything_at_most() -> None:
    """1024 floats, and meanwhile as many indices of 8 bytes."""
    done = estimated(select)
    assert sizes(done, "index") == [8 * KIB, 4 * KIB]
    assert any("selects" in note for note in done.estimate().notes)


def test_a_hint_says_what_a_mask_selects() -> None:
    assert sizes(estimated(select, hints={"share": 0.25}), "index") == [2 * KIB, KIB]
    assert sizes(estimated(select, hints={"share": 128}), "index") == [KIB, 512]


def test_a_mask_has_a_backward() -> None:
    def run() -> None:
        tensor = ones(KIB, requires_grad=True)
        tensor[tensor > 0].sum().backward()

    assert sizes(estimated(run), "new_zeros") == [4 * KIB]


def test_masks_of_several_dimensions() -> None:
    def run() -> torch.Tensor:
        tensor = ones(4, 8, 16)
        return tensor[tensor[..., 0] > 0]

    assert sizes(estimated(run), "index")[-1] == 4 * 8 * 16 * 4


def test_writing_through_a_mask_needs_no_hint() -> None:
    def run() -> torch.Tensor:
        tensor = ones(KIB)
        tensor[tensor > 0] = 0.0
        return tensor

    assert sizes(estimated(run), "index_put_") == []


def test_nonzero_masked_select_and_unique() -> None:
    def run() -> list[torch.Tensor]:
        tensor = ones(KIB)
        return [tensor.nonzero(), tensor.masked_select(tensor > 0), tensor.unique()]

    done = estimated(run)
    assert sizes(done, "nonzero") == [8 * KIB]
    assert sizes(done, "masked_select") == [4 * KIB]
    assert sizes(done, "_unique2")[0] == 4 * KIB


def test_what_no_hint_can_answer_is_refused_by_name() -> None:
    with pytest.raises(MemPluginError, match="bincount"):
        estimated(lambda: torch.bincount(ones(3).long()))


def test_an_operator_without_a_fake_rule_is_refused_by_name() -> None:
    with torch.library._scoped_library("tb_memplugin_test", "FRAGMENT") as library:
        library.define("strange(Tensor x) -> Tensor")
        with pytest.raises(MemPluginError, match="strange"):
            estimated(lambda: torch.ops.tb_memplugin_test.strange(ones(3)))
