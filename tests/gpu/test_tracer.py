"""On CUDA the tracer's numbers are the allocator's own, and it costs little. Needs an NVIDIA GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tb_memplugin import MemoryTracer, MemPluginError
from tb_memplugin.trace import Phase
from tests.gpu.training import train_step
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


@pytest.fixture(scope="module", params=["cnn", "transformer", "checkpointed"])
def seen(request):
    """A tracer after three steps, and the allocator's counters of requested bytes: peak and end."""
    torch.manual_seed(0)
    model = MODELS[request.param]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    tracer = MemoryTracer()
    torch.cuda.reset_peak_memory_stats()
    with tracer.trace(model, optimizer):
        for _ in range(3):
            train_step(model, optimizer)
        stats = torch.cuda.memory_stats()
    return tracer, stats


def test_peak_end_and_reserve_are_the_allocators_counters(seen):
    tracer, stats = seen
    trace = tracer.trace_result()
    live = trace.live(trace.device_row("cuda:0"))
    assert int(live.max()) == tracer.result.peak_allocated == stats["requested_bytes.all.peak"]
    assert int(live[-1]) == stats["requested_bytes.all.current"]
    assert tracer.result.peak_reserved == stats["reserved_bytes.all.peak"]


def test_layers_run_forward_and_backward(seen):
    tracer, _ = seen
    stats = tracer.get_layer_stats()
    assert stats["(root)"].calls == 3
    assert all(one.peak_allocated > 0 for one in stats.values())
    assert sum(one.backward_ms > 0 for one in stats.values()) > len(stats) // 2
    assert 0 <= max(tracer.get_fragmentation_stats().values()) < 1


def test_most_bytes_of_a_backward_belong_to_layers(seen):
    trace = seen[0].trace_result()
    blocks = trace.allocations
    mine = blocks.phase == Phase.BACKWARD
    owned = sum(
        int(blocks.bytes[row])
        for row in range(len(blocks))
        if mine[row] and trace.modules[blocks.module[row]].is_module
    )
    assert owned >= 0.5 * int(blocks.bytes[mine].sum())


def test_the_history_is_off_again(seen):
    assert not torch._C._cuda_isHistoryEnabled()


def test_training_is_the_same_to_the_bit():
    def parameters(*, with_tracer):
        torch.manual_seed(0)
        model = MODELS["transformer"]().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        traced = MemoryTracer().trace(model, optimizer) if with_tracer else nullcontext()
        with traced, sdpa_kernel(SDPBackend.MATH):  # the others may add up in another order each time
            train_step(model, optimizer)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    pairs = zip(parameters(with_tracer=True), parameters(with_tracer=False), strict=True)
    assert all(torch.equal(with_it, without) for with_it, without in pairs)


def test_a_device_that_does_not_exist_is_told():
    model = MODELS["cnn"]()
    with pytest.raises(MemPluginError), MemoryTracer(device="xpu:0").trace(model):
        pass
