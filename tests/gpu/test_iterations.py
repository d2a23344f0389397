"""On CUDA an iteration's cache is the allocator's own counters. Needs an NVIDIA GPU."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from tb_memplugin import IterationReport
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


def train_step(model, optimizer) -> None:
    x, y = (tensor.cuda() for tensor in model.batch())
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def in_storages(tensors) -> int:
    """Bytes of the distinct storages: cuDNN keeps an LSTM's weights, and their gradients, in one each."""
    behind = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(behind.values())


@pytest.fixture(scope="module", params=["cnn", "transformer", "lstm", "checkpointed"])
def seen(request):
    """An iteration's figures, and the allocator's counters of the same stretch."""
    torch.manual_seed(0)
    model = MODELS[request.param]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    with IterationReport(model, console=Console(file=io.StringIO()), optimizer=optimizer) as report:
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer)
        stats = torch.cuda.memory_stats()
        memory = report.record_stats()
    return memory, stats, model


def test_the_cache_and_what_is_allocated_are_the_allocators_counters(seen):
    memory, stats, _ = seen
    assert memory.has_cache
    assert memory.peak_cached_bytes == stats["reserved_bytes.all.peak"]
    assert memory.cached_bytes == stats["reserved_bytes.all.current"]
    assert memory.peak_allocated_bytes == stats["allocated_bytes.all.peak"]
    assert memory.allocated_bytes == stats["allocated_bytes.all.current"]


def test_tensors_hold_no_more_than_was_requested(seen):
    memory, stats, _ = seen
    assert 0 < memory.traced.peak_bytes <= stats["requested_bytes.all.peak"]
    assert memory.untraced_peak_bytes >= 0


def test_parts_sum_and_weights_are_whole(seen):
    memory, _, model = seen
    assert sum(memory.traced.at_peak.values()) == memory.traced.peak_bytes
    assert memory.weight_bytes == in_storages(model.parameters())
    assert memory.gradient_bytes == in_storages(one.grad for one in model.parameters())
    assert memory.feature_map_bytes > 0
    assert memory.intermediate_gradient_bytes > 0


def test_nothing_ran_where_nobody_looked(seen):
    """What checkpointing computes anew runs on autograd's thread for the device."""
    memory, _, _ = seen
    assert [note for note in memory.notes if "other threads" in note] == []


def test_the_users_own_peak_is_what_it_would_have_been():
    model = MODELS["cnn"]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    high = torch.empty(1 << 26, device="cuda")
    del high
    peak = torch.cuda.max_memory_allocated()
    with IterationReport(model, console=Console(file=io.StringIO())) as report:
        train_step(model, optimizer)
        report.record_stats()
    assert torch.cuda.max_memory_allocated() == peak
