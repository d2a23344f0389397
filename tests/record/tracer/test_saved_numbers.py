"""Numbers that autograd keeps for the backward live as long as it keeps them: the profiler's bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tb_memplugin import MemoryTracer
from tb_memplugin.record.tracer.kernels import numbers_in
from tb_memplugin.trace import Category, Kind

CPU = 0
aten = torch.ops.aten


def traced(run) -> MemoryTracer:
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        run()
    return tracer


def sizes(tracer) -> list[int]:
    events = tracer.trace_result().events
    return np.where(events.kind == Kind.ALLOC, events.bytes, -events.bytes).tolist()


def test_a_number_that_autograd_saves_lives_until_the_node_goes():
    x = torch.ones(100, requires_grad=True)

    def run():
        out = x * 2.0
        torch.ones(50)
        del out

    tracer = traced(run)
    # the number, the kernel's own of it, the product; the ones come and go while autograd keeps the number
    assert sizes(tracer)[:6] == [8, 4, 400, -4, 200, -200]
    assert sorted(sizes(tracer)[6:]) == [-400, -8]
    assert tracer.trace_result().events.category[0] == Category.ACTIVATION


def test_a_number_that_nothing_needs_later_goes_with_its_operator():
    x = torch.ones(100, requires_grad=True)
    assert sizes(traced(lambda: x + 2.0)) == [8, 4, 400, -4, -8, -400]
    with torch.no_grad():
        assert sizes(traced(lambda: x * 2.0)) == [8, 4, 400, -4, -8, -400]
    assert sizes(traced(lambda: x.detach() * 2.0)) == [8, 4, 400, -4, -8, -400]


def test_backward_gives_saved_numbers_back():
    x, kept = torch.ones(100, requires_grad=True), []

    def run():
        kept.append(((x / 3.0) * 2).sum())
        kept[0].backward()

    live = traced(run).trace_result().live(CPU)
    assert int(live[-1]) - int(live[0]) == 4 + 400  # the sum, and the gradient


def test_hooks_on_saved_tensors_change_nothing():
    x, kept = torch.ones(100, requires_grad=True), []

    def run():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            kept.append(x * 2.0)

    live = traced(run).trace_result().live(CPU)
    assert int(live[-1]) - int(live[0]) == 8 + 400


def test_only_where_an_operator_takes_a_tensor_does_a_number_become_one():
    x = torch.ones(3, requires_grad=True)
    assert numbers_in(aten.mul.Tensor, (x, 2.0)) == [8]
    assert numbers_in(aten.mul.Tensor, (x, True)) == [1]
    assert numbers_in(aten.mul.Tensor, (x, 1j)) == [16]
    assert numbers_in(aten.mul.Tensor, (x, x)) == []
    assert numbers_in(aten.pow.Tensor_Scalar, (x, 2)) == []
    assert numbers_in(aten.sum.dim_IntList, (x, [0])) == []
    assert numbers_in(len, (x, 2)) == []


def test_a_number_is_not_waited_for_where_nothing_needs_a_gradient():
    assert numbers_in(aten.mul.Tensor, (torch.ones(3), 2.0)) == []
