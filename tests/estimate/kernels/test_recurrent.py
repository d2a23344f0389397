"""What cuDNN asks for recurrent layers: cuDNN 9.20's own answers, and what PyTorch allocates around them.

The answers were given on 2026-11-22 by `cudnnGetRNNTempSpaceSizes` of nvidia-cudnn-cu13 9.20.0.48.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin.estimate.kernels.recurrent import (
    GRU,
    LSTM,
    RELU,
    TANH,
    RecurrentCall,
    is_persistent,
    reserve_bytes,
    workspace_bytes,
)
from tests.estimate.fake_runs import estimated, sizes

ONE = RecurrentCall(
    kind=LSTM,
    directions=1,
    features=64,
    hidden=128,
    projected=0,
    layers=1,
    drops=False,
    steps=16,
    sequences=8,
    rows=128,
    packed=False,
    element_bytes=4,
    persistent=False,
    capability=(8, 0),
)
DEEP = replace(ONE, kind=TANH, features=1024, hidden=256, layers=3, steps=200, sequences=64, rows=12_800)
WIDE = replace(
    ONE, kind=GRU, directions=2, features=256, hidden=512, layers=2, steps=35, sequences=24, rows=840
)
STATIC = replace(ONE, features=512, hidden=1024, steps=300, sequences=64, rows=19_200, element_bytes=2)

ANSWERS = {
    "LSTM": (ONE, 9_183_552, 327_936, 9_183_552),
    "RNN": (replace(ONE, kind=RELU), 8_835_392, 65_792, 8_663_360),
    "GRU": (replace(ONE, kind=GRU), 9_032_000, 393_472, 8_999_232),
    "two directions": (replace(ONE, directions=2), 18_612_544, 655_616, 18_612_544),
    "two layers": (replace(ONE, layers=2), 1_360_192, 721_152, 1_360_192),
    "two layers on Hopper": (replace(ONE, layers=2, capability=(9, 0)), 18_137_408, 721_152, 18_137_408),
    "dropout": (replace(ONE, layers=2, drops=True), 1_425_728, 723_200, 1_425_728),
    "projection": (replace(ONE, projected=32), 9_013_568, 409_856, 9_013_568),
    "half": (replace(ONE, element_bytes=2), 8_786_240, 164_096, 8_786_240),
    "packed": (replace(ONE, packed=True), 9_068_800, 327_936, 9_068_800),
    "persistent": (replace(ONE, persistent=True), 10_223_936, 327_936, 10_223_936),
    "long": (DEEP, 188_941_056, 65_536_256, 81_593_088),
    "long on Turing": (replace(DEEP, capability=(7, 5)), 213_320_448, 65_536_256, 106_758_912),
    "wide": (replace(WIDE, drops=True, element_bytes=2), 59_580_864, 22_579_456, 59_150_784),
    "persistent, large": (replace(STATIC, persistent=True), 867_435_264, 196_608_256, 867_435_264),
}
"""Bytes of the workspace in training, of the reserve, and of the workspace in inference."""


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_sizes_are_those_that_cudnn_answers(answer: tuple[RecurrentCall, int, int, int]) -> None:
    call, training, reserve, inference = answer
    assert reserve_bytes(call) == reserve
    assert workspace_bytes(call, train=True) == training
    assert workspace_bytes(call, train=False) == inference


def test_the_reserve_of_an_lstm_is_five_vectors_for_each_step_and_sequence() -> None:
    assert reserve_bytes(ONE) == 16 * 8 * 5 * 128 * 4 + 256


def test_the_reserve_has_a_bit_for_each_number_that_dropout_may_drop() -> None:
    two = replace(ONE, layers=2)
    assert reserve_bytes(replace(two, drops=True)) - reserve_bytes(two) == 16 * 8 * 128 // 8


def test_packed_sequences_count_their_own_steps() -> None:
    assert reserve_bytes(replace(ONE, packed=True, rows=40)) == 40 * 5 * 128 * 4 + 256


def test_what_dropout_may_drop_is_counted_as_if_nothing_were_packed() -> None:
    two = replace(ONE, layers=2, packed=True, rows=40)
    assert reserve_bytes(replace(two, drops=True)) - reserve_bytes(two) == 16 * 8 * 128 // 8


@pytest.mark.parametrize(
    ("call", "half", "forward", "backward"),
    [
        (ONE, False, True, True),
        (replace(ONE, hidden=192), False, True, False),
        (replace(ONE, hidden=256), False, False, False),
        (replace(ONE, hidden=256, kind=TANH), False, True, True),
        (replace(ONE, packed=True), False, False, False),
        (replace(ONE, projected=32), False, False, False),
        (replace(ONE, element_bytes=8), False, False, False),
        (replace(ONE, element_bytes=2), False, False, False),
        (STATIC, True, True, True),
        (replace(STATIC, sequences=65), True, False, False),
        (replace(STATIC, capability=(8, 6)), True, False, False),
    ],
)
def test_pytorch_asks_for_persistent_kernels(
    call: RecurrentCall, half: bool, forward: bool, backward: bool
) -> None:
    assert is_persistent(call, 108, is_half=half, forward=True) is forward
    assert is_persistent(call, 108, is_half=half, forward=False) is backward


def train(kind: Any = nn.LSTM, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
    """Train a layer with 64 inputs and 256 hidden units on 8 sequences of 16, and return its result."""
    layer = kind(64, 256, device="cuda", dtype=dtype, **options)
    shape = (8, 16, 64) if options.get("batch_first") else (16, 8, 64)
    result: torch.Tensor = layer(torch.zeros(shape, device="cuda", dtype=dtype, requires_grad=True))[0]
    result.backward(torch.empty_like(result))
    return result


def test_a_workspace_is_allocated_once_forward_and_twice_backward() -> None:
    workspace = workspace_bytes(replace(ONE, hidden=256), train=True)
    done = estimated(train, gpu="a100")
    assert sizes(done, "_cudnn_rnn").count(workspace) == 1
    assert sizes(done, "_cudnn_rnn_backward").count(workspace) == 2


def test_a_forward_in_training_allocates_the_reserve() -> None:
    forward = estimated(lambda: nn.LSTM(64, 256, device="cuda")(torch.zeros(16, 8, 64, device="cuda")))
    assert reserve_bytes(replace(ONE, hidden=256)) in sizes(forward, "_cudnn_rnn")


def test_a_batch_that_comes_first_is_copied() -> None:
    """The input has 8 x 16 x 64 floats; it is copied in the forward and in both halves of the backward.

    The gradient, which has the result's strides, is not. Neither is the third block of this size in the
    backward a copy: it is the gradient of the input.
    """
    done = estimated(lambda: train(batch_first=True), gpu="a100")
    assert sizes(done, "_cudnn_rnn").count(8 * 16 * 64 * 4) == 1
    assert sizes(done, "_cudnn_rnn_backward").count(8 * 16 * 64 * 4) == 3
    assert sizes(estimated(train, gpu="a100"), "_cudnn_rnn").count(8 * 16 * 64 * 4) == 0


def test_results_of_a_batch_that_comes_first_have_steps_outside() -> None:
    strides: list[tuple[int, ...]] = []
    estimated(lambda: strides.append(train(batch_first=True).stride()))
    assert strides == [(256, 8 * 256, 1)]


def test_bfloat16_weights_are_not_in_one_buffer_so_each_forward_makes_one() -> None:
    """`flatten_parameters` leaves bfloat16 alone (torch.backends.cudnn.CUDNN_TENSOR_DTYPES)."""
    weights = 4 * 256 * (64 + 256 + 2) * 2
    done = estimated(lambda: train(dtype=torch.bfloat16))
    assert weights in sizes(done, "_cudnn_rnn")
    assert weights not in sizes(done, "new_empty")
    assert weights not in sizes(estimated(train), "_cudnn_rnn")


def test_the_buffer_has_biases_that_the_layer_does_not_have() -> None:
    """Gradients are then copied out of it: for each matrix one."""
    done = estimated(lambda: train(bias=False))
    assert sizes(done, "new_empty") == [4 * 256 * (64 + 256 + 2) * 4]
    backward = sizes(done, "_cudnn_rnn_backward")
    assert {4 * 256 * (64 + 256 + 2) * 4, 4 * 256 * 64 * 4, 4 * 256 * 256 * 4} <= set(backward)
