"""Bytes of a backward of a backward belong to the module of the node in which their node was made.

The oracle is autograd itself: with anomaly detection, it keeps for each node the one in which it was made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tb_memplugin.record.profiler import node_owners
from tests.record.profiler.test_attribution import GraphOwners, Twice, born_in_nodes
from tests.record.profiler.test_unusual_loops import STEPS, batch, born, line
from tests.training import CNN, train


def penalty(model, x, y, see):
    """A gradient penalty, as of WGAN-GP."""
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total = see(loss + slope.pow(2).sum())
    total.backward()


def product(model, x, y, see):
    """A product with the Hessian: two backwards without an operator between them."""
    weights = list(model.parameters())
    slopes = torch.autograd.grad(see(F.cross_entropy(model(x), y)), weights, create_graph=True)
    torch.autograd.grad([see(slope) for slope in slopes], weights, [torch.ones_like(w) for w in weights])


def third(model, x, y, see):
    """A backward of a backward of a backward."""
    (slope,) = torch.autograd.grad(see(F.cross_entropy(model(x).tanh(), y)), x, create_graph=True)
    (curve,) = torch.autograd.grad(see(slope.pow(2).sum()), x, create_graph=True)
    see(curve.pow(2).sum()).backward()


def maml(model, x, y, see):
    """Two inner steps of gradient descent, through which the outer loss is derived."""
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = see(F.cross_entropy(functional_call(model, weights, x), y))
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {key: w - 0.1 * slope for (key, w), slope in zip(weights.items(), slopes, strict=True)}
    see(F.cross_entropy(functional_call(model, weights, x), y)).backward()


def owners(graph: GraphOwners, roots: list[torch.Tensor]) -> dict[int, str]:
    """The module of each node of second or higher order, by the node's number; "outside" for none."""
    pending: list[Any] = [root.grad_fn for root in roots]
    seen: dict[int, Any] = {}
    while pending:
        node = pending.pop()
        if node is not None and "AccumulateGrad" not in node.name() and node._sequence_nr() not in seen:
            seen[node._sequence_nr()] = node
            pending += [edge for edge, _ in node.next_functions]
    found = {}
    for number, node in seen.items():
        first = node
        while (around := first.metadata.get("parent_")) is not None:
            first = around
        if first is not node:
            found[number] = graph.of.get(first._sequence_nr(), "outside")
    return found


def small() -> nn.Module:
    return nn.Sequential(line(20, 10), nn.Tanh(), line(10, 20))


@pytest.mark.parametrize(
    ("make", "loop", "options"),
    [
        (small, penalty, {}),
        (small, penalty, {"with_stack": True}),
        (small, product, {}),
        (small, third, {}),
        (small, maml, {}),
        (Twice, product, {}),
        (Twice, third, {}),
        (CNN, penalty, {}),
        (CNN, maml, {"with_stack": True}),
    ],
)
def test_a_node_belongs_to_the_module_of_the_node_in_which_autograd_made_it(
    make: Callable[[], Any], loop: Callable[..., None], options: dict[str, Any]
):
    model = make()
    graph = GraphOwners(model)
    truth: dict[int, str] = {}

    def see(total):
        truth.update(owners(graph, [total]))
        return total

    def step(model, optimizer, batch, _):
        x, y = batch()
        optimizer.zero_grad()
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loop(model, x.requires_grad_(), y, see)
        optimizer.step()

    data = CNN.batch if make is CNN else Twice.batch
    (cycle,) = train(model, optimizer=torch.optim.SGD, batch=data, step=step, **options)
    checked = [
        (number, "outside" if key.startswith("outside:") else key, truth[number], size)
        for number, key, size in born_in_nodes(cycle)
        if number in truth
    ]
    assert len(checked) > 10
    assert len({key for _, _, key, _ in checked}) > 2
    assert [row for row in checked if row[1] != row[2]] == []


def slope_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def slope_squared(model, optimizer, batch, _):
    optimizer.zero_grad()
    slope_of(model, batch()[0].requires_grad_()).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"given": False, "with_stack": True}])
def test_a_gradient_penaltys_second_backward_has_modules(options):
    """Tanh has 5 x 10 floats. Of the product with the weight, derived again: as much, and 10 x 100 floats."""
    model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.Tanh())
    (cycle,) = train(model, optimizer=torch.optim.SGD, batch=batch, step=slope_squared, **options)
    product, tanh = ("0", "1") if options == {} else ("Sequential_0.Linear_0", "Sequential_0.Tanh_0")
    second = born(cycle, module=tanh, operator="TanhBackwardBackward0")
    assert sorted(second) == sorted([4, 8, 200, 200, 200] * STEPS)  # 4 and 8 for a scalar
    assert sorted(born(cycle, module=product, operator="MmBackward0")) == sorted(
        [2000, 200, 4000, 2000, 4000] * STEPS  # the slope, the two above, and the first order's own
    )
    named = {key for key in (module.key for module in cycle.trace.modules) if "Backward" in key}
    assert named == set()


def test_a_backward_in_a_modules_forward_is_the_inner_modules():
    """As forces are derived from an energy: the numbers were given in a call of the outer module."""

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(100, 10, bias=False), nn.Tanh())

        def forward(self, x):
            return slope_of(self.energy, x) * 3

    def step(model, optimizer, batch, _):
        optimizer.zero_grad()
        model(batch()[0].requires_grad_()).sum().backward()
        optimizer.step()

    (cycle,) = train(Force(), optimizer=torch.optim.SGD, batch=batch, step=step)
    assert born(cycle, module="energy.1", operator="TanhBackwardBackward0").count(200) == 3 * STEPS
    assert born(cycle, module="", operator="MulBackward0").count(2000) == STEPS  # the 3, after the slope
    assert born(cycle, module="", operator="MmBackward0") == []


def test_a_second_backward_has_modules_if_another_thread_made_some_nodes():
    """Each thread counts its nodes for itself: the second layer's have small numbers."""

    def step(model, optimizer, batch, _):
        x, made = batch()[0].requires_grad_(), []
        thread = threading.Thread(target=lambda: made.append(model[1](x)))
        thread.start()
        thread.join()
        optimizer.zero_grad()
        slope_of(lambda x: model[0](x).sum() + made.pop().sum(), x).pow(2).sum().backward()
        optimizer.step()

    model = nn.ModuleList(nn.Sequential(nn.Linear(100, wide, bias=False), nn.Tanh()) for wide in (10, 20))
    (cycle,) = train(model, optimizer=torch.optim.SGD, batch=batch, step=step)
    for module, size in (("0.1", 200), ("1.1", 400)):
        assert born(cycle, module=module, operator="TanhBackward0") == [size] * 2 * STEPS
        assert born(cycle, module=module, operator="TanhBackwardBackward0").count(size) == 3 * STEPS


def test_a_graph_that_is_kept_for_a_second_backward_has_its_modules():
    def step(model, optimizer, batch, _):
        out = model(batch()[0])
        out.backward(torch.ones(5, 10), retain_graph=True)
        out.backward(torch.ones(5, 10))

    model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.Tanh())
    (cycle,) = train(model, batch=batch, step=step)
    assert born(cycle, module="1", operator="TanhBackward0") == [200] * 2 * STEPS
    assert born(cycle, module="0", operator="MmBackward0") == [4000] * 2 * STEPS


@pytest.mark.parametrize("given", [True, False])
def test_the_operators_of_other_profiles_are_not_read_again(monkeypatch, given):
    def step(model, optimizer, batch, _):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model(x).backward(torch.ones(8, 10))
        optimizer.step()

    monkeypatch.setattr(node_owners, "_read_operators", None)  # not callable
    (cycle,) = train(CNN(), step=step, given=given)
    assert len(cycle.trace.events) > 100
