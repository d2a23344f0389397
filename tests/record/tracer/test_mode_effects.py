"""What a peak owes to the dispatch mode is bounded by a note, for the device and for layers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from tb_memplugin import MemoryTracer
from tests.record.tracer.truth import profiled


class Inner(nn.Module):
    """A layer with one weight of 64 x 64 floats whose forward is the given function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.linspace(0.5, 1.5, 4096).view(64, 64)), function

    def forward(self) -> torch.Tensor:
        return self.function(self.weight).sum()


ONES = torch.ones(4096)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gradients that meet": lambda x: (one := x.flatten()) @ ONES + one @ ONES,
    "loss with weights": lambda x: F.binary_cross_entropy_with_logits(x, x.data, pos_weight=torch.ones(64)),
    "product": torch.prod,
    "cumulative product": lambda x: x.cumprod(0),
    "largest values": lambda x: x.topk(10).values,
    "sparse rows": lambda x: F.embedding_bag(torch.arange(60).view(6, 10), x, sparse=True, mode="sum"),
}


def traced(model: Inner) -> MemoryTracer:
    tracer = MemoryTracer()
    outer = nn.Sequential(model)
    with tracer.trace(outer):
        model().backward()
    model.weight.grad = None
    return tracer


def told(tracer: MemoryTracer, pattern: str) -> int:
    """The number of bytes in the only note that matches."""
    (found,) = [match for note in tracer.trace_result().notes if (match := re.search(pattern, note))]
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_peak_that_the_mode_raises_has_a_bound(name):
    model = Inner(FUNCTIONS[name])
    alone = int(profiled(lambda: model().backward()).max())
    model.weight.grad = None
    tracer = traced(model)
    more = int(tracer.trace_result().window(0).max()) - alone
    assert 0 < more <= told(tracer, r"the peak may be up to ([0-9,]+) bytes lower")


def test_a_layer_has_its_own_bound():
    """Two gradients of 16,384 bytes meet: their sum is a third block. The device peaks elsewhere."""
    model, tracer = Inner(lambda x: x.sin() + x.cos()), MemoryTracer()
    outer = nn.Sequential(model)
    with tracer.trace(outer):
        model().backward()
        torch.zeros(100_000)
    layer, root = tracer.get_layer_stats()["0"], tracer.get_layer_stats()["(root)"]
    assert (layer.peak_excess_bytes, root.peak_excess_bytes) == (16384, 16384)
    assert tracer.trace_result().notes == ()
    console = Console(record=True, file=io.StringIO(), width=100)
    tracer.print_summary(console)
    text = console.export_text()
    assert "│ 0      │ ≤ " in text
    assert "≤: without the tracer, this peak may be lower, by 16.00 KiB at most" in text


def test_a_peak_that_the_mode_lowers_has_a_bound():
    """Alone, max() has 4 bytes a gradient and 1 a mask; with a mode it has three masks first."""
    model = Inner(torch.max)
    alone = int(profiled(lambda: model().backward()).max())
    model.weight.grad = None
    tracer = traced(model)
    less = alone - int(tracer.trace_result().window(0).max())
    assert 0 < less <= told(tracer, r"the peak may be up to ([0-9,]+) bytes higher")


def test_a_peak_in_forward_owes_nothing_to_the_mode():
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        x = torch.ones(1000)
        x = x + 1
    assert tracer.trace_result().notes == ()
