"""What is put into a model during a window, or called in another way, has its own name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.profiler import ProfilerAction

from tb_memplugin.record.profiler.window import WindowRecorder
from tb_memplugin.trace import Category, Phase
from tests.record.profiler.test_unusual_loops import STEPS, batch, born, line
from tests.training import train

NOT_IN_THE_CURVE = "parameters, gradients or optimizer state are not in the curve"

dynamo = pytest.importorskip("torch._dynamo")


def once(change):
    """A training step, before the second of which (the first one that is profiled) the model is changed."""
    done = []

    def step(model, optimizer, batch, _):
        done.append(model)
        if len(done) == 3:
            change(model)
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def test_a_module_put_in_during_a_window_owns_what_it_allocates():
    """The new one makes 5 x 7 floats of 5 x 3, and hands 5 x 3 floats back."""
    (cycle,) = train(
        line(100, 3),
        optimizer=torch.optim.SGD,
        batch=batch,
        step=once(lambda model: model.append(nn.Sequential(nn.Linear(3, 7, bias=False)))),
    )
    assert born(cycle, module="1.0", phase=Phase.FORWARD, category=Category.ACTIVATION) == [140] * STEPS
    handed_back = born(cycle, module="1.0", phase=Phase.BACKWARD, category=Category.AUTOGRAD_DETAIL)
    assert handed_back.count(60) == STEPS
    assert born(cycle, module="1.0", category=Category.PARAMETER) == [84]
    assert born(cycle, module="") == []


def test_parameters_of_a_loaded_state_keep_their_names():
    def load(model):
        model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)

    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch, step=once(load))
    assert born(cycle, category=Category.PARAMETER, module="0") == [1200]
    assert cycle.trace.properties["dtype_bytes.parameter.cpu.float32"] == "2400"  # the optimizer has the old
    assert not [note for note in cycle.trace.notes if NOT_IN_THE_CURVE in note]


def test_a_model_that_gets_its_memory_in_a_window_keeps_its_names():
    """Adam keeps two averages of each weight and a count of steps, and makes `sqrt` and `div` of each."""

    def step(model, optimizer, batch, _):
        if model[0].weight.is_meta:
            model.to_empty(device="cpu")
            optimizer.param_groups[0]["params"] = list(model.parameters())
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    (cycle,) = train(
        line(100, 10, 3).to("meta"), batch=batch, step=step, steps=2, plan=lambda _: ProfilerAction.RECORD
    )
    for name, weight in (("0", 4000), ("1", 120)):
        assert born(cycle, category=Category.PARAMETER, module=name) == [weight]
        assert sorted(born(cycle, category=Category.OPTIMIZER_STATE, module=name)) == [4, weight, weight]
        temporary = born(cycle, category=Category.TEMPORARY, phase=Phase.OPTIMIZER, module=name)
        assert temporary.count(weight) == 2 * 2


def test_parameters_that_are_replaced_with_their_optimizer_in_every_step_are_parameters():
    used: list[torch.optim.Optimizer] = []

    def step(model, _optimizer, batch, _):
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        used[:] = [torch.optim.SGD(model.parameters(), lr=0.1)]  # beside the one before, which is gone then
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        used[-1].step()

    (cycle,) = train(line(100, 3), batch=batch, step=step, steps=3, plan=lambda _: ProfilerAction.RECORD)
    assert born(cycle, operator="aten::clone", category=Category.PARAMETER, module="0") == [1200] * 3


def test_parameters_from_before_the_window_that_it_takes_in_are_told_by_their_bytes():
    state = {"0.weight": torch.ones(3, 100)}
    (cycle,) = train(
        line(100, 3),
        optimizer=torch.optim.SGD,
        batch=batch,
        step=once(lambda model: model.load_state_dict(state, assign=True)),
    )
    (note,) = [note for note in cycle.trace.notes if NOT_IN_THE_CURVE in note]
    assert note.startswith("1,200 bytes")


def test_a_module_that_cannot_be_named_is_put_in_all_the_same():
    odd = nn.ReLU()
    vars(odd)["_buffers"] = None  # no table
    model = line(4, 3)
    recorder = WindowRecorder({"": model}, [])
    recorder.start()
    model.append(odd)
    vars(odd)["_buffers"] = {}
    recorder.stop()
    window = recorder.take()
    assert window is not None
    assert len(model) == 2
    assert "NoneType" in next(iter(window.open_problems))


def test_a_module_whose_own_methods_raise_is_named():
    class Odd(nn.Module):
        def named_modules(self, *_, **__):
            raise RuntimeError("no names here")

        named_parameters = children = named_buffers = parameters = named_modules

    model = line(4, 3)
    recorder = WindowRecorder({"": model}, [])
    recorder.start()
    model.append(Odd())
    recorder.stop()
    window = recorder.take()
    assert window is not None
    assert list(window.open_problems) == []
    assert window.names.modules[-1].name == "1"


def test_outside_windows_torch_tells_us_of_no_module():
    model = line(4, 3)
    recorder = WindowRecorder({"": model}, [])
    told = (
        torch_modules._global_module_registration_hooks,
        torch_modules._global_parameter_registration_hooks,
    )
    before = [len(hooks) for hooks in told]
    recorder.start()
    assert [len(hooks) for hooks in told] == [count + 1 for count in before]
    recorder.stop()
    assert [len(hooks) for hooks in told] == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_owns_what_it_allocates():
    """5 x 10 floats go from the scripted layer to the other, and back."""
    model = nn.Sequential(torch.jit.script(nn.Linear(100, 10, bias=False)), nn.Linear(10, 3, bias=False))
    (cycle,) = train(model, optimizer=torch.optim.SGD, batch=batch)
    assert born(cycle, module="0", phase=Phase.FORWARD, category=Category.ACTIVATION) == [200] * STEPS
    assert born(cycle, module="", phase=Phase.FORWARD) == []
    assert born(cycle, module="0", category=Category.GRADIENT) == [4000] * STEPS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 3, bias=False)

    def forward(self, x):
        return self.layer(x).tanh()


def test_what_a_compiled_model_allocates_is_its_modules_if_the_model_itself_was_given():
    """5 x 3 floats leave the layer, and tanh; our hooks, which torch calls, are not compiled."""
    dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled: list[Any] = []

    def step(model, optimizer, batch, _):
        if not compiled:
            compiled.append(torch.compile(model, backend=backend))
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(compiled[0](x), y).backward()
        optimizer.step()

    (cycle,) = train(Net(), optimizer=torch.optim.SGD, batch=batch, step=step)
    assert len(graphs) == 1
    assert born(cycle, module="", phase=Phase.FORWARD, category=Category.ACTIVATION) == [60] * STEPS
    assert 60 in born(cycle, module="", phase=Phase.BACKWARD, category=Category.AUTOGRAD_DETAIL)
    assert born(cycle, category=Category.INPUT) == [2000, 40] * STEPS


def test_what_a_compiled_function_allocates_in_forward_is_activation_of_its_region():
    dynamo.reset()

    @torch.compile(backend="eager")
    def loss(model, x, y):
        return F.cross_entropy(model(x), y)

    def step(model, optimizer, batch, _):
        x, y = batch()
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()

    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch, step=step)
    (region,) = (
        module.key for module in cycle.trace.modules if module.key.startswith("outside:Torch-Compiled")
    )
    assert 60 in born(cycle, module=region, phase=Phase.FORWARD, category=Category.ACTIVATION)
    assert 60 in born(cycle, module=region, phase=Phase.BACKWARD, category=Category.AUTOGRAD_DETAIL)
    assert born(cycle, category=Category.INPUT) == [2000, 40] * STEPS


def test_an_optimizers_step_in_a_compiled_function_is_compiled_without_our_hooks():
    """Dynamo would break the graph at them, and warn of what it cannot trace in them."""
    model = line(100, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()[0]).sum().backward()
    recorder = WindowRecorder({"": model}, [optimizer])
    dynamo.reset()
    dynamo.utils.counters.clear()
    recorder.start()
    try:
        torch.compile(lambda: optimizer.step(), backend="eager")()
    finally:
        recorder.stop()
        dynamo.reset()
    assert dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not [reason for reason in dynamo.utils.counters["graph_break"] if "not know how" in reason]
