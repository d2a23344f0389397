"""Training loops that are not forward, backward, step: still every block has phase, owner and category."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerAction, profile, schedule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.trace import Category, Phase
from tests.training import Cycle, train

STEPS = 2
"""How many steps `train` profiles."""


def line(*widths: int) -> nn.Sequential:
    """Linear layers without bias, one behind the other: `line(4, 3, 2)` has weights of 12 and 6 floats."""
    return nn.Sequential(*(nn.Linear(narrow, wide, bias=False) for narrow, wide in pairwise(widths)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(5, 100), torch.zeros(5, dtype=torch.int64)


def born(cycle: Cycle, **wanted: Any) -> list[int]:
    """The bytes of blocks born in the window: with a `phase`, a `category`, a `module`, an `operator`."""
    blocks, trace = cycle.trace.allocations, cycle.trace
    names: dict[str, list[Any]] = {
        "phase": [Phase(int(phase)) for phase in blocks.phase],
        "category": [Category(int(category)) for category in blocks.category],
        "module": [trace.modules[row].key for row in blocks.module],
        "operator": [trace.operators[row] if row >= 0 else "" for row in blocks.operator],
    }
    return [
        int(blocks.bytes[row])
        for row in np.flatnonzero(blocks.born >= 0)
        if all(names[key][row] == value for key, value in wanted.items())
    ]


def with_closure(model, optimizer, batch, _):
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("options", [{}, {"with_stack": True}])
@pytest.mark.parametrize("given", [True, False])
def test_a_forward_in_the_closure_of_an_optimizers_step_is_a_forward(given, options):
    """As Lightning trains. 5 x 10 floats go from one layer to the other, 5 x 3 to the loss."""
    (cycle,) = train(
        line(100, 10, 3), optimizer=torch.optim.SGD, batch=batch, step=with_closure, given=given, **options
    )
    activations = born(cycle, category=Category.ACTIVATION, phase=Phase.FORWARD)
    assert activations.count(200) == STEPS
    assert activations.count(60) >= STEPS
    assert born(cycle, category=Category.INPUT) == [2000, 40] * STEPS
    assert born(cycle, category=Category.UNKNOWN) == []
    assert {Phase(int(phase)) for phase in cycle.trace.phases.phase} >= {Phase.FORWARD, Phase.BACKWARD}


def test_a_loss_in_a_closure_has_the_name_that_it_has_elsewhere():
    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch, step=with_closure)
    names = {module.key for module in cycle.trace.modules if module.key.startswith("outside:")}
    assert {"outside:cross_entropy_loss", "outside:ones_like"} <= names
    assert not [name for name in names if "Backward" in name]


def test_what_an_optimizer_keeps_from_one_closure_to_the_next_is_not_unknown():
    """LBFGS makes its state anew in every step, and holds directions and flat gradients across closures."""

    def lbfgs(parameters, lr):
        return torch.optim.LBFGS(parameters, lr=lr, max_iter=3, history_size=2)

    (cycle,) = train(line(100, 10, 3), optimizer=lbfgs, batch=batch, step=with_closure)
    assert born(cycle, category=Category.UNKNOWN) == []
    flat = 4 * (100 * 10 + 10 * 3)
    assert born(cycle, category=Category.OPTIMIZER_STATE, phase=Phase.OPTIMIZER).count(flat) >= 2 * STEPS


def test_what_one_backward_keeps_for_the_next_is_autograd_detail():
    """A gradient penalty: what `create_graph` saves of the first backward dies in the second."""

    def penalty(model, optimizer, batch, _):
        x = batch()[0].requires_grad_()
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        optimizer.step()

    (cycle,) = train(line(100, 1), optimizer=torch.optim.SGD, batch=batch, step=penalty)
    gradients = born(cycle, category=Category.GRADIENT)
    assert sorted(set(gradients)) == [400, 2000]  # the weight's, and x's slope
    assert born(cycle, phase=Phase.BACKWARD, category=Category.AUTOGRAD_DETAIL).count(20) > STEPS  # tanh's


def test_the_batch_after_an_evaluation_is_input():
    """A forward without gradients leads to no backward. A batch is 5 x 100 floats and 5 labels."""

    def step(model, optimizer, batch, _):
        x, y = batch()
        with torch.no_grad():
            model(x)
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch, step=step)
    assert born(cycle, category=Category.INPUT) == [2000, 40] * 2 * STEPS
    assert born(cycle, module="0", phase=Phase.FORWARD) == [60, 60] * STEPS


def test_a_backward_in_a_modules_forward_is_one_stretch():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = line(100, 3)

        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)[0]

    def step(model, optimizer, batch, _):
        optimizer.zero_grad()
        model(batch()[0]).pow(2).sum().backward()
        optimizer.step()

    (cycle,) = train(Force(), optimizer=torch.optim.SGD, batch=batch, step=step)
    one_step = [Phase.FORWARD, Phase.BACKWARD] * 2 + [Phase.OPTIMIZER]
    assert [Phase(int(phase)) for phase in cycle.trace.phases.phase] == one_step * STEPS


def test_a_forward_in_a_thread_has_its_module_in_backward():
    """Every thread counts its autograd nodes for itself: the second layer's have numbers of the first's."""

    def step(model, optimizer, batch, _):
        x, y = batch()
        made = []
        thread = threading.Thread(target=lambda: made.append(model[1](x)))
        thread.start()
        thread.join()
        optimizer.zero_grad()
        F.cross_entropy(model[0](x) + made.pop(), y).backward()
        optimizer.step()

    model = nn.ModuleList([line(100, 10, 3), line(100, 20, 3)])
    (cycle,) = train(model, optimizer=torch.optim.SGD, batch=batch, step=step)
    passed_on = {"phase": Phase.BACKWARD, "category": Category.AUTOGRAD_DETAIL}
    assert born(cycle, module="0.1", **passed_on) == [200] * STEPS  # 5 x 10 floats
    assert born(cycle, module="1.1", **passed_on) == [400] * STEPS  # 5 x 20 floats
    assert [note for note in cycle.trace.notes if "6 module calls ran on threads" in note]  # 1, 1.0, 1.1


def test_what_autograds_own_threads_recompute_has_its_module():
    """More than 60 checkpoints in one another: autograd goes on in a thread of its own."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Tanh(), nn.Linear(100, 3, bias=False)

        def forward(self, x, depth=62):
            if depth:
                return checkpoint(self.forward, x, depth - 1, use_reentrant=True)
            return self.inner(x)

        def loss(self, x, y):
            return F.cross_entropy(self.outer(self(x.requires_grad_())), y)

    threads = set()

    def step(model, optimizer, batch, _):
        optimizer.zero_grad()
        model.loss(*batch()).backward()
        optimizer.step()

    model = Deep()
    model.inner.register_forward_hook(lambda *_: threads.add(threading.get_ident()))
    (cycle,) = train(model, optimizer=torch.optim.SGD, batch=batch, step=step)
    assert len(threads) == 2
    assert born(cycle, module="inner", operator="TanhBackward0") == [2000] * STEPS


def test_what_a_modules_own_hooks_allocate_belongs_to_it():
    """`torch.nn.utils.weight_norm` makes the weight of 3 x 100 floats before every forward, in a hook."""
    model = line(100, 3)
    torch.nn.utils.weight_norm(model[0])
    (cycle,) = train(model, optimizer=torch.optim.SGD, batch=batch)
    assert born(cycle, phase=Phase.FORWARD, module="0", operator="aten::_weight_norm").count(1200) == STEPS
    assert born(cycle, module="", phase=Phase.FORWARD) == []
    assert born(cycle, module="", phase=Phase.BACKWARD) == []


def test_parameters_that_are_replaced_in_every_step_are_parameters():
    def step(model, optimizer, batch, _):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model[0].weight.data = model[0].weight.data.clone()

    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch, step=step)
    assert born(cycle, operator="aten::clone", category=Category.PARAMETER) == [1200] * STEPS


def test_a_parameter_that_is_emptied_and_filled_elsewhere_is_counted_once():
    """A MiB more in every step, so never where it was. When its first bytes end is not reported."""
    sizes: list[int] = []

    def step(model, *_):
        sizes.append((1 + len(sizes)) << 20)
        model[0].weight.untyped_storage().resize_(0)
        model[0].weight.untyped_storage().resize_(sizes[-1])

    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, step=step, batch=batch)
    blocks, last = cycle.trace.allocations, len(cycle.trace.events) - 1
    assert blocks.bytes[blocks.alive_at(last, 0)].tolist() == [sizes[-1]]
    assert [note.bytes for note in cycle.trace.notes if note.code == "unseen_frees"] == [sizes[-1 - STEPS]]


def test_parameters_that_are_not_made_yet_do_no_harm():
    """A lazy layer makes its own in its first forward; all else is recorded meanwhile."""
    model = nn.ModuleDict({"now": line(100, 3), "later": nn.LazyLinear(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = WindowRecorder({"": model}, [optimizer], finds_all=False)
    recorder.start()
    model["later"](model["now"](torch.ones(1, 100)))
    recorder.stop()
    window = recorder.take()
    assert window is not None
    assert window.problems == []
    assert [seen.label for seen in window.start] == ["now.0.weight"]
    assert len(window.crossings) == 2 * 3


def test_an_optimizers_parameters_are_in_the_start_state_without_a_model():
    model = line(100, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = WindowRecorder({}, [optimizer], finds_all=False)
    recorder.start()
    recorder.stop()
    window = recorder.take()
    assert window is not None
    assert [(seen.bytes, seen.category) for seen in window.start] == [(1200, Category.PARAMETER)]


def test_ranges_of_the_users_own_may_have_the_names_of_torchs():
    def step(model, *_):
        with torch.profiler.record_function("ProfilerStep#warmup"):
            model(batch()[0])
        with torch.profiler.record_function("Optimizer.step#1"):
            model(batch()[0])

    (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch, step=step)
    assert len(cycle.trace.steps) == STEPS
    assert born(cycle, module="0") == [60, 60] * STEPS  # 5 x 3 floats


def test_state_of_an_optimizer_that_was_not_given_is_said_to_be_missing():
    """Two averages of 300 floats and a count of steps, from before the window."""
    model = line(100, 3)
    adam = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    adam.step()
    recorder = WindowRecorder({"": model}, [], finds_all=False)
    problems = []
    for _ in range(2):
        recorder.start()
        adam.step()
        recorder.stop()
        window = recorder.take()
        assert window is not None
        problems.append(window.problems)
    assert "The 2,404 bytes of its state" in problems[0][0]
    assert problems[1] == []


def test_a_dispatch_mode_around_the_loop_hides_no_step():
    """FlopCounterMode, say: torch then opens the steps' ranges inside an event of the mode."""
    with FlopCounterMode(display=False):
        (cycle,) = train(line(100, 3), optimizer=torch.optim.SGD, batch=batch)
    assert [step.number for step in cycle.trace.steps] == [2, 3]
    assert born(cycle, module="0", phase=Phase.FORWARD).count(60) == STEPS  # 5 x 3 floats


@pytest.mark.parametrize("options", [{}, {"with_stack": True}])
def test_a_tensors_hook_does_not_take_its_nodes_module_away(options):
    """torch numbers a node by the event after its start: here that is the hook's. 5 x 10 floats."""

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = line(100, 10), line(10, 3)

        def forward(self, x):
            x = self.first(x).tanh()
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 2)
            return self.last(x)

    (cycle,) = train(Hooked(), optimizer=torch.optim.SGD, batch=batch, **options)
    assert born(cycle, operator="aten::mul", module="").count(200) == STEPS
    assert born(cycle, operator="TanhBackward0", module="").count(200) == STEPS


def profiled(
    recorder: WindowRecorder, plan: Callable[[int], ProfilerAction], loop: Callable[..., None]
) -> Cycle:
    """The one window of a loop of its own, which gets the profile."""
    cycles = []
    watch(recorder)

    def ready(prof):
        window = recorder.take()
        assert window is not None
        cycles.append(Cycle(trace_from_profile(prof, window), [], {}, {}, {}, None))

    with profile(profile_memory=True, schedule=plan, on_trace_ready=ready) as prof:
        loop(prof)
    (cycle,) = cycles
    return cycle


def test_steps_that_a_profile_numbers_alike_are_told_apart():
    """As Lightning's PyTorchProfiler does, which counts validation and training apart."""
    record = [ProfilerAction.RECORD] * 2
    plan = iter([ProfilerAction.WARMUP, *record, ProfilerAction.RECORD_AND_SAVE, ProfilerAction.NONE])

    def loop(prof):
        for number in (0, 1, 1, 2):
            prof.step_num = number
            prof.step()
            torch.ones(100)

    trace = profiled(WindowRecorder({}, []), lambda _: next(plan), loop).trace
    assert [step.number for step in trace.steps] == [1, 3, 2]
    assert "The profile has several steps 2: an earlier one is shown as 3." in trace.notes


@pytest.fixture
def one_of_two():
    """The first rank of a group of two, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_what_fsdp2_gathers_is_communication_of_the_module_that_it_gathers(one_of_two):
    """`0` has 1,000 floats, which the last node of `1` gathers; `1` has 40. Activations: 5 x 10 and 5 x 4."""
    model = line(100, 10, 4)
    for layer in (*model, model):
        fully_shard(layer, mesh=one_of_two, reshard_after_forward=True)

    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def loop(prof):
        for _ in range(3):
            F.cross_entropy(model(batch()[0]), batch()[1]).backward()
            optimizer.step()
            prof.step()

    cycle = profiled(
        WindowRecorder({"": model}, [optimizer]), schedule(wait=0, warmup=1, active=2, repeat=1), loop
    )
    for module, size in (("0", 4000), ("1", 160)):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            gathered = born(cycle, category=Category.COMMUNICATION, module=module, phase=phase)
            assert gathered.count(size) >= 2, (module, phase, gathered)
    assert born(cycle, category=Category.ACTIVATION, module="0") == [200] * 2
    assert born(cycle, category=Category.ACTIVATION, module="1") == [80] * 2
    assert born(cycle, operator="aten::sqrt", module="0") == [2000] * 2  # a half of its state is here
    assert not [module.key for module in cycle.trace.modules if module.key.endswith("Backward0")]
