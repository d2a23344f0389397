"""On a GPU, a backward of a backward has the modules that it has on the CPU. Needs an NVIDIA GPU.

On the CPU they are compared with autograd itself: tests/record/profiler/test_second_order.py. On a GPU,
autograd's own thread makes the nodes of the second backward, and counts them by itself.
"""

from __future__ import annotations

from itertools import product as product_of

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.trace import MemoryTrace, Phase
from tests.record.profiler.test_attribution import Twice
from tests.record.profiler.test_second_order import maml, penalty, product, slope_of, small, third

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


class Checkpointed(nn.Module):
    """What `layers` computes is computed again in each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


def recorded(model: nn.Module, step, *, given: bool = True, **options) -> MemoryTrace:
    recorder = WindowRecorder({"": model} if given else {}, [])
    step()  # threads and their counters have run before
    watch(recorder)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, **options) as prof:
        step()
        step()
    window = recorder.take()
    assert window is not None
    return trace_from_profile(prof, window)


def in_nodes(trace: MemoryTrace) -> set[tuple[str, str]]:
    """(node, module) of the blocks that were allocated in nodes with a backward of their own."""
    blocks = trace.allocations
    rows = [row for row in range(len(blocks)) if blocks.phase[row] == Phase.BACKWARD]
    pairs = {(trace.operators[blocks.operator[row]], trace.modules[blocks.module[row]].key) for row in rows}
    return {pair for pair in pairs if pair[0].endswith("Backward0")}


@pytest.mark.parametrize(
    ("make", "loop"),
    [*product_of([small, Checkpointed], [penalty, product, third, maml]), (Twice, product), (Twice, third)],
)
def test_nodes_have_the_modules_that_they_have_on_the_cpu(make, loop):
    torch.manual_seed(0)
    found = []
    for device in ("cpu", "cuda"):
        model = make().to(device)
        x = torch.randn(5, 20, device=device, requires_grad=True)
        y = torch.zeros(5, dtype=torch.int64, device=device)
        found.append(in_nodes(recorded(model, lambda: loop(model, x, y, lambda total: total))))  # noqa: B023
    on_cpu, on_gpu = found
    names = {name for name, _ in on_cpu} & {name for name, _ in on_gpu}  # kernels differ
    assert len(names) > 3
    assert {pair for pair in on_gpu if pair[0] in names} == {pair for pair in on_cpu if pair[0] in names}


@pytest.mark.parametrize("given", [True, False])
def test_the_second_backward_of_a_tanh_is_the_tanhs(given):
    """Tanh has 128 x 16 floats: 8192 bytes; its second backward makes three products of them."""
    model = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Tanh()).cuda()
    x = torch.randn(128, 64, device="cuda", requires_grad=True)
    trace = recorded(
        model, lambda: slope_of(model, x).pow(2).sum().backward(), given=given, with_stack=not given
    )
    blocks = trace.allocations
    sizes = [
        int(blocks.bytes[row])
        for row in range(len(blocks))
        if trace.operators[blocks.operator[row]] == "TanhBackwardBackward0"
        and trace.modules[blocks.module[row]].key == ("1" if given else "Sequential_0.Tanh_0")
    ]
    assert sizes.count(8192) == 3 * 2


def test_an_ordinary_backward_asks_torch_for_no_threads(monkeypatch):
    def refuse(_):
        raise AssertionError

    monkeypatch.setattr("tb_memplugin.record.profiler.trace.forward_threads", refuse)
    model = small().cuda()
    x = torch.randn(5, 20, device="cuda")

    def step():
        F.cross_entropy(model(x), torch.zeros(5, dtype=torch.int64, device="cuda")).backward()

    assert len(recorded(model, step).events) > 10
