"""Tests for the note on cuDNN's workspaces of convolutions, where no cuDNN is asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tb_memplugin.estimate.answer.estimation import margin_bounds
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.convolutions import View, usual_bytes
from tests.estimate.fake_runs import estimated

HALF = torch.float16
CHANNELS_LAST = torch.channels_last

INPUT, WEIGHT, RESULT = (2, 8, 16, 16), (16, 8, 1, 1), (2, 16, 16, 16)
BYTES = 16_384 + 512 + 32_768
"""Those of the three in float32."""


def told(program: Callable[[], Any]) -> int:
    """Return the bytes by which workspaces raise the peak, as the note says."""
    answer = estimated(program).estimate()
    (note,) = (one for one in answer.notes if one.startswith("Convolutions"))
    found = re.search(r"([\d,]+) bytes higher", note)
    assert found is not None
    more = int(found[1].replace(",", ""))
    without = margin_bounds(GpuSpec.named(answer.gpu), answer.margin_bytes, 0)
    assert answer.margin_bounds_bytes is not None
    assert without is not None
    assert without[0] - answer.margin_bounds_bytes[0] == more  # the least margin leaves room for them
    assert without[1] == answer.margin_bounds_bytes[1]
    return more


def convolve(dtype: torch.dtype = torch.float32, form: torch.memory_format = torch.contiguous_format) -> Any:
    given = torch.ones(INPUT, dtype=dtype, device="cuda").to(memory_format=form)
    weight = torch.ones(WEIGHT, dtype=dtype, device="cuda").to(memory_format=form)
    return given, weight, functional.conv2d(given, weight)


def test_a_workspace_at_the_peak_raises_it() -> None:
    assert told(convolve) == BYTES
    assert told(lambda: convolve(HALF)) == BYTES // 2
    assert told(lambda: convolve(form=CHANNELS_LAST)) == BYTES


def test_channels_last_of_half_precision_needs_no_copies() -> None:
    assert told(lambda: convolve(HALF, CHANNELS_LAST)) == 0


@pytest.mark.parametrize("more", [0, 512, 1024])
def test_only_what_is_above_the_peak_counts(more: int) -> None:
    def run() -> None:
        convolve()
        torch.empty(2 * BYTES - 512 + more, dtype=torch.uint8, device="cuda")

    assert told(run) == max(0, 512 - more)


def test_the_backward_holds_both_gradients() -> None:
    def run() -> None:
        given = torch.ones(INPUT, device="cuda", requires_grad=True)
        weight = torch.ones(WEIGHT, device="cuda", requires_grad=True)
        result = functional.conv2d(given, weight)
        result.backward(torch.empty_like(result))

    assert told(run) == BYTES


def test_depthwise_convolutions_are_pytorchs_own_in_the_usual_format() -> None:
    def run(form: torch.memory_format) -> Any:
        given = torch.ones(1, 8, 16, 16, device="cuda").to(memory_format=form)
        return given, functional.conv2d(given, torch.ones(8, 1, 3, 3, device="cuda"), padding=1, groups=8)

    assert told(lambda: run(CHANNELS_LAST)) == 8192 + 72 * 4 + 8192
    notes = estimated(lambda: run(torch.contiguous_format)).estimate().notes
    assert not [note for note in notes if note.startswith("Convolutions")]


@pytest.mark.parametrize(
    ("shape", "dtype", "form", "asked"),
    [
        ("input", torch.float32, torch.contiguous_format, (51_527_696, 51_527_696)),
        ("input", HALF, torch.contiguous_format, (25_763_856, 25_763_987)),
        ("result", HALF, torch.contiguous_format, (25_763_856, 25_763_987)),
        ("result", torch.float32, torch.contiguous_format, (25_837_584, 25_837_584)),
        ("weight", torch.float32, torch.contiguous_format, (54_641_215, 51_822_803)),
        ("weight", HALF, torch.contiguous_format, (26_944_311, 26_058_963)),
        ("input", HALF, CHANNELS_LAST, (0, 131)),
        ("result", HALF, CHANNELS_LAST, (0, 131)),
        ("weight", HALF, CHANNELS_LAST, (1_180_455, 295_107)),
    ],
)
def test_cudnn_asked_for_little_more(
    shape: str, dtype: torch.dtype, form: torch.memory_format, asked: tuple[int, int]
) -> None:
    """cuDNN 9.20's first choice, as an A100 and an H100, to compute `shape`; 3x3, 32 images, 64 channels."""
    images = View.of(torch.empty(32, 64, 56, 56, dtype=dtype, device="meta").to(memory_format=form))
    weight = View.of(torch.empty(64, 64, 3, 3, dtype=dtype, device="meta").to(memory_format=form))
    size = usual_bytes(images, weight, images)
    assert size == (0 if form is CHANNELS_LAST else (2 * 6_422_528 + 36_864) * dtype.itemsize)
    assert all(one <= size + (4 << 20) for one in asked), shape
