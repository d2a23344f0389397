"""The gradients of weights are those that a hook on each weight would see, and there is no hook."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import nn

from tb_memplugin import IterationReport
from tb_memplugin.record.iterations import figures as iteration_figures
from tb_memplugin.record.iterations.weights import named_weights, size_of
from tb_memplugin.trace import Category

Step = Callable[[nn.Module], object]


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(layer())


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3, sparse=True))


def loss(model: nn.Module) -> torch.Tensor:
    sparse = isinstance(next(model.children()), nn.Embedding)
    return model(torch.tensor([1, 2]) if sparse else torch.ones(2, 4)).sum()


def backward(model: nn.Module) -> None:
    loss(model).backward()


def twice(model: nn.Module) -> None:
    backward(model)
    backward(model)


def of_second_order(model: nn.Module) -> None:
    loss(model).backward(create_graph=True)
    loss(model).backward(create_graph=True)
    for weight in model.parameters():
        weight.grad = None


def gone_at_once(model: nn.Module) -> None:
    backward(model)
    model.zero_grad()


def gone_in_hooks(model: nn.Module) -> None:
    def drop(weight: torch.Tensor) -> None:
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(drop) for weight in model.parameters()]
    backward(model)
    for hook in hooks:
        hook.remove()


def stepped_in_hooks(model: nn.Module) -> None:
    def step(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.data.sub_(weight.grad, alpha=0.1)
        weight.grad = None
        torch.ones_like(weight)

    hooks = [weight.register_post_accumulate_grad_hook(step) for weight in model.parameters()]
    backward(model)
    for hook in hooks:
        hook.remove()


def scaled_in_hooks(model: nn.Module) -> None:
    hooks = [weight.register_hook(lambda gradient: gradient * 2) for weight in model.parameters()]
    gone_at_once(model)
    for hook in hooks:
        hook.remove()


def on_another_thread(model: nn.Module) -> None:
    """As where a thread runs the model alone, and the optimizer steps on the first."""
    value = loss(model)
    thread = threading.Thread(target=value.backward)
    thread.start()
    thread.join()
    torch.optim.SGD(model.parameters()).step()
    model.zero_grad()


def in_one_bucket(model: nn.Module) -> None:
    bucket = torch.zeros(sum(weight.numel() for weight in model.parameters()))
    start = 0
    for weight in model.parameters():
        weight.grad = bucket[start : start + weight.numel()].view_as(weight)
        start += weight.numel()
    backward(model)


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)
    gone_at_once(model)


IMPOSSIBLE = {(embedding, in_one_bucket), (embedding, of_second_order), (embedding, frozen), (tied, frozen)}
"""A sparse gradient is no part of a bucket and has no second order; without weights, no backward."""


class Hooked:
    """Sees gradients by a hook on each weight, in place of `NewGradients`: the truth."""

    def __init__(self, model, recording, _):
        self.bytes = {}
        self.handles = [
            weight.register_post_accumulate_grad_hook(self.seeing(name, recording))
            for name, (weight, _) in named_weights(model).items()
            if weight.requires_grad and weight.is_leaf
        ]

    def seeing(self, name, recording):
        def see(weight):
            self.bytes[name] = size_of(weight.grad)
            recording.name_gradient(weight, name)

        return see

    def ran(self, node, out):
        pass

    def before_step(self, optimizer):
        pass

    def settle(self):
        pass

    def forget(self):
        for handle in self.handles:
            handle.remove()


def figures(make: Callable[[], nn.Module], step: Step) -> tuple[object, ...]:
    """The gradients of an iteration, and the blocks of its trace that are gradients."""
    torch.manual_seed(0)
    model = make()
    seen = []

    class Watch(iteration_figures.IterationWatch):
        def end(self, *args):
            seen.append(super().end(*args))
            return seen[-1]

    own = Watch()
    own.begin(model, [])
    step(model)
    own.end(model, [])
    trace = seen[0].trace
    assert trace is not None
    blocks = trace.allocations
    mine = (blocks.category == Category.GRADIENT) & (blocks.label >= 0)
    named = sorted(
        (trace.labels[label], int(size))
        for label, size in zip(blocks.label[mine], blocks.bytes[mine], strict=True)
    )
    return dict(seen[0].gradients), named


STEPS = (backward, twice, of_second_order, gone_at_once, gone_in_hooks, stepped_in_hooks, scaled_in_hooks)
PAIRS = [
    (make, step) for make in (layer, tied, scripted, embedding) for step in (*STEPS, in_one_bucket, frozen)
]


@pytest.mark.parametrize(("make", "step"), [pair for pair in PAIRS if pair not in IMPOSSIBLE])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_they_are_those_that_hooks_see(make, step, monkeypatch):
    found = figures(make, step)
    monkeypatch.setattr(iteration_figures, "NewGradients", Hooked)
    expected = figures(make, step)
    assert found == expected


def test_a_weights_gradient_has_its_bytes_where_it_is_gone_before_any_operator():
    """A weight of 3 x 4 floats, and a bias of 3."""
    found, named = figures(lambda: nn.Sequential(nn.Linear(4, 3)), gone_at_once)
    assert found == {"0.weight": 48, "0.bias": 12}
    assert named == [("0.bias (gradient)", 12), ("0.weight (gradient)", 48)]


def test_what_another_thread_made_is_seen_when_the_optimizer_steps():
    found, named = figures(lambda: nn.Sequential(nn.Linear(4, 3)), on_another_thread)
    assert found == {"0.weight": 48, "0.bias": 12}
    assert named == [("0.bias (gradient)", 12), ("0.weight (gradient)", 48)]


def test_no_weight_has_anything_of_ours_while_it_is_watched():
    model = layer()
    with IterationReport(model, console=Console(file=io.StringIO())):
        backward(model)
        for weight, _ in named_weights(model).values():
            hooks = {
                name: getattr(weight, name) for name in ("_post_accumulate_grad_hooks", "_backward_hooks")
            }
            assert set(hooks.values()) == {None}
            assert vars(weight) == {}
