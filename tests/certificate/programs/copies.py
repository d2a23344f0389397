"""Copies and files of a model that a program makes while it is recorded."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.certificate.programs.catalog import program
from tests.certificate.programs.loops import mlp
from tests.certificate.programs.sequences import encoder
from tests.certificate.run import Run


@program("copies")
def deep_copy(run: Run) -> None:
    model = encoder().eval()
    with run.window(model) as step, torch.no_grad():
        run.value(model(torch.ones(2, 4, 32)))
        best = copy.deepcopy(model)
        shallow = copy.copy(model)
        step()
    with torch.no_grad():
        run.value(best(torch.ones(2, 4, 32)))
    run.keep(best=best, shallow=shallow)


@program("copies")
def averaged_model(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with run.window(model, optimizer) as step:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(2):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            run.value([loss, average(torch.ones(1, 8))])
            step()
    run.keep(average=average, script=torch.jit.script(average.module))


@program("copies")
def saved_and_loaded(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with run.window(model, optimizer) as step:
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        run.value([loss, model[0].weight.grad])
        whole, states = io.BytesIO(), io.BytesIO()
        torch.save(model, whole)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, states)
        step()
    run.keep(
        whole=whole.getvalue(),
        states=states.getvalue(),
        loaded=torch.load(io.BytesIO(whole.getvalue()), weights_only=False),
        safely=torch.load(io.BytesIO(states.getvalue()), weights_only=True),
    )


@program("copies")
def pickled_model_and_optimizer(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with run.window(model, optimizer) as step:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        pickled = pickle.dumps((model, optimizer))
        step()
    again, stepped = pickle.loads(pickled)
    run.keep(pickled=len(pickled), again=again, stepped=stepped)


@program("copies")
def loaded_checkpoint(run: Run) -> None:
    """A whole model is loaded in the window, and goes on from there."""
    stored = io.BytesIO()
    torch.save(mlp(), stored)
    stored.seek(0)
    model = mlp()
    with run.window(model) as step:
        loaded = torch.load(stored, weights_only=False)
        model.load_state_dict(loaded.state_dict())
        run.value(model(torch.ones(1, 8)))
        step()
    run.keep(loaded=loaded)


@program("copies")
def quantized_dynamically(run: Run) -> None:
    model, second = mlp().eval(), mlp().eval()
    with run.window({"model": model, "second": second}) as step, torch.no_grad():
        copied = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
        torch.ao.quantization.quantize_dynamic(second, {nn.Linear}, torch.qint8, inplace=True)
        run.value([copied(torch.ones(2, 8)), second(torch.ones(2, 8)), model(torch.ones(2, 8))])
        step()
    run.keep(copied=copied)


@program("copies")
def quantized_statically(run: Run) -> None:
    """Observers are hooks of torch's own, put in and taken out in the window."""

    class Quantizable(nn.Module):
        qconfig = torch.ao.quantization.default_qconfig

        def __init__(self) -> None:
            super().__init__()
            self.quant = torch.ao.quantization.QuantStub()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.dequant = torch.ao.quantization.DeQuantStub()

        def forward(self, x):
            return self.dequant(self.layers(self.quant(x)))

    model = Quantizable().eval()
    with run.window(model) as step, torch.no_grad():
        prepared = torch.ao.quantization.prepare(model)
        run.value(prepared(torch.linspace(-1, 1, 16).view(2, 8)))
        quantized = torch.ao.quantization.convert(prepared)
        run.value(quantized(torch.ones(2, 8)))
        step()
    run.keep(prepared=prepared, quantized=quantized)


@program("copies")
def state_dict_copies(run: Run) -> None:
    """The best weights so far are cloned and put back."""
    model = mlp()
    with run.window(model) as step:
        best = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        model.load_state_dict(best)
        run.value(model(torch.ones(1, 8)))
        step()
    run.keep(best=best)


def _infer(model: nn.Module, results) -> None:
    results.put(model(torch.ones(1, 8)).tolist())


@program("copies")
def forked_process(run: Run) -> None:
    """The model runs in a forked process while it is recorded in this one."""
    model = mlp().requires_grad_(False)
    with run.window(model) as step:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_infer, args=(model, results))
        child.start()
        run.value(results.get(timeout=60))
        child.join()
        run.value([child.exitcode, model(torch.ones(1, 8))])
        step()


def _add_to(shared: torch.Tensor) -> None:
    shared.add_(1)


@program("copies")
def memory_that_processes_share(run: Run) -> None:
    """Tensors move to shared memory in the window, and another process writes to one."""
    model = mlp()
    with run.window(model) as step, torch.no_grad():
        shared = torch.zeros(100).share_memory_()
        model.share_memory()
        child = multiprocessing.get_context("fork").Process(target=_add_to, args=(shared,))
        child.start()
        child.join()
        run.value([shared.clone(), model(torch.ones(1, 8))])
        step()
