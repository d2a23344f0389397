"""torch.compile and the tracers: compiled code stays so after a block, and a block may be inside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin import LineTracer, MemoryTracer

dynamo: Any = pytest.importorskip("torch._dynamo")


@pytest.fixture
def graphs():
    """The graphs that were compiled, by their number of nodes."""
    dynamo.reset()
    yield []
    dynamo.reset()


def compiled(function, graphs):
    def backend(graph, _):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return torch.compile(function, backend=backend)


def double(x):
    return x * 2 + 1


@pytest.mark.parametrize("make", [lambda: MemoryTracer().trace(nn.Linear(3, 3)), LineTracer])
def test_a_function_first_called_inside_a_block_is_compiled_after_it(make, graphs):
    function = compiled(double, graphs)
    with make():
        assert function(torch.ones(3)).sum() == 9
    assert graphs == []
    assert function(torch.ones(3)).sum() == 9
    assert len(graphs) == 1


def test_a_function_compiled_before_the_block_is_not_compiled_again(graphs):
    function = compiled(double, graphs)
    function(torch.ones(3))
    with MemoryTracer().trace(nn.Linear(3, 3)):
        function(torch.ones(3))
    function(torch.ones(3))
    assert len(graphs) == 1


def test_a_compiled_function_may_open_a_block(graphs):
    layer, tracer, lines = nn.Linear(3, 2), MemoryTracer(), LineTracer()

    def step(x):
        x = x * 2
        dynamo.graph_break()
        with tracer.trace(layer), lines:
            return layer(x)

    assert compiled(step, graphs)(torch.ones(4, 3)).shape == (4, 2)
    assert graphs == [3]  # x, x * 2, output
    assert tracer.get_layer_stats()["(root)"].allocated_bytes == 4 * 4 * 2
    assert lines.report().max_bytes > 0
