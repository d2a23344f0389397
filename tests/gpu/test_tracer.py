"""On CUDA the tracer's numbers are the allocator's own, and it costs little. Needs an NVIDIA GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tb_memplugin import MemoryTracer, MemPluginError
from tb_memplugin.analysis import advice
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


def test_ten_threads_lose_no_call_and_count_no_byte_of_another_layer():
    """Each call of the ReLU makes 8 x 4 floats; what the threads make outside of layers is not its own."""
    model, tracer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda(), MemoryTracer()

    def run():
        for _ in range(5):
            model(torch.ones(8, 4, device="cuda"))

    threads = [threading.Thread(target=run) for _ in range(10)]
    with tracer.trace(model):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    relu = tracer.get_layer_stats()["1"]
    assert (relu.calls, relu.total_allocations, relu.allocated_bytes) == (50, 50, 50 * 8 * 4 * 4)


def test_gradients_that_are_zeroed_in_place_are_advised():
    """Three weights of 1000 x 1000 floats: 12 MB of gradients stay during the forward."""
    model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(3))).cuda()
    optimizer, tracer = torch.optim.SGD(model.parameters(), lr=0.1), MemoryTracer()
    x = torch.ones(2000, 1000, device="cuda")
    with tracer.trace(model, optimizer), tracer.track_phase("three steps"):
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    trace = tracer.trace_result()
    assert trace.annotation_names[-1] == "three steps"
    (finding,) = (one for one in advice(trace).findings if one.kind == "kept_gradients")
    assert finding.evidence[0].bytes == 3 * 4 * 1000 * 1000


def test_gradients_that_are_freed_are_not_advised_though_a_workspace_stays():
    """Two weights of 100 x 100 floats: the only thing that backward leaves is what cuBLAS keeps."""
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(2))).cuda()
    optimizer, tracer = torch.optim.SGD(model.parameters(), lr=0.1), MemoryTracer()
    with tracer.trace(model, optimizer):
        for _ in range(3):
            model(torch.ones(8, 100, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (judged,) = (one for one in advice(tracer.trace_result()).judgements if one.kind == "kept_gradients")
    assert (judged.verdict, judged.why[:24]) == ("fine", "Every gradient was freed")


def test_what_the_history_overwrote_counts_as_dropped():
    model, tracer = nn.Linear(4, 4).cuda(), MemoryTracer(max_events=20)
    model(torch.ones(8, 4, device="cuda"))
    counts = ("allocation.all.allocated", "allocation.all.freed")
    before = [torch.cuda.memory_stats()[name] for name in counts]
    with tracer.trace(model):
        for _ in range(50):
            model(torch.ones(8, 4, device="cuda"))
    made, freed = (torch.cuda.memory_stats()[name] - at for name, at in zip(counts, before, strict=True))
    assert made >= 100
    assert len(tracer.events) == 20
    layers = sum(one.event_type not in ("alloc", "free") for one in tracer.result.events())
    assert made + freed <= tracer.dropped_events + 20 <= made + freed + 20 + layers + 2


def test_tracers_that_end_out_of_turn_leave_no_mark():
    model, first, second = nn.Linear(4, 4).cuda(), MemoryTracer(), MemoryTracer()
    blocks = [tracer.trace(model) for tracer in (first, second)]
    for block in blocks:
        block.__enter__()
    model(torch.ones(8, 4, device="cuda"))
    for block in blocks:
        block.__exit__(None, None, None)
    assert torch.cuda.memory._get_memory_metadata() == ""
    assert [one.get_layer_stats()["(root)"].calls for one in (first, second)] == [1, 1]


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
