"""Modules with hooks of the user's own, parametrizations, and unusual module classes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.certificate.programs.catalog import program, train
from tests.certificate.programs.loops import mlp
from tests.certificate.run import Run


@program("modules")
def hooks_of_the_users_own(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[str] = []
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model[2].register_forward_hook(lambda module, inputs, output: output.relu())
    model[2].register_full_backward_hook(lambda module, inputs, outputs: calls.append("backward"))
    model[4].register_full_backward_pre_hook(lambda module, outputs: calls.append("backward begins"))
    handle = model.register_forward_hook(lambda *_: calls.append("model"), always_call=True)
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())
    handle.remove()
    run.value(calls)


@program("modules")
def hooks_that_come_and_go_in_the_window(run: Run) -> None:
    model = mlp()
    features: list[torch.Tensor] = []
    with run.window(model) as step:
        handles = [
            layer.register_forward_hook(lambda _, __, out: features.append(out.detach())) for layer in model
        ]
        run.value(model(torch.randn(2, 8)))
        step()
        for handle in handles:
            handle.remove()
        run.value(model(torch.randn(2, 8)))
        step()
    run.value(features)


@program("modules")
def hooks_of_all_modules(run: Run) -> None:
    """torch's own global hooks, as a user registers them."""
    model, names = mlp(), []
    handles = [
        nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: names.append(type(module).__name__)
        ),
        nn.modules.module.register_module_forward_hook(lambda module, _, out: None),
    ]
    with run.window(model) as step:
        run.value(model(torch.randn(2, 8)))
        step()
    for handle in handles:
        handle.remove()
    run.value(names)


@program("modules")
def weight_and_spectral_norm(run: Run) -> None:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)), parametrizations.spectral_norm(nn.Linear(8, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())


@program("modules")
def parametrized_within_the_window(run: Run) -> None:
    """torch.nn.utils.parametrize replaces a module's class, and restores it."""

    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).mT

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    with run.window(model) as step:
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        run.value(model(torch.randn(2, 6)))
        step()
        parametrize.remove_parametrizations(model[0], "weight")
        run.value(model(torch.randn(2, 6)))
        step()


@program("modules")
def lazy_modules(run: Run) -> None:
    """Lazy modules become plain ones at their first call, in the window."""
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))
    with run.window(model) as step:
        run.value(model(torch.randn(2, 3, 6, 6)))
        step()
        run.value(model(torch.randn(2, 3, 6, 6)))
        step()


@program("modules")
def shared_modules(run: Run) -> None:
    """A layer in several places, tied weights, and a ModuleDict whose entries are used again."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight
            layer = nn.Linear(8, 8)
            self.blocks = nn.ModuleDict({"first": layer, "second": nn.Tanh(), "again": layer})

        def forward(self, ids):
            x = self.embed(ids)
            for name in ("first", "second", "again", "second", "first"):
                x = self.blocks[name](x)
            return self.head(x)

    model = Shares()
    optimizer = torch.optim.Adam(model.parameters())
    train(run, model, optimizer, lambda: model(torch.randint(0, 20, (4, 3))).square().mean())


@program("modules")
def own_autograd_function(run: Run) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.save_for_backward(x)
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * ctx.factor + 0 * x, None

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: Scaled.apply(model(torch.randn(4, 8)), 3.0).square().mean())


@program("modules")
def gradient_hooks_and_saved_tensor_hooks(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    next(model.parameters()).register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def loss():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
            return model(torch.randn(4, 8)).square().mean()

    train(run, model, optimizer, loss)


@program("modules")
def layers_added_in_the_window(run: Run) -> None:
    model = mlp()
    with run.window(model) as step:
        run.value(model(torch.randn(2, 8)))
        step()
        model.append(nn.Linear(4, 3))
        model[1] = nn.GELU()
        del model[3]
        run.value(model(torch.randn(2, 8)))
        step()


@program("modules")
def moved_and_converted_in_the_window(run: Run) -> None:
    model = mlp()
    with run.window(model) as step:
        run.value(model.to(torch.float64).forward(torch.randn(2, 8, dtype=torch.float64)))
        step()
        model.to(torch.float32).train(False)
        model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()}, assign=True)
        run.value(model(torch.randn(2, 8)))
        step()
