"""The profiler's handler and `MemoryTracer` tell the same of the same loop: two sources that share no event.

The handler reads the profiler's events and finds blocks by address; the tracer intercepts operators and finds
them by storage. Each loop runs once under each, from the same seeds.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import MemoryTracer
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.trace import Category, MemoryTrace, Phase, Reason
from tests.record.profiler.test_provenance import Attention, generate
from tests.training import MODELS

Loop = tuple[nn.Module, torch.optim.Optimizer | None, Callable[[], None]]
"""A model, its optimizer if it has one, and the loop to record."""

CALLS, LENGTH = 6, 32
"""How many calls the loops with a cache of one size make, and the tokens that it has room for."""

BY_LIFETIME = (Category.ACTIVATION, Category.RECOMPUTED, Category.AUTOGRAD_DETAIL, Category.TEMPORARY)
"""Categories that depend on what an operator is: only the handler sees those that are made of others."""


class WithRoom(nn.Module):
    """One head that writes keys and values into tensors with room for all of them."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, keys, values, at):
        query, key, value = self.mix(x).chunk(3, -1)
        end = at + x.shape[1]
        keys[:, at:end], values[:, at:end] = key, value
        return self.out((query @ keys[:, :end].transpose(1, 2)).softmax(-1) @ values[:, :end])


def cache_of_one_size(*, is_older: bool) -> Loop:
    model = WithRoom().eval()
    older = [torch.zeros(2, LENGTH, 8) for _ in range(2)] if is_older else []

    @torch.no_grad()
    def loop() -> None:
        cache = older or [torch.zeros(2, LENGTH, 8) for _ in range(2)]
        for call in range(CALLS):
            model(torch.randn(2, 1, 8), *cache, call)

    return model, None, loop


def one_cache_for_all_layers() -> Loop:
    """Keys and values are views of one tensor."""
    model, cache = WithRoom().eval(), torch.zeros(2, 2, LENGTH, 8)

    @torch.no_grad()
    def loop() -> None:
        for call in range(CALLS):
            model(torch.randn(2, 1, 8), cache[0], cache[1], call)

    return model, None, loop


def cache_that_grows() -> Loop:
    model = Attention().eval()
    return model, None, partial(generate, model)


def cache_that_grows_outside() -> Loop:
    model = nn.Linear(8, 8).eval()

    @torch.no_grad()
    def loop() -> None:
        states = torch.zeros(2, 1, 8)
        for _ in range(CALLS):
            states = torch.cat([states, model(states)[:, -1:]], 1)

    return model, None, loop


def llama(**options: object) -> Loop:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=20
    )
    model = transformers.LlamaForCausalLM(config).eval()

    def loop() -> None:
        tokens = torch.ones(1, 5, dtype=torch.long)
        model.generate(tokens, max_new_tokens=8, min_new_tokens=8, disable_compile=True, **options)

    return model, None, loop


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.BatchNorm1d(30), nn.Linear(30, 5))


AVERAGED: dict[str, torch.Tensor] = {}


def moving_averages() -> Loop:
    """Averages of weights from before the window; in it, the best weights and a copy of the model."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    AVERAGED.update({name: one.detach().clone() for name, one in model.named_parameters()})
    kept: dict[str, object] = {}

    def loop() -> None:
        for step in range(4):
            F.cross_entropy(model(torch.randn(8, 20)), torch.randint(0, 5, (8,))).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    AVERAGED[name].lerp_(weight, 0.1)
            if step == 1:
                kept["best"] = {name: one.clone() for name, one in model.state_dict().items()}
            if step == 2:
                kept["copy"] = copy.deepcopy(model)

    return model, optimizer, loop


def replay_buffer() -> Loop:
    """Deep Q-learning: a target network, and transitions that are kept in a list."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters())
    memory: deque[tuple[torch.Tensor, ...]] = deque(maxlen=12)
    chosen = random.Random(0)

    def push() -> None:
        memory.append((torch.randn(64), torch.tensor(3), torch.tensor(0.5)))

    for _ in range(8):
        push()

    def loop() -> None:
        for _ in range(6):
            push()
            state, action, reward = map(torch.stack, zip(*chosen.sample(list(memory), 5), strict=True))
            with torch.no_grad():
                goal = reward + 0.9 * target(state).max(1).values
            loss = F.mse_loss(model(state).gather(1, action[:, None])[:, 0], goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return model, optimizer, loop


def call_without_gradients_before() -> Loop:
    """What follows the first call of a step is not its loss, but the next batch."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())

    def loop() -> None:
        for _ in range(4):
            with torch.no_grad():
                goal = model(torch.randn(8, 20))
            state, noise = torch.randn(8, 20), torch.randn(8, 5)
            loss = F.mse_loss(model(state), goal + noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return model, optimizer, loop


def training(name: str) -> Loop:
    model = MODELS[name]()
    optimizer, criterion = torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss()

    def loop() -> None:
        for _ in range(2):
            given, wanted = model.batch()
            optimizer.zero_grad()
            criterion(model(given), wanted).backward()
            optimizer.step()

    return model, optimizer, loop


def momentum() -> Loop:
    """Its sizes are those of the parameters: 20 x 64 + 64 and 64 x 2 + 2 numbers."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loop() -> None:
        model(torch.ones(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    loop()
    return model, None, loop


class SharpnessAware(torch.optim.SGD):
    """It climbs, and then the weights are those that its state has kept."""

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old"] = weight.detach().clone()
            weight.data.add_(weight.grad)
            weight.data = self.state[weight]["old"]
        return super().step(closure)


def kept_weights() -> Loop:
    """The peak is within a step: all 1,474 weights, and a copy of the first 20 x 64, which replaces them."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = SharpnessAware(model.parameters(), 0.1)

    def loop() -> None:
        model(torch.ones(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    loop()
    return model, optimizer, loop


def tanh_net(outputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, outputs))


def integrated_gradients() -> Loop:
    """As captum attributes an output to inputs: only their gradients are wanted, and kept."""
    model = tanh_net().eval()

    def loop() -> None:
        x, base = torch.randn(4, 20), torch.zeros(4, 20)
        total = torch.zeros_like(x)
        for share in torch.linspace(0, 1, 6):
            point = (base + share * (x - base)).requires_grad_()
            total = total + torch.autograd.grad(torch.unbind(model(point)[:, 1]), point)[0]
        assert (total / 6 * (x - base)).sum() < torch.inf

    return model, None, loop


def gradient_penalty() -> Loop:
    model = tanh_net(1)
    optimizer = torch.optim.Adam(model.parameters())

    def loop() -> None:
        for _ in range(2):
            mixed = torch.rand(8, 20, requires_grad=True)
            out = model(mixed)
            (slope,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True)
            optimizer.zero_grad()
            (10 * (slope.norm(2, 1) - 1).pow(2).mean()).backward()
            optimizer.step()

    return model, optimizer, loop


def critic() -> Loop:
    """Three calls and a penalty: the gradients of each weight meet, and the peak is while they do."""
    model = tanh_net(1)
    optimizer = torch.optim.Adam(model.parameters())

    def loop() -> None:
        for _ in range(2):
            real, fake = torch.randn(8, 20), torch.randn(8, 20)
            share = torch.rand(8, 1)
            mixed = (share * real + (1 - share) * fake).requires_grad_()
            out = model(mixed)
            (slope,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True)
            optimizer.zero_grad()
            penalty = (slope.norm(2, 1) - 1).pow(2).mean()
            (model(fake).mean() - model(real).mean() + 10 * penalty).backward()
            optimizer.step()

    return model, optimizer, loop


def products_with_the_hessian() -> Loop:
    model = tanh_net(1)
    weights = list(model.parameters())

    def loop() -> None:
        for _ in range(2):
            first = torch.autograd.grad(model(torch.randn(8, 20)).square().mean(), weights, create_graph=True)
            directions = [torch.randn_like(weight) for weight in weights]
            dot = torch.stack([(one * way).sum() for one, way in zip(first, directions, strict=True)]).sum()
            assert len(torch.autograd.grad(dot, weights)) == len(weights)

    return model, None, loop


class FixedPoint(nn.Module):
    """Its backward solves for the gradient, in a hook that runs a backward of its own."""

    def __init__(self):
        super().__init__()
        self.state, self.given = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x):
        point = torch.tanh(self.state(torch.zeros_like(x)) + self.given(x))
        inner = point.clone().detach().requires_grad_()
        again = torch.tanh(self.state(inner) + self.given(x))

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            solved = gradient
            for _ in range(3):
                solved = torch.autograd.grad(again, inner, solved, retain_graph=True)[0] + gradient
            return solved

        point.register_hook(solve)
        return point


class Recomputed(torch.autograd.Function):
    """Calls the model once more in backward, and runs a backward through that."""

    @staticmethod
    def forward(ctx, model, x):
        ctx.model = model
        ctx.save_for_backward(x)
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.model(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad


def backward_in_backward(kind: str) -> Loop:
    model = FixedPoint() if kind == "hook" else tanh_net(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loop() -> None:
        for _ in range(2):
            x = torch.randn(8, 20, requires_grad=True)
            out: torch.Tensor = model(x) if kind == "hook" else Recomputed.apply(model, x)
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()

    return model, optimizer, loop


DERIVATIVES: dict[str, Callable[[], Loop]] = {
    "integrated gradients": integrated_gradients,
    "gradient penalty": gradient_penalty,
    "critic": critic,
    "products with the Hessian": products_with_the_hessian,
    "backward in a hook": partial(backward_in_backward, "hook"),
    "backward in a function": partial(backward_in_backward, "function"),
}
LOOPS: dict[str, Callable[[], Loop]] = {
    "cache that grows": cache_that_grows,
    "cache that grows outside": cache_that_grows_outside,
    "cache of one size": partial(cache_of_one_size, is_older=False),
    "older cache of one size": partial(cache_of_one_size, is_older=True),
    "one cache for all layers": one_cache_for_all_layers,
    "llama": llama,
    "llama with a static cache": partial(llama, cache_implementation="static"),
    "moving averages": moving_averages,
    "replay buffer": replay_buffer,
    "call without gradients before": call_without_gradients_before,
    "momentum of an optimizer that is not given": momentum,
    "weights that the state has kept": kept_weights,
    **DERIVATIVES,
    **{name: partial(training, name) for name in MODELS},
}


def profiled(model, optimizer, loop) -> MemoryTrace:
    recorder = WindowRecorder({"": model}, [optimizer] if optimizer else [])
    watch(recorder)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loop()
    window = recorder.take()
    assert window is not None
    return trace_from_profile(prof, window)


def traced(model, optimizer, loop) -> MemoryTrace:
    tracer = MemoryTracer()
    with tracer.trace(model, optimizer):
        loop()
    return tracer.trace_result()


def record(name: str, recorder: Callable[..., MemoryTrace]) -> MemoryTrace:
    """Return the trace of a loop, without what is left from other tests: the collector does not know it."""
    AVERAGED.clear()
    torch.manual_seed(0)
    gc.freeze()
    loop = LOOPS[name]()
    gc.collect()  # now the collector has all tensors in the order in which they were made
    return recorder(*loop)


@pytest.fixture(scope="module", params=LOOPS)
def both(request) -> Iterator[tuple[str, MemoryTrace, MemoryTrace]]:
    """A loop, and what the handler and the tracer recorded of it."""
    name, threads = request.param, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        LOOPS[name]()[-1]()  # the first run also loads code and makes constants that torch keeps
        yield name, record(name, profiled), record(name, traced)
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()


def by_identity(trace: MemoryTrace) -> Counter[tuple[object, ...]]:
    """Return what a source tells of each block that has another category than by its lifetime alone."""
    blocks = trace.allocations
    columns = (blocks.bytes, blocks.born, blocks.category, blocks.reason, blocks.label)
    labels = *trace.labels, ""
    return Counter(
        (size, born < 0, Category(category).key, Reason(reason).name, labels[label])
        for size, born, category, reason, label in zip(*(one.tolist() for one in columns), strict=True)
        if category not in BY_LIFETIME
    )


def test_both_tell_the_same_of_inputs_caches_copies_and_state(both):
    _, of_handler, of_tracer = both
    ours, others = by_identity(of_handler), by_identity(of_tracer)
    assert (ours - others, others - ours) == (Counter(), Counter())


def key_of(category: int, merged: Collection[Category]) -> str:
    return "merged" if category in merged else Category(category).key


def at_peak(trace: MemoryTrace, merged: Collection[Category] = ()) -> dict[str, int]:
    """Return the bytes of each category at the peak; those of the merged categories together."""
    blocks = trace.allocations
    rows = blocks.alive_at(int(np.argmax(trace.live(0))) - 1, 0)
    found: Counter[str] = Counter()
    for category, size in zip(blocks.category[rows].tolist(), blocks.bytes[rows].tolist(), strict=True):
        found[key_of(category, merged)] += size
    return dict(found)


WITHIN_AN_OPERATOR = {
    "lstm": {Category.TEMPORARY, Category.AUTOGRAD_DETAIL, Category.GRADIENT},
    "llama with a static cache": {Category.TEMPORARY, Category.ACTIVATION},
    "critic": {Category.GRADIENT, Category.AUTOGRAD_DETAIL},
}
"""Loops that peak within an operator that both see differently, and the categories of what is in it.

Where the critic's gradients meet, autograd adds to the first, which becomes the weight's gradient; under the
tracer's mode it adds them into a new block. That is 20 x 64, 64 and 64 x 48 floats, 17,664 bytes.

The backward of an LSTM makes results and buffers of the same sizes at once, which the tracer tells apart by
their order. And what an operator returns to another, larger one is temporary to the handler, which sees both.
"""


def test_both_tell_the_same_bytes_by_category_at_the_peak(both):
    name, of_handler, of_tracer = both
    merged = WITHIN_AN_OPERATOR.get(name, ())
    assert at_peak(of_handler, merged) == at_peak(of_tracer, merged)


NUMBER = 8
"""Bytes of a number: a dispatch mode makes torch wrap it in a tensor twice."""


def of_phases(trace: MemoryTrace, merged: Collection[Category]) -> Counter[tuple[int, str, str]]:
    """Return size, category and module of each block of backward and of the optimizer's steps."""
    blocks = trace.allocations
    mine = np.isin(blocks.phase, (Phase.BACKWARD, Phase.OPTIMIZER)) & (blocks.bytes > NUMBER)
    columns = (column[mine].tolist() for column in (blocks.bytes, blocks.category, blocks.module))
    return Counter(
        (size, key_of(category, merged), trace.modules[module].key if trace.modules[module].is_module else "")
        for size, category, module in zip(*columns, strict=True)
    )


def test_both_tell_the_same_of_each_block_of_backward_and_optimizer(both):
    """Where gradients meet, the tracer's mode makes torch add them into a new block, which is left over."""
    name, of_handler, of_tracer = both
    ours, others = (of_phases(trace, WITHIN_AN_OPERATOR.get(name, ())) for trace in (of_handler, of_tracer))
    assert ours - others == Counter()
    assert {category for _, category, _ in others - ours} <= {"autograd_detail", "temporary", "merged"}


EXPECTED = {
    "cache that grows": {"cache": 2_240},
    "cache of one size": {"cache": 2 * 2 * LENGTH * 8 * 4},
    "older cache of one size": {"cache": 2 * 2 * LENGTH * 8 * 4},
    "one cache for all layers": {"cache": 2 * 2 * LENGTH * 8 * 4},
    "moving averages": {"parameter_copy": 3 * 3_380 + 2 * 248},
    "momentum of an optimizer that is not given": {"optimizer_state": 4 * 1_474},
    "weights that the state has kept": {"parameter": 4 * (1_474 + 20 * 64)},
    "replay buffer": {"parameter_copy": (64 * 64 + 64 + 64 * 10 + 10) * 4},
}
"""The bytes of some categories, which follow from the loop."""


def test_what_follows_from_the_loop_is_told(both):
    name, of_handler, of_tracer = both
    for key, size in EXPECTED.get(name, {}).items():
        assert (at_peak(of_handler)[key], at_peak(of_tracer)[key]) == (size, size)
