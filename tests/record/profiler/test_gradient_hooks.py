"""Where a gradient is added to a parameter's, hooks may run: what they allocate has its own operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tb_memplugin.trace import Category, Phase
from tests.record.profiler.test_unusual_loops import STEPS, batch, born, line
from tests.training import train


def test_an_optimizers_step_in_a_hook_of_backward_is_the_optimizers_phase():
    """RMSprop takes the root of its average of 300 floats: 1,200 bytes that die in the step."""

    def in_backward(model, optimizer, batch, _):
        if not hooked:
            hooked.append(
                model[0].weight.register_post_accumulate_grad_hook(
                    lambda _: (optimizer.step(), optimizer.zero_grad(), None)[2]
                )
            )
        x, y = batch()
        F.cross_entropy(model(x), y).backward()

    hooked: list[Any] = []

    def rmsprop(parameters, lr):
        return torch.optim.RMSprop(parameters, lr=lr, foreach=False)

    (cycle,) = train(line(100, 3), optimizer=rmsprop, batch=batch, step=in_backward)
    roots = born(cycle, phase=Phase.OPTIMIZER, category=Category.TEMPORARY, operator="aten::sqrt")
    assert roots == [1200] * STEPS
    assert born(cycle, category=Category.GRADIENT) == [1200] * STEPS
    assert born(cycle, category=Category.UNKNOWN) == []


def test_what_a_hook_of_a_gradient_allocates_has_its_operator_and_dies_in_the_node():
    """A plain step: a product of 300 floats, which is freed when the hook returns."""

    def descend(weight):
        weight.data.sub_(weight.grad * 0.1)

    def step(model, optimizer, batch, _):
        x, y = batch()
        hook = model[0].weight.register_post_accumulate_grad_hook(descend)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        hook.remove()

    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch, step=step)
    assert born(cycle, operator="aten::mul", category=Category.TEMPORARY).count(1200) == STEPS


def test_a_gradient_that_is_copied_without_hooks_is_accumulated():
    """The gradient of a sum is one number, expanded: autograd makes 300 floats of it."""

    def step(model, *_):
        model[0].weight.grad = None
        model[0].weight.sum().backward()

    (cycle,) = train(line(100, 3), batch=batch, step=step)
    assert born(cycle, operator="torch::autograd::AccumulateGrad") == [1200] * STEPS
    assert born(cycle, category=Category.GRADIENT) == [1200] * STEPS
