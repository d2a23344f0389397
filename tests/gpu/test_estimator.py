"""Estimates beside real runs, for gross errors only; `python -m benchmarks.on_gpu estimate` has the goals."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

from tb_memplugin import MemoryEstimator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]

HIGHEST, LOWEST = 1.1, {"transformer": 0.9, "convolutions": 0.6, "recurrent": 0.6}
"""Shares of the measured peak. Workspaces of convolutions are estimated only where a cuDNN is asked."""


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *layers)
    return model.cuda(), torch.empty(16, 3, 128, 128, device="cuda")


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6).cuda(), torch.empty(8, 512, 1024, device="cuda")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(1024, 1024, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(batch)[0]
        return result


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    return Recurrent().cuda(), torch.empty(256, 16, 1024, device="cuda")


def train(build: Callable[[], tuple[nn.Module, torch.Tensor]], optimizer: Any, amp: bool) -> None:
    model, batch = build()
    steps = optimizer(model.parameters(), lr=1e-3)
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = model(batch).float().sum()
        loss.backward()
        steps.step()
        steps.zero_grad()


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("build", [convolutions, transformer, recurrent], ids=lambda build: build.__name__)
def test_the_peak_is_near_the_measured_one(build: Any, optimizer: Any, amp: bool) -> None:
    capability = torch.cuda.get_device_capability()
    gpu = {(8, 0): "a100", (8, 9): "l4", (9, 0): "h100", (10, 0): "b200"}.get(capability, "h100")
    with MemoryEstimator(gpu=gpu) as estimator:
        train(build, optimizer, amp)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier tests; this run's own count
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(build, optimizer, amp)
    measured = torch.cuda.max_memory_allocated() - before
    share = estimator.estimate().peak_allocated_bytes / measured
    assert LOWEST[build.__name__] <= share <= HIGHEST


def test_a_model_that_is_compiled_after_an_estimate_has_the_gradients_of_attention() -> None:
    def attend(query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query * weight, query, query)

    def gradient() -> torch.Tensor | None:
        query, weight = (
            torch.rand(1, 2, 16, 8, device="cuda"),
            torch.rand(8, device="cuda", requires_grad=True),
        )
        torch.compiler.reset()
        torch.compile(attend)(query, weight).sum().backward()
        return weight.grad

    with MemoryEstimator():
        gradient()
    with torch._inductor.config.patch(force_disable_caches=True):
        assert gradient() is not None


def test_an_estimate_asks_the_gpu_of_this_machine_nothing() -> None:
    """Its program sees the GPU that is named, and a state of random numbers may be a fake tensor."""
    real = torch.cuda.get_device_name()
    allocated = torch.cuda.memory_allocated()
    with MemoryEstimator(gpu="v100"):
        state = torch.zeros(16, dtype=torch.uint8, device="cuda").cpu()
        torch.cuda.set_rng_state_all([state])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        weight = torch.ones(1 << 20, device="cuda")
        end.record()
        answers = (torch.cuda.get_device_name(), torch.cuda.memory_allocated(), start.elapsed_time(end))
        del weight
    assert answers[1:] == (4 << 20, 1.0)
    assert "V100" in answers[0]
    assert torch.cuda.get_device_name() == real
    assert torch.cuda.memory_allocated() == allocated
