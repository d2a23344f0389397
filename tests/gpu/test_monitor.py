"""On CUDA the monitor's numbers are the allocator's own, the user's stay right, and it costs little. Needs an
NVIDIA GPU."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tb_memplugin import MemoryMonitor
from tb_memplugin.record.monitor import MonitoredStep
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


def make(name="transformer"):
    torch.manual_seed(0)
    model = MODELS[name]().cuda()
    return model, torch.optim.AdamW(model.parameters())


def train_step(model, optimizer):
    x, y = (tensor.cuda() for tensor in model.batch())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def told(monitor) -> MonitoredStep:
    """The step that ends now."""
    step = monitor.step()
    assert step is not None
    return step


def test_each_steps_peak_and_end_are_what_torch_tells_of_the_same_step_alone(tmp_path):
    model, optimizer = make()
    train_step(model, optimizer)
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()  # the user's own, at each step
            train_step(model, optimizer)
            (seen,) = told(monitor).devices
            assert seen.device == "cuda:0"
            assert seen.peak_allocated == torch.cuda.max_memory_allocated()
            assert seen.peak_reserved == torch.cuda.max_memory_reserved()
            assert seen.allocated == torch.cuda.memory_allocated()
            assert seen.reserved == torch.cuda.memory_reserved()
            assert seen.exact


def test_the_users_peak_is_that_of_the_whole_training(tmp_path):
    model, optimizer = make()
    train_step(model, optimizer)
    torch.cuda.reset_peak_memory_stats()
    kept = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del kept
    before = torch.cuda.max_memory_allocated()
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        peaks = []
        for _ in range(3):
            train_step(model, optimizer)
            peaks.append(told(monitor).devices[0].peak_allocated)
        assert torch.cuda.max_memory_allocated() == before > max(peaks)
        if hasattr(torch.accelerator, "max_memory_allocated"):
            assert torch.accelerator.max_memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


def test_phases_have_the_peaks_that_a_reset_before_each_would_show(tmp_path):
    model, optimizer = make("checkpointed")
    train_step(model, optimizer)
    x, y = (tensor.cuda() for tensor in model.batch())
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        torch.cuda.reset_peak_memory_stats()
        with monitor.phase("forward"):
            loss = F.cross_entropy(model(x), y)
        forward = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with monitor.phase("backward"):
            loss.backward()
        backward = torch.cuda.max_memory_allocated()
        step = monitor.step()
    assert step is not None
    assert [phase.peak_bytes for phase in step.phases] == [(forward,), (backward,)]
    assert step.devices[0].peak_allocated == max(forward, backward)


def test_a_failed_request_counts_as_one(tmp_path):
    torch.empty(1, device="cuda")
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        step = monitor.step()
    assert step is not None
    assert step.devices[0].num_ooms == 1


def test_a_step_costs_at_most_one_percent_of_a_hundred_milliseconds(tmp_path):
    torch.empty(1, device="cuda")
    times = []
    with MemoryMonitor(tmp_path, "rank0") as monitor:
        for _ in range(300):
            begin = time.perf_counter()
            for name in ("forward", "backward", "optimizer"):
                with monitor.phase(name):
                    pass
            monitor.step()
            times.append(time.perf_counter() - begin)
    assert median(times) < 1e-3


def test_training_is_the_same_to_the_bit(tmp_path):
    def parameters(stepped):
        model, optimizer = make()
        with sdpa_kernel(SDPBackend.MATH):  # the others may add up in another order each time
            for _ in range(3):
                train_step(model, optimizer)
                stepped()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    with MemoryMonitor(tmp_path, "rank0") as monitor:
        watched = parameters(monitor.step)
    assert all(map(torch.equal, watched, parameters(lambda: None)))
