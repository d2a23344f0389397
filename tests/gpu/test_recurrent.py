"""Recurrent layers take on the GPU what the estimator says: see test_operators.py."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tests.gpu.test_operators import Figures, figures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
    pytest.mark.skipif(
        not 92_000 <= (torch.backends.cudnn.version() or 0) < 92_600,
        reason="cuDNN 9.20 to 9.25, whose sizes are counted",
    ),
]

LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (128, 256, {}),
    "small": (64, 128, {}),
    "three layers": (256, 512, {"num_layers": 3}),
    "both directions": (64, 128, {"num_layers": 2, "bidirectional": True}),
    "batch first": (256, 512, {"num_layers": 2, "batch_first": True}),
    "no biases": (128, 256, {"bias": False}),
    "dropout": (128, 256, {"num_layers": 2, "dropout": 0.5}),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def train(measure: Any, kind: Any, case: str, dtype: torch.dtype, packed: bool) -> list[Figures]:
    """Return the figures of a layer's forward and backward on 16 sequences of up to 40 steps."""
    features, hidden, options = LAYERS[case]
    layer = kind(features, hidden, device="cuda", dtype=dtype, **options)
    first = (16, 40) if "batch_first" in options else (40, 16)
    batch: Any = torch.ones(*first, features, device="cuda", dtype=dtype, requires_grad=True)
    if packed:
        lengths = torch.arange(40, 8, -2)
        batch = pack_padded_sequence(batch, lengths, batch_first="batch_first" in options)

    def forward() -> torch.Tensor:
        result: Any = layer(batch)[0]
        return result.data if packed else result

    result, first_figures = measure(forward)
    gradient = torch.empty_like(result)
    return [first_figures, measure(lambda: result.backward(gradient))[1]]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_takes_what_the_estimate_says(
    kind: Any, case: str, dtype: torch.dtype, packed: bool
) -> None:
    try:
        gpu = GpuSpec.named(torch.cuda.get_device_name())
    except MemPluginError:
        pytest.skip("the number of this GPU's processors is not known")
    train(figures, kind, case, dtype, packed)  # the first dropout makes a state that is kept
    with MemoryEstimator(gpu=gpu):
        estimated = train(figures, kind, case, dtype, packed)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert train(figures, kind, case, dtype, packed) == estimated
