"""Convolutions take on the GPU what the estimator says, cuDNN's workspaces included: see test_operators.py.

The estimate asks the cuDNN that computes. On the stand-in (docs/gpu.md), this needs
STANDIN_CUDNN_WORKSPACES=1: without it, convolutions take no workspaces there, and no cuDNN is asked.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn import functional

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.libraries.cudnn.questions import installed
from tests.gpu.test_operators import Figures, figures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]

Shape = tuple[int, ...]

CONVOLUTIONS: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "3x3": ((8, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    "3x3 of many channels": ((16, 512, 14, 14), (512, 512, 3, 3), {"padding": 1}),
    "3x3 of steps": ((8, 128, 28, 28), (256, 128, 3, 3), {"padding": 1, "stride": 2}),
    "3x3 of one image": ((1, 256, 32, 32), (256, 256, 3, 3), {"padding": 1}),
    "3x3 of large images": ((2, 32, 256, 256), (32, 32, 3, 3), {"padding": 1}),
    "3x3 without padding": ((4, 64, 70, 70), (128, 64, 3, 3), {}),
    "1x1": ((8, 256, 28, 28), (64, 256, 1, 1), {}),
    "1x1 of steps": ((8, 256, 56, 56), (512, 256, 1, 1), {"stride": 2}),
    "1x1 of single pixels": ((32, 256, 1, 1), (64, 256, 1, 1), {}),
    "5x5": ((8, 48, 28, 28), (96, 48, 5, 5), {"padding": 2}),
    "7x7 of colors": ((8, 3, 224, 224), (64, 3, 7, 7), {"padding": 3, "stride": 2}),
    "11x11 of colors": ((4, 3, 224, 224), (96, 3, 11, 11), {"stride": 4}),
    "1x7": ((8, 192, 17, 17), (192, 192, 1, 7), {"padding": (0, 3)}),
    "patches": ((8, 3, 224, 224), (768, 3, 16, 16), {"stride": 16}),
    "one channel": ((64, 1, 28, 28), (32, 1, 3, 3), {"padding": 1}),
    "odd channels": ((3, 37, 19, 23), (41, 37, 3, 3), {"padding": 1}),
    "few outputs": ((4, 64, 128, 128), (2, 64, 1, 1), {}),
    "dilated": ((4, 128, 32, 32), (128, 128, 3, 3), {"padding": 4, "dilation": 4}),
    "groups": ((8, 128, 28, 28), (128, 4, 3, 3), {"padding": 1, "groups": 32}),
    "two groups": ((8, 96, 27, 27), (256, 48, 5, 5), {"padding": 2, "groups": 2}),
    "depthwise": ((8, 96, 56, 56), (96, 1, 7, 7), {"padding": 3, "groups": 96}),
    "depthwise of steps": ((8, 512, 28, 28), (512, 1, 3, 3), {"padding": 1, "stride": 2, "groups": 512}),
    "depthwise, twice the channels": ((8, 32, 28, 28), (64, 1, 3, 3), {"padding": 1, "groups": 32}),
    "sequence": ((8, 80, 1500), (384, 80, 3), {"padding": 1}),
    "sequence of steps": ((8, 384, 1500), (384, 384, 3), {"padding": 1, "stride": 2}),
    "waves": ((4, 1, 16000), (512, 1, 10), {"stride": 5}),
    "dilated sequence": ((4, 64, 4096), (128, 64, 3), {"dilation": 8, "padding": 8}),
    "depthwise sequence": ((4, 256, 500), (256, 1, 31), {"padding": 15, "groups": 256}),
    "volume": ((2, 32, 16, 32, 32), (64, 32, 3, 3, 3), {"padding": 1}),
    "volume of patches": ((2, 3, 16, 112, 112), (192, 3, 2, 16, 16), {"stride": (2, 16, 16)}),
    "transposed": ((4, 128, 28, 28), (128, 64, 2, 2), {"stride": 2}),
    "transposed 4x4": ((8, 256, 8, 8), (256, 128, 4, 4), {"stride": 2, "padding": 1}),
    "transposed with groups": ((4, 64, 16, 16), (64, 8, 3, 3), {"padding": 1, "groups": 8}),
    "transposed depthwise": ((4, 64, 16, 16), (64, 1, 4, 4), {"stride": 2, "padding": 1, "groups": 64}),
    "transposed sequence": ((4, 128, 256), (128, 64, 16), {"stride": 8, "padding": 4}),
    "transposed volume": ((1, 64, 8, 16, 16), (64, 32, 2, 2, 2), {"stride": 2}),
}
TRANSPOSED = {3: functional.conv_transpose1d, 4: functional.conv_transpose2d, 5: functional.conv_transpose3d}
DIRECT = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}
CHANNELS_LAST = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


def train(
    measure: Any, name: str, dtype: torch.dtype, channels_last: bool, more_images: int = 0
) -> list[Figures]:
    """Return the figures of the convolution's forward and backward, with a bias."""
    (images_count, *others), weight, options = CONVOLUTIONS[name]
    given = (images_count + more_images, *others)
    kinds = TRANSPOSED if name.startswith("transposed") else DIRECT
    form = CHANNELS_LAST[len(given)] if channels_last else torch.contiguous_format
    channels = weight[1] * options.get("groups", 1) if name.startswith("transposed") else weight[0]
    images, filters = (
        torch.ones(shape, dtype=dtype, device="cuda").contiguous(memory_format=form).requires_grad_()
        for shape in (given, weight)
    )
    bias = torch.ones(channels, dtype=dtype, device="cuda", requires_grad=True)
    result, forward = measure(lambda: kinds[len(given)](images, filters, bias, **options))
    gradient = torch.empty_like(result)
    return [forward, measure(lambda: result.backward(gradient))[1]]


@pytest.mark.parametrize("channels_last", [False, True], ids=["usual", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_takes_what_the_estimate_says(
    name: str, dtype: torch.dtype, channels_last: bool
) -> None:
    try:
        gpu = GpuSpec.named(torch.cuda.get_device_name())
    except MemPluginError:
        pytest.skip("the number of this GPU's processors is not known")
    if not installed().version:
        pytest.skip(f"there is no cuDNN to ask: {installed().refusal}")
    with MemoryEstimator(gpu=gpu):
        estimated = train(figures, name, dtype, channels_last)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert train(figures, name, dtype, channels_last) == estimated


@pytest.mark.parametrize("channels_last", [False, True], ids=["usual", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(CONVOLUTIONS)[::4])
def test_benchmark_tries_all_kernels_in_the_workspace_that_the_estimate_says(
    name: str, dtype: torch.dtype, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch keeps the kernel that it took for a shape, so these are other shapes than those above."""
    if not installed().version:
        pytest.skip(f"there is no cuDNN to ask: {installed().refusal}")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with MemoryEstimator(gpu=GpuSpec.named(torch.cuda.get_device_name())):
        estimated = train(figures, name, dtype, channels_last, more_images=1 + channels_last)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert train(figures, name, dtype, channels_last, more_images=1 + channels_last) == estimated
