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


def on_threads(count, run):
    """Call a function on several threads at once, and wait for them."""
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_ten_threads_lose_no_call_and_count_no_byte_of_another_layer():
    """Each call of the ReLU makes 8 x 4 floats; what the threads make outside of layers is not its own."""
    model, tracer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda(), MemoryTracer()

    def run():
        for _ in range(5):
            model(torch.ones(8, 4, device="cuda"))

    with tracer.trace(model):
        on_threads(10, run)
    relu = tracer.get_layer_stats()["1"]
    assert (relu.calls, relu.total_allocations, relu.allocated_bytes) == (50, 50, 50 * 8 * 4 * 4)


class Waits(torch.autograd.Function):
    """In backward, lets another thread allocate 7,000 bytes while it waits, then allocates 5,000 itself."""

    @staticmethod
    def forward(ctx, x, ask, answer):
        ctx.events = ask, answer
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ask, answer = ctx.events
        ask.set()
        assert answer.wait(30)
        torch.empty(5000, dtype=torch.uint8, device="cuda")
        return gradient * 1, None, None


class Waiting(nn.Module):
    def __init__(self):
        super().__init__()
        self.ask, self.answer = threading.Event(), threading.Event()

    def forward(self, x):
        return Waits.apply(x, self.ask, self.answer)

    def allocate_meanwhile(self):
        assert self.ask.wait(30)
        self.kept = torch.empty(7000, dtype=torch.uint8, device="cuda")
        self.answer.set()


def mark_of_autograds_thread():
    """Return the mark on the thread that runs the backward of this GPU's tensors."""
    seen = []
    x = torch.ones(1, device="cuda", requires_grad=True)
    x.register_hook(lambda _: seen.append(torch.cuda.memory._get_memory_metadata()))
    x.sum().backward()
    return seen[0]


def bytes_of(tracer, layer):
    """Return the sizes of the layer's allocations that a test made itself: thousands of bytes."""
    events = (one for one in tracer.result.events() if one.event_type == "alloc")
    return [one.size_bytes for one in events if one.layer_name == layer and one.size_bytes % 1000 == 0]


def test_a_layers_backward_has_not_what_other_threads_allocate_meanwhile():
    waiting, tracer = Waiting(), MemoryTracer()
    model = nn.Sequential(nn.Linear(3, 3), waiting, nn.Linear(3, 3)).cuda()
    other = threading.Thread(target=waiting.allocate_meanwhile)
    with tracer.trace(model):
        other.start()
        model(torch.ones(3, 3, device="cuda")).sum().backward()
        other.join()
    assert bytes_of(tracer, "1") == [5000]
    assert bytes_of(tracer, None) == [7000]
    assert mark_of_autograds_thread() == ""


def test_a_block_that_ends_during_another_threads_backward_does_not_wait_for_it():
    waiting = Waiting()
    model = nn.Sequential(nn.Linear(3, 3), waiting).cuda()
    with MemoryTracer().trace(model):
        loss = model(torch.ones(3, 3, device="cuda")).sum()
        other = threading.Thread(target=loss.backward)
        other.start()
        assert waiting.ask.wait(30)
    waiting.answer.set()  # only now may the backward go on
    for thread in (other, *(one for one in threading.enumerate() if one.name == "tb_memplugin marks")):
        thread.join(30)
        assert not thread.is_alive()
    assert mark_of_autograds_thread() == ""


def test_backward_on_the_calling_thread_is_found_by_time():
    waiting, tracer = Waiting(), MemoryTracer()
    model = nn.Sequential(nn.Linear(3, 3), waiting).cuda()
    waiting.answer.set()
    with tracer.trace(model), torch.autograd.set_multithreading_enabled(False):
        model(torch.ones(3, 3, device="cuda")).sum().backward()
        mark = torch.cuda.memory._get_memory_metadata()
    assert bytes_of(tracer, "1") == [5000]
    assert mark == ""


def test_a_backward_that_fails_leaves_no_mark():
    class Fails(nn.Module):
        def forward(self, x):
            x.register_hook(lambda _: 1 / 0)
            return x * 1

    model = nn.Sequential(Fails(), nn.Linear(3, 3)).cuda()
    with MemoryTracer().trace(model), pytest.raises(ZeroDivisionError):
        model(torch.ones(3, 3, device="cuda", requires_grad=True) * 1).sum().backward()
    assert mark_of_autograds_thread() == ""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_mark_that_is_left_on_another_gpus_thread_names_nothing():
    """The backward of `exp` runs first on the second GPU, where the step before left its mark."""

    class Moves(nn.Module):
        def forward(self, x):
            return x.to("cuda:1") * 1

    model, tracer = nn.Sequential(nn.Linear(3, 3).cuda(), Moves()), MemoryTracer(device="cuda:1")
    torch.ones(1, device="cuda:1")
    with tracer.trace(model):
        for _ in range(2):
            model(torch.ones(1000, 3, device="cuda")).exp().sum().backward()
    trace = tracer.trace_result()
    blocks, here = trace.allocations, trace.device_row("cuda:1")
    made = (blocks.bytes == 12_000) & (blocks.device == here) & (blocks.born >= 0)
    modules = [trace.modules[row].key for row in blocks.module[made]]
    of_a_step = ["1", "1", "(not named)", "(not named)", "1"]  # moved, * 1, exp; backward: exp, * 1
    assert modules == 2 * of_a_step


class Takes(torch.autograd.Function):
    """In backward, allocates some bytes and frees them."""

    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ctx.size, dtype=torch.uint8, device=gradient.device)
        return gradient * 1, None


class Taking(nn.Module):
    """A layer whose backward has a node of its own behind that of its result."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return Takes.apply(x, self.size) * 1


def test_backward_passes_of_two_threads_have_each_its_own_layers():
    """Fifty each, so that some run at the same time, on one thread of autograd; the loss has 7,000 bytes."""
    model, tracer = nn.Sequential(nn.Linear(3, 3), Taking(3000), Taking(5000)).cuda(), MemoryTracer()
    begun = threading.Barrier(2)

    def run():
        loss = Takes.apply(model(torch.ones(3, 3, device="cuda")), 7000).sum()
        begun.wait(30)
        for _ in range(50):
            loss.backward(retain_graph=True)

    with tracer.trace(model):
        on_threads(2, run)
    assert [bytes_of(tracer, name) for name in ("1", "2", None)] == [[3000] * 100, [5000] * 100, [7000] * 100]
    assert not any("A backward of one thread" in note for note in tracer.trace_result().notes)
    assert vars(torch.autograd)["_engine_run_backward"] is vars(torch.autograd.graph)["_engine_run_backward"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_replicas_on_two_gpus_have_each_its_own_bytes(device):
    model = nn.DataParallel(nn.Sequential(nn.Linear(3, 3), Taking(3000), Taking(5000)).cuda(), [0, 1])
    tracer = MemoryTracer(device=device)
    model(torch.ones(4, 3, device="cuda"))  # so that both GPUs are in use
    with tracer.trace(model):
        for _ in range(20):
            model(torch.ones(4, 3, device="cuda")).sum().backward()
    assert [bytes_of(tracer, name) for name in ("module.1", "module.2", None)] == [
        [3000] * 20,
        [5000] * 20,
        [],
    ]


def test_a_backward_that_began_before_another_thread_had_layers_is_noted():
    """The first waits in its backward until the second one has begun."""
    waiting, tracer = Waiting(), MemoryTracer()
    model = nn.Sequential(nn.Linear(3, 3), waiting).cuda()

    def first():
        model(torch.ones(3, 3, device="cuda")).sum().backward()

    other = threading.Thread(target=first)
    with tracer.trace(model):
        other.start()
        assert waiting.ask.wait(30)
        loss = model[0](torch.ones(3, 3, device="cuda")).sum()
        threading.Timer(0.5, waiting.answer.set).start()
        loss.backward()
        other.join()
    assert any("A backward of one thread ran" in note for note in tracer.trace_result().notes)


def test_a_backward_within_a_backward_is_no_other_threads():
    model, tracer = MODELS["reentrant"]().cuda(), MemoryTracer()
    with tracer.trace(model):
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not any("A backward of one thread" in note for note in tracer.trace_result().notes)
    assert mark_of_autograds_thread() == ""


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
    judgements = advice(tracer.trace_result()).judgements
    (judged,) = (one for one in judgements if (one.kind, one.device) == ("kept_gradients", "cuda:0"))
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
