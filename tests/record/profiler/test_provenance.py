"""What blocks are that programs keep, in loops as people write them: caches, copies, state in objects."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import MemoryTracer
from tb_memplugin.analysis import why
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.trace import Category, MemoryTrace, Reason
from tests.training import MODELS, train

CALLS = 6


class Attention(nn.Module):
    """One head. `cache` has the keys and values of earlier calls."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, cache=None):
        query, key, value = self.mix(x).chunk(3, -1)
        if cache is not None:
            key, value = torch.cat([cache[0], key], 1), torch.cat([cache[1], value], 1)
        return self.out((query @ key.transpose(1, 2)).softmax(-1) @ value), (key, value)


def generate(model):
    with torch.no_grad():
        x, cache = torch.randn(2, 4, 8), None
        for _ in range(CALLS):
            y, cache = model(x, cache)
            x = y[:, -1:]


def profiled(model, loop) -> MemoryTrace:
    recorder = WindowRecorder({"": model}, [])
    watch(recorder)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loop(model)
    window = recorder.take()
    assert window is not None
    return trace_from_profile(prof, window)


def traced(model, loop) -> MemoryTrace:
    tracer = MemoryTracer()
    with tracer.trace(model):
        loop(model)
    return tracer.trace_result()


def sizes(trace, category):
    blocks = trace.allocations
    return blocks.bytes[(blocks.category == category) & (blocks.born >= 0)].tolist()


@pytest.mark.parametrize("record", [profiled, traced], ids=["handler", "tracer"])
def test_what_a_list_keeps_is_no_input_in_the_last_steps_either(record):
    kept = []

    def loop(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            x, target = torch.randn(2, 20), torch.randn(2, 5)
            kept.append(torch.randn(3, 5))
            (model(x) - target).square().mean().backward()
            optimizer.step()

    trace = record(nn.Linear(20, 5), loop)
    assert sizes(trace, Category.UNKNOWN).count(60) == 6
    assert sizes(trace, Category.INPUT) == [160, 40] * 6


@pytest.mark.parametrize("record", [profiled, traced], ids=["handler", "tracer"])
def test_keys_and_values_of_a_loop_by_hand_are_caches(record):
    trace = record(Attention().eval(), generate)
    lengths = [4 + call for call in range(1, CALLS)]
    rows = np.flatnonzero(trace.allocations.reason == Reason.GROWN)
    assert trace.allocations.bytes[rows].tolist() == [
        2 * length * 8 * 4 for length in lengths for _ in range(2)
    ]
    row = int(rows[0])
    assert why(trace, row) == (
        f"cache: grows by 64 bytes a call, in {CALLS - 2} calls, "
        "where each block replaces that of the call before"
    )


@pytest.mark.parametrize("record", [profiled, traced], ids=["handler", "tracer"])
def test_the_caches_of_transformers_are_caches(record):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=20
    )
    model = transformers.LlamaForCausalLM(config).eval()

    def loop(one):
        one.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=8, min_new_tokens=8)

    trace = record(model, loop)
    found = sizes(trace, Category.CACHE)
    token = 16 * 4
    assert {size % token for size in found} == {0}
    assert [found.count(size * token) for size in range(6, 12)] == [4] * 6  # keys and values of two layers


def test_what_a_module_returns_and_receives_again_is_a_cache():
    """The first keys and values are parts of what `mix` made."""
    trace = profiled(Attention().eval(), generate)
    blocks = trace.allocations
    first = int(np.flatnonzero(blocks.reason == Reason.PASSED_BACK)[0])
    assert (trace.modules[blocks.module[first]].key, int(blocks.bytes[first])) == ("mix", 2 * 4 * 24 * 4)
    assert why(trace, first) == (
        "cache (input of (root)): a module returned it, and received it again in its next call"
    )


def test_results_that_a_loop_collects_are_no_cache():
    def collect(model):
        with torch.no_grad():
            found = torch.empty(0, 8)
            for _ in range(CALLS):
                found = torch.cat([found, model(torch.randn(1, 4, 8))[0][0]])

    assert sizes(profiled(Attention().eval(), collect), Category.CACHE) == []


@pytest.mark.parametrize("trains", [False, True])
def test_batches_that_grow_are_inputs_in_training(trains):
    """Each is 64 bytes larger than the one before, which lives until it is replaced."""

    def loop(model):
        for call in range(CALLS):
            batch = torch.ones(1, 4 + 2 * call, 8)
            with torch.set_grad_enabled(trains):
                loss = model(batch)[0].sum()
            if trains:
                loss.backward()

    trace = profiled(Attention(), loop)
    batches = np.isin(trace.allocations.bytes, [4 * 8 * (4 + 2 * call) for call in range(CALLS)])
    entered = batches & np.isin(trace.allocations.category, [Category.INPUT, Category.CACHE])
    expected = Category.INPUT if trains else Category.CACHE
    assert trace.allocations.category[entered].tolist() == [expected] * CALLS


def net():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.BatchNorm1d(30), nn.Linear(30, 5))


def keeps_best(model, kept):
    kept["best"] = {name: one.clone() for name, one in model.state_dict().items()}


def keeps_deepcopy(model, kept):
    kept["copy"] = copy.deepcopy(model)


def keeps_ema(model, kept):
    if "ema" not in kept:
        kept["ema"] = [one.detach().clone() for one in model.parameters()]
    for shadow, one in zip(kept["ema"], model.parameters(), strict=True):
        shadow.lerp_(one.detach(), 0.1)


WEIGHTS = [20 * 30 * 4, 30 * 4, 30 * 4, 30 * 4, 30 * 5 * 4, 5 * 4]
WITH_BUFFERS = [*WEIGHTS[:4], 30 * 4, 30 * 4, 8, *WEIGHTS[4:]]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(keeps_best, WITH_BUFFERS * 2), (keeps_deepcopy, WITH_BUFFERS * 2), (keeps_ema, WEIGHTS)],
    ids=["state dict", "deepcopy", "ema"],
)
def test_copies_of_a_models_weights_are_told(keep, expected):
    kept: dict[str, object] = {}

    def step(model, optimizer, batch, _):
        nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(0, 5, (8,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.state[model[0].weight]["step"] > 2:  # in the window
            keep(model, kept)

    (cycle,) = train(net(), batch=lambda: (torch.zeros(0), torch.zeros(0)), step=step)
    assert sizes(cycle.trace, Category.PARAMETER_COPY) == expected
    blocks = cycle.trace.allocations
    row = int(np.flatnonzero(blocks.category == Category.PARAMETER_COPY)[0])
    assert cycle.trace.labels[blocks.label[row]] == "copy of 0.weight"
    assert cycle.trace.modules[blocks.module[row]].key == "0"


@dataclass
class Preconditioner:
    left: torch.Tensor
    right: list[torch.Tensor]


class Shampooish(torch.optim.SGD):
    """Keeps its state in objects, partly beside `state`."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.preconditioners: dict[torch.Tensor, Preconditioner] = {}

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            if one.grad is not None and one not in self.preconditioners:
                self.preconditioners[one] = Preconditioner(torch.zeros(11), [torch.zeros(13)])
                self.state[one]["object"] = Preconditioner(torch.zeros(17), [])
        super().step()


def test_an_optimizers_state_in_objects_is_its_state():
    (cycle,) = train(MODELS["cnn"](), optimizer=Shampooish, steps=2, plan=lambda _: _record_and_save())
    state = sizes(cycle.trace, Category.OPTIMIZER_STATE)
    parameters = len(list(MODELS["cnn"]().parameters()))
    assert [state.count(4 * length) for length in (11, 13, 17)] == [parameters] * 3


def _record_and_save():
    return torch.profiler.ProfilerAction.RECORD


@pytest.mark.parametrize("name", MODELS)
def test_ordinary_training_has_no_caches_and_no_copies(name):
    (cycle,) = train(MODELS[name]())
    assert sizes(cycle.trace, Category.CACHE) == []
    assert sizes(cycle.trace, Category.PARAMETER_COPY) == []
    assert Reason.NOT_RECORDED not in cycle.trace.allocations.reason.tolist()
