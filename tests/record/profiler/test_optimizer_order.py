"""An optimizer's temporaries belong to the owner of the parameter for which they were made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tb_memplugin.record.provenance import temporaries_in_order
from tb_memplugin.trace import Category, Phase
from tests.record.profiler.test_unusual_loops import STEPS, batch, born, line
from tests.training import train


def owners(*allocations, parameters):
    """The owner of each allocation, told as (operator, its call, bytes), in a step over (owner, bytes)."""
    operator, call, size = np.array(allocations, np.int64).T
    return temporaries_in_order(size, operator.astype(np.int32), call, parameters).tolist()


def test_operators_that_repeat_for_each_parameter_are_the_parameters():
    """Operator 1 makes one as large as the parameter, operator 2 two smaller ones for the first only."""
    step = [(1, 10, 400), (2, 11, 40), (2, 11, 20), (1, 20, 80), (2, 21, 8)]
    assert owners(*step, parameters=[(5, 400), (6, 80)]) == [5, 5, 5, 6, 6]


def test_parameters_of_one_size_follow_each_other():
    """Two square roots for each, as Adadelta takes: not each first, then each second."""
    step = [(1, 10, 400), (1, 11, 400), (1, 20, 400), (1, 21, 400)]
    assert owners(*step, parameters=[(5, 400), (6, 400)]) == [5, 5, 6, 6]


def test_one_operator_for_all_parameters_tells_them_by_their_order():
    step = [(1, 10, 400), (1, 10, 80), (2, 11, 8), (2, 11, 8), (3, 12, 8)]
    assert owners(*step, parameters=[(5, 400), (6, 80)]) == [5, 6, -1, -1, -1]


def test_two_foreach_operators_are_not_two_parameters():
    step = [(1, 10, 400), (1, 10, 400), (1, 11, 400), (1, 11, 400)]
    assert owners(*step, parameters=[(5, 400), (6, 400)]) == [5, 6, 5, 6]


@pytest.mark.parametrize(
    "step",
    [
        [(1, 10, 400), (2, 11, 40), (1, 20, 80)],  # the second parameter has fewer operators
        [(1, 10, 400), (1, 20, 40)],  # and is not as large
    ],
)
def test_what_sizes_and_operators_do_not_prove_is_nobodys(step):
    assert -1 in owners(*step, parameters=[(5, 400), (6, 80)])


def test_all_is_the_owners_where_there_is_only_one():
    """Whatever its size: an optimizer of its own for each parameter, or one for a single module."""
    step = [(1, 10, 400), (2, 11, 8), (3, 12, 40)]
    assert owners(*step, parameters=[(5, 400)]) == [5, 5, 5]
    assert owners(*step, parameters=[(5, 80), (5, 400)]) == [5, 5, 5]


def test_nothing_is_owned_where_there_is_no_gradient():
    assert owners((1, 10, 400), parameters=[]) == [-1]


def test_two_models_of_one_shape_keep_the_temporaries_of_their_optimizers_apart():
    """The root of an average of 300 floats, for each of two optimizers that step in turn."""

    def both(parameters, lr):
        return torch.optim.RMSprop(parameters, lr=lr, foreach=False)

    def step(model, optimizer, batch, _):
        x, y = batch()
        F.cross_entropy(model["a"](x) + model["b"](x), y).backward()
        optimizer.step()
        other.step()
        model.zero_grad()

    model = nn.ModuleDict({"a": line(100, 3), "b": line(100, 3)})
    other = both(model["b"].parameters(), 0.01)
    (cycle,) = train(model, optimizer=lambda _, lr: both(model["a"].parameters(), lr), batch=batch, step=step)
    for module in ("a.0", "b.0"):
        temporary = born(cycle, module=module, phase=Phase.OPTIMIZER, category=Category.TEMPORARY)
        assert temporary.count(1200) == STEPS, module


def test_parameters_without_a_gradient_have_no_temporaries():
    """Of 10 x 100 and 3 x 10 floats, the first are frozen."""
    model = line(100, 10, 3)
    model[0].weight.requires_grad_(False)

    def rmsprop(parameters, lr):
        return torch.optim.RMSprop(parameters, lr=lr, foreach=False)

    (cycle,) = train(model, optimizer=rmsprop, batch=batch)
    assert born(cycle, module="1", phase=Phase.OPTIMIZER, operator="aten::sqrt") == [120] * STEPS


def test_all_that_muon_allocates_belongs_to_the_parameters_owner():
    def muon(parameters, lr):
        return torch.optim.Muon(parameters, lr=lr)

    (cycle,) = train(line(100, 10, 3), optimizer=muon, batch=batch)
    everything = born(cycle, phase=Phase.OPTIMIZER, category=Category.TEMPORARY)
    owned = [
        size
        for module in ("0", "1")
        for size in born(cycle, phase=Phase.OPTIMIZER, category=Category.TEMPORARY, module=module)
    ]
    assert len(everything) > 50
    assert sorted(owned) == sorted(everything)


class Noisy(torch.optim.SGD):
    """Makes 7 floats twice before its base class steps."""

    def step(self, closure=None):
        torch.ones(7).exp()
        return super().step(closure)


def test_what_a_step_makes_before_that_of_its_base_class_is_in_the_step():
    torch.optim.SGD([torch.ones(1)])  # torch then tells of the steps of this class, too
    (cycle,) = train(line(100, 3), optimizer=Noisy, batch=batch)
    assert born(cycle, phase=Phase.OPTIMIZER, module="0").count(28) == 2 * STEPS
