"""What models and optimizers hold is seen before each step, within few calls, and told where it changed."""

from __future__ import annotations

import gc
from typing import cast

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tb_memplugin.record import profiler_windows
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.profiler.held_storages import HeldByModels, HeldByOptimizer, unique_sightings
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.record.storages import Sighting
from tb_memplugin.trace import Category, TensorMetadata


def held_by(model: nn.Module) -> HeldByModels:
    return HeldByModels({"": model}, ModuleNames.of({"": model}))


def looked(held: HeldByModels) -> list[tuple[Category, str, int]]:
    return [(seen.category, seen.label, seen.bytes) for seen in unique_sightings(held.look())]


def step(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


WEIGHT = (Category.PARAMETER, "weight", 24)
BIAS = (Category.PARAMETER, "bias", 12)


def test_a_model_is_told_once_and_again_where_it_changed():
    model = nn.Linear(2, 3)
    held = held_by(model)
    assert looked(held) == [WEIGHT, BIAS]
    assert looked(held) == []
    step(model)
    assert looked(held) == [
        (Category.GRADIENT, "weight (gradient)", 24),
        (Category.GRADIENT, "bias (gradient)", 12),
    ]
    step(model)  # adds to the gradients where they lie
    assert looked(held) == []


def test_a_gradient_at_the_place_of_the_one_before_is_another():
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = HeldByOptimizer(ModuleNames.of({"": model}))
    for _ in range(5):
        step(model)
        gradient = model.weight.grad
        assert gradient is not None
        seen = list(unique_sightings(held.look(optimizer)))
        assert [(one.address, one.label) for one in seen] == [(gradient.data_ptr(), "weight (gradient)")]
        del gradient
        optimizer.zero_grad()  # the allocator gives the next one the same place


def test_state_is_told_where_it_is_new_or_moved():
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = HeldByOptimizer(ModuleNames.of({"": model}))
    state = optimizer.state[model.weight]

    def told() -> list[tuple[str, int]]:
        return [(seen.label, seen.bytes) for seen in unique_sightings(held.look_at_state(optimizer))]

    state |= {"moment": torch.zeros(6), "steps": 1, "weight": model.weight}
    assert told() == [("weight (moment)", 24)]
    assert told() == []
    state["moment"].data = torch.zeros(7)
    assert told() == [("weight (moment)", 28)]
    state |= {"history": [torch.zeros(2)]}
    assert told() == [("weight (moment)", 28), ("weight (history)", 8)]
    state["history"].append(torch.zeros(3))
    assert ("weight (history)", 12) in told()


@pytest.mark.parametrize("of_weight", [torch.zeros(6), {"moment": torch.zeros(6)}])
def test_state_need_not_be_a_dict_and_its_key_need_not_be_a_parameter(of_weight):
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = cast("dict[object, object]", optimizer.state)
    state |= {model.weight: of_weight, "all": {"scale": torch.zeros(2)}}
    name = "moment" if isinstance(of_weight, dict) else "state"
    expected = [(f"weight ({name})", 0, 24), ("optimizer (scale)", -1, 8)]

    held = HeldByOptimizer(ModuleNames.of({"": model}))
    seen = list(unique_sightings(held.look_at_state(optimizer)))
    assert [(one.label, one.module, one.bytes) for one in seen] == expected

    recorder = WindowRecorder({"": model}, [optimizer])
    recorder.start()
    recorder.stop()
    recorded = recorder.take()
    assert recorded is not None
    assert recorded.problems == []
    found = [one for one in recorded.start if one.category is Category.OPTIMIZER_STATE]
    assert [(one.label, one.module, one.bytes) for one in found] == expected


class Wrapping(torch.Tensor):
    """A class of its own, as DTensor is."""


def test_state_of_a_class_of_its_own_is_told_once():
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = HeldByOptimizer(ModuleNames.of({"": model}))
    for size in (5, 6):
        optimizer.state[model.weight]["moment"] = torch.zeros(size).as_subclass(Wrapping)
        assert [seen.bytes for seen in unique_sightings(held.look_at_state(optimizer))] == [4 * size]
        assert held.look_at_state(optimizer) == []


def test_parameters_moved_replaced_and_put_in_are_seen():
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    held = held_by(model)
    held.look()
    model[0].weight.data = torch.zeros(5, 2)
    assert looked(held) == [(Category.PARAMETER, "0.weight", 40)]
    model[0].weight = nn.Parameter(torch.zeros(7, 2))
    assert [size for _, _, size in looked(held)] == [56]
    model.append(nn.Linear(7, 2, bias=False))
    assert sorted(size for _, _, size in looked(held)) == [56, 56]
    del model[1]
    model.register_buffer("mask", torch.zeros(9))
    assert (Category.BUFFER, "mask", 36) in looked(held)


def test_parameters_that_are_replaced_unheard_have_the_names_of_their_modules():
    """`to_empty` writes new ones past torch's hooks; some may have the ids of old ones."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 5, bias=False)).to("meta")
    held = held_by(model)
    held.look()
    model.to_empty(device="cpu")
    assert looked(held) == [(Category.PARAMETER, "0.weight", 24), (Category.PARAMETER, "1.weight", 60)]


def test_modules_are_not_compared_by_their_own_rules():
    class Odd(nn.Linear):
        __hash__ = nn.Module.__hash__

        def __eq__(self, other):
            raise RuntimeError("not comparable")

    model = Odd(2, 3)
    held = held_by(model)
    assert looked(held) == [WEIGHT, BIAS]
    assert looked(held) == []


def test_a_lazy_parameter_has_its_bytes_in_the_first_step():
    """They tell which of an optimizer's temporaries are for it (`profiler/trace.py`)."""
    model = nn.LazyLinear(3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = HeldByOptimizer(ModuleNames.of({"": model}))
    held.look(optimizer)
    step(model)
    assert held.stepped(optimizer) == [(0, 24)]


def test_memory_shared_by_two_names_is_told_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert looked(held_by(model)) == [(Category.PARAMETER, "0.weight", 64)]


def test_tensors_of_several_storages_are_told_beside_plain_ones():
    model = nn.ParameterList([nn.Parameter(torch.zeros(3))])
    model.register_buffer("sparse", torch.eye(2).to_sparse())  # 2 values of 4 bytes, 2 x 2 indices of 8
    held = held_by(model)
    assert sorted(looked(held)) == sorted(
        [(Category.PARAMETER, "0", 12), (Category.BUFFER, "sparse", 32), (Category.BUFFER, "sparse", 8)]
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_told_too():
    model = torch.jit.script(nn.Linear(2, 3))  # held weakly
    assert looked(held_by(model)) == [WEIGHT, BIAS]


def test_nothing_is_held_alive():
    model = nn.Linear(2, 3)
    held = held_by(model)
    step(model)
    held.look()
    del model
    assert looked(held) == []


def calls_before_a_step(layers: int) -> int:
    """Events of a profile with stacks that our look before an optimizer's step makes."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = WindowRecorder({"": model}, [optimizer])
    watch(recorder)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        step(model)
        optimizer.step()
    taken = recorder.take()
    assert taken is not None
    assert sum(seen.category == Category.GRADIENT for seen in taken.sightings) == 2 * 2 * layers
    pending, found = list(recorded.profiler.kineto_results.experimental_event_tree()), 0
    while pending:
        event = pending.pop()
        pending += event.children
        found += "_before_step" in event.name
        if "_before_step" in event.name:
            inside = list(event.children)
            while inside:
                inner = inside.pop()
                inside += inner.children
                found += 1
    return found


@pytest.fixture
def no_garbage():
    """What other tests left may call functions when it is collected, also in the middle of ours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
def test_a_profile_with_stacks_has_as_few_calls_of_ours_for_many_parameters_as_for_few(monkeypatch):
    monkeypatch.setattr(profiler_windows, "_listeners", {})  # those of other tests look, too
    few, many = calls_before_a_step(2), calls_before_a_step(20)
    assert 0 < few < 150
    assert many == few


def test_what_is_told_is_what_the_tensors_are():
    model = nn.Linear(2, 3, bias=False).to(torch.bfloat16)
    (seen,) = unique_sightings(held_by(model).look())
    weight = model.weight
    assert seen == Sighting(
        *(seen.time_ns, "cpu", weight.data_ptr(), 12, Category.PARAMETER, 0, "weight", "bfloat16"),
        tensor=TensorMetadata("bfloat16", (3, 2), (2, 1)),
    )
