"""Programs that switch torch to another way of working, or use tensors that are not plain ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.certificate.programs.catalog import program, train
from tests.certificate.programs.loops import mlp
from tests.certificate.run import Run


@program("modes")
def deterministic_algorithms(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    torch.use_deterministic_algorithms(True)

    def loss() -> torch.Tensor:
        out = model(torch.randint(20, (6,)))
        total = torch.empty(8, 4).index_add(0, torch.tensor([0, 1, 1, 2, 3, 3]), out)
        return total.square().mean() + torch.zeros(5).scatter_add(0, torch.tensor([1, 1]), out[0, :2]).sum()

    try:
        train(run, model, optimizer, loss)
    finally:
        torch.use_deterministic_algorithms(False)


@program("modes")
def anomaly_detection(run: Run) -> None:
    """torch keeps the stack of each operator, and prints that of the one whose derivative is not a number."""
    model = nn.Sequential(mlp(), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with run.window(model, optimizer) as step, torch.autograd.detect_anomaly():
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
        try:
            (model(torch.randn(4, 8)).sum() * 0).sqrt().backward()
        except RuntimeError as error:
            run.value(str(error))


@program("modes")
def jagged_tensors(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())

    def loss() -> torch.Tensor:
        rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
        return torch.cat(list(model(rows).unbind())).square().mean()

    train(run, model, optimizer, loss)


@program("modes")
def parameters_that_are_swapped(run: Run) -> None:
    """A module's conversion swaps tensors, which torch refuses for those that somebody refers to weakly."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with run.window(model, optimizer) as step:
            for dtype in (torch.float64, torch.float32):
                model.to(dtype)
                optimizer.zero_grad()
                loss = model(torch.randn(4, 8, dtype=dtype)).square().mean()
                loss.backward()
                optimizer.step()
                run.value(loss)
                step()
                optimizer.zero_grad()
                for state in optimizer.state.values():
                    state["momentum_buffer"] = state["momentum_buffer"].to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@program("modes")
def tensors_that_are_swapped(run: Run) -> None:
    """The averages of weights and the weights change places for an evaluation."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    averages = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]

    def swap() -> None:
        optimizer.zero_grad()
        for weight, average in zip(model.parameters(), averages, strict=True):
            torch.utils.swap_tensors(weight, average)

    with run.window(model, optimizer) as step:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for weight, average in zip(model.parameters(), averages, strict=True):
                    average.lerp_(weight, 0.5)
            run.value(loss)
            del loss  # torch refuses to swap what a graph leads to
            swap()
            with torch.no_grad():
                run.value(model(torch.ones(2, 8)))
            swap()
            step()


@program("modes")
def selective_checkpointing(run: Run) -> None:
    """Products are kept, the rest is computed again, as far as backward needs it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def policy(_, operator, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE
            if operator is torch.ops.aten.addmm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def loss() -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True)
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        return out.square().mean() + checkpoint(model, x, use_reentrant=False).mean()

    train(run, model, optimizer, loss)


@program("modes")
def lazy_clones(run: Run) -> None:
    """A copy that has no memory of its own until somebody writes: to ask where it lies makes it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = torch._lazy_clone(torch.ones(1000))
    model.register_buffer("copy", torch._lazy_clone(torch.ones(500)))
    vars(model)["older"] = torch._lazy_clone(next(model.parameters()).detach())

    def loss() -> torch.Tensor:
        x = torch._lazy_clone(torch.randn(4, 8))
        return model(x).square().mean()

    train(run, model, optimizer, loss)
    copies = before, model.get_buffer("copy"), vars(model)["older"]
    run.value([torch._C._is_cow_tensor(tensor) for tensor in copies])  # type: ignore[attr-defined]


@program("modes")
def two_tensors_in_one(run: Run) -> None:
    """Weights are wrappers of other tensors, as quantized and sharded weights are."""
    model = mlp()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach() + 1))
            layer.bias = nn.Parameter(TwoTensor(layer.bias.detach(), layer.bias.detach()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with run.window(model, optimizer) as step:
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 8)
            loss = model(TwoTensor(x, x)).square().mean()
            loss.backward()
            optimizer.step()
            run.value(loss.a.detach())
            run.value(loss.b.detach())
            step()
    run.keep(weights=list(model.parameters()))


@program("modes")
def counted_operations(run: Run) -> None:
    """Two dispatch modes and hooks of torch's own."""
    seen: list[str] = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with run.window(model, optimizer) as step:
        for _ in range(2):
            optimizer.zero_grad()
            with FlopCounterMode(display=False) as counter, Notes():
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
            optimizer.step()
            run.value(counter.get_total_flops())
            run.value(sorted(counter.get_flop_counts()))
            run.value(loss)
            step()
    run.value(seen)


@program("modes")
def saved_tensors_that_change(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with run.window(model, optimizer) as step:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.randn(4, 8, requires_grad=True)
            y = x.clone()
            out = (y**2).sum() + model(y).sum()
            y.sin_()
            out.backward()
            run.value(x.grad)
        step()
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
        optimizer.step()
        run.value(loss)
        step()


@program("modes")
def saved_tensors_on_the_cpu(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def loss() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(torch.randn(4, 8)).square().mean()

    train(run, model, optimizer, loss)
