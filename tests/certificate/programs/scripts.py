"""torch.jit, torch.fx, torch.export and torch.func."""

from __future__ import annotations

import torch
from torch import fx, nn

from tests.certificate.programs.catalog import program, train
from tests.certificate.programs.loops import mlp
from tests.certificate.programs.sequences import encoder
from tests.certificate.run import Run


@program("scripted and exported")
def script_in_the_window(run: Run) -> None:
    model = mlp().eval()
    with run.window(model) as step:
        script = torch.jit.script(model)
        for _ in range(3):
            run.value(script(torch.ones(2, 8)))
            step()
    run.keep(script=script)


@program("scripted and exported")
def trace_in_the_window(run: Run) -> None:
    model = mlp().eval()
    with run.window(model) as step:
        trace = torch.jit.trace(model, torch.ones(2, 8))
        run.value(trace(torch.ones(2, 8)))
        step()
    run.keep(trace=trace, frozen=torch.jit.freeze(trace))


@program("scripted and exported")
def scripted_model(run: Run) -> None:
    model = torch.jit.script(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())


@program("scripted and exported")
def script_inside_a_model(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.ReLU(), nn.Linear(8, 2))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())


@program("scripted and exported")
def symbolic_trace_in_the_window(run: Run) -> None:
    model = mlp()
    with run.window(model) as step:
        graph = fx.symbolic_trace(model)
        run.value(graph(torch.ones(2, 8)))
        step()
    run.keep(graph=graph)


@program("scripted and exported")
def graph_module(run: Run) -> None:
    model = fx.symbolic_trace(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())


@program("scripted and exported", stacks=False)
def export_in_the_window(run: Run) -> None:
    model = mlp().eval()
    with run.window(model) as step:
        exported = torch.export.export(model, (torch.ones(2, 8),))
        run.value(exported.module()(torch.ones(2, 8)))
        step()
    run.keep(exported=exported)


@program("scripted and exported", stacks=False)
def export_of_an_encoder(run: Run) -> None:
    model = encoder().eval()
    with run.window(model) as step:
        exported = torch.export.export(model, (torch.ones(2, 4, 32),), strict=True)
        run.value(exported.module()(torch.ones(2, 4, 32)))
        step()
    run.keep(exported=exported)


@program("functional")
def functional_call(run: Run) -> None:
    model = mlp()
    with run.window(model) as step:
        doubled = {name: value.detach() * 2 for name, value in model.named_parameters()}
        run.value(torch.func.functional_call(model, doubled, (torch.ones(2, 8),)))
        run.value(model(torch.ones(2, 8)))
        step()


@program("functional")
def gradients_per_sample(run: Run) -> None:
    model = mlp()
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights, x, y):
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    with run.window(model) as step:
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        run.value(each(weights, torch.ones(3, 8), torch.arange(3)))
        step()


@program("functional")
def ensemble_by_vmap(run: Run) -> None:
    models = [mlp() for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)

    def call(weights, buffers, x):
        return torch.func.functional_call(models[0], (weights, buffers), (x,))

    with run.window({str(number): model for number, model in enumerate(models)}) as step:
        run.value(torch.vmap(call, (0, 0, None))(weights, buffers, torch.ones(2, 8)))
        step()


@program("functional")
def jacobian_and_forward_mode(run: Run) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with run.window(model) as step:
        run.value(torch.func.jacrev(model)(torch.ones(4)))
        run.value(torch.func.jvp(model, (torch.ones(4),), (torch.ones(4),)))
        run.value(torch.func.hessian(lambda x: model(x).sum())(torch.ones(4)))
        step()


@program("functional")
def fake_tensors(run: Run) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = mlp()
    with run.window(model) as step:
        with FakeTensorMode(allow_non_fake_inputs=True):
            run.value(list(model(torch.ones(2, 8)).shape))
        with torch.device("meta"):
            run.value(list(mlp()(torch.ones(2, 8)).shape))
        run.value(model(torch.ones(2, 8)))
        step()
