"""Tests of what losses and the parts of synchronised batch normalization allocate on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tb_memplugin import MemPluginError
from tests.estimate.fake_runs import estimated, sizes

STEPS, BATCH, CLASSES = 50, 4, 10


def ctc(lengths: Any, targets: torch.Tensor, **options: Any) -> Any:
    logits = torch.randn(STEPS, BATCH, CLASSES, device="cuda", requires_grad=True)
    inputs = torch.full((BATCH,), STEPS)
    loss = functional.ctc_loss(logits.log_softmax(-1), targets, inputs, lengths, **options)
    loss.backward()
    return loss


@pytest.mark.parametrize("one_after_the_other", [False, True])
def test_ctc_loss_has_twice_the_longest_target_and_one_for_each_step(one_after_the_other: bool) -> None:
    """Both engines agree on such a training to the byte: 70,526,976 bytes, PyTorch 2.13 on an H100."""
    lengths = torch.tensor([3, 7, 5, 2])
    shape = (17,) if one_after_the_other else (BATCH, 9)
    done = estimated(
        lambda: ctc(lengths, torch.randint(1, CLASSES, shape, device="cuda"), zero_infinity=True)
    )
    alpha = BATCH * STEPS * (2 * 7 + 1) * 4
    numbers = 8 * BATCH  # two lengths and an offset of each sample
    assert sizes(done, "_ctc_loss") == [numbers, numbers, numbers, alpha, 4 * BATCH]
    gradient = BATCH * STEPS * CLASSES * 4
    assert sizes(done, "_ctc_loss_backward") == [numbers, numbers, numbers, alpha, gradient]


def test_lengths_of_ctc_loss_that_are_not_known_are_the_greatest() -> None:
    done = estimated(
        lambda: ctc(torch.empty(BATCH, dtype=torch.long, device="cuda"), torch.ones(BATCH, 9, device="cuda"))
    )
    assert max(sizes(done, "_ctc_loss")) == BATCH * STEPS * (2 * 9 + 1) * 4
    assert any("Lengths of ctc_loss are not known" in note for note in done.estimate().notes)


def test_a_ctc_loss_of_cudnn_is_refused_with_a_way_around() -> None:
    with pytest.raises(MemPluginError, match=r"targets of dtype torch\.long"):
        estimated(lambda: ctc([2] * BATCH, torch.ones(8, dtype=torch.int32, device="cuda")))


@pytest.mark.parametrize(
    ("operator", "loss", "target"),
    [
        ("multi_margin_loss", functional.multi_margin_loss, (64,)),
        ("multilabel_margin_loss_forward", functional.multilabel_margin_loss, (64, 10)),
    ],
)
def test_margins_of_samples_are_averaged(operator: str, loss: Any, target: tuple[int, ...]) -> None:
    def run() -> Any:
        columns = torch.ones(10, 64, device="cuda").t()  # copied: 64 x 10 floats
        return loss(columns, torch.zeros(target, dtype=torch.long, device="cuda"))

    marked = [64 * 10 * 4] * (len(target) - 1)
    assert sorted(sizes(estimated(run), operator)) == sorted([4, *marked, 64 * 10 * 4, 64 * 4])


def test_synchronised_batch_norm_has_moments_of_channels_in_float32() -> None:
    def run() -> Any:
        data = torch.empty(8, 1024, 4, 4, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        mean, deviation = torch.batch_norm_stats(data, 1e-5)
        sums = torch.batch_norm_backward_reduce(data, data, mean, deviation, None, True, False, False)
        out = torch.batch_norm_elemt(data, None, None, mean, deviation, 1e-5)
        return data, mean, sums, out

    done = estimated(run)
    assert sizes(done, "batch_norm_stats") == [4096, 4096]
    assert sizes(done, "batch_norm_backward_reduce") == [4096, 4096]
    assert sizes(done, "batch_norm_elemt") == [8 * 1024 * 16 * 2]
