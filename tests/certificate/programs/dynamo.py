"""torch.compile: before and in the window, with breaks, recompiles and modules inside compiled functions."""

from __future__ import annotations

import os
import tempfile
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.certificate.programs.catalog import program
from tests.certificate.programs.loops import mlp
from tests.certificate.run import Run


def import_libraries() -> None:
    compiled = torch.compile(lambda x: (x + 1).square().mean())
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        compiled(torch.ones(2, requires_grad=True)).backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _train(run: Run, model, call, rows=(4, 4, 6)) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with run.window(model, optimizer) as step:
        for count in rows:
            loss = call(torch.randn(count, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
    run.value(call(torch.ones(4, 8)))  # does it compile again?


@program("compiled", stacks=False)
def compiled_before_the_window(run: Run) -> None:
    model = torch.compile(mlp(), backend="eager")
    model(torch.ones(4, 8)).sum().backward()
    _train(run, model, model)


@program("compiled", stacks=False)
def compiled_first_in_the_window(run: Run) -> None:
    model = torch.compile(mlp(), backend="aot_eager")
    _train(run, model, model)


@program("compiled", stacks=False)
def inner_module_is_recorded(run: Run) -> None:
    """The recorder gets the module inside the compiled one."""
    model = mlp()
    _train(run, model, torch.compile(model, backend="eager"))


@program("compiled", stacks=False)
def inner_module_compiled_before(run: Run) -> None:
    model = mlp()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    compiled(torch.ones(4, 8))
    _train(run, model, compiled)


@program("compiled", stacks=False)
def compiled_function_that_calls_modules(run: Run) -> None:
    model = mlp()

    @torch.compile(backend="eager")
    def call(x):
        return model(x) + model[0](x).sum()

    _train(run, model, call)


@program("compiled", stacks=False)
def compiled_with_graph_breaks(run: Run) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model = Breaks()
    _train(run, model, torch.compile(model, backend="eager"))


@program("compiled", stacks=False)
def compiled_in_place(run: Run) -> None:
    model = mlp()
    model[0].compile(backend="eager")
    model.compile(backend="eager")
    _train(run, model, model)


@program("compiled", stacks=False)
def compiled_layers(run: Run) -> None:
    model = mlp()
    for number in (0, 2):
        model[number] = torch.compile(model[number], backend="eager")  # type: ignore[assignment]
    _train(run, model, model)


@program("compiled", stacks=False, differs_uncompiled=True)
def compiled_by_inductor(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    compiled = torch.compile(model)
    compiled(torch.ones(4, 8)).sum().backward()
    _train(run, compiled, compiled, rows=(4, 4))


@program("compiled", stacks=False, differs_uncompiled=True)
def compiled_optimizer(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), capturable=False)
    step_compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    with run.window(model, optimizer) as step:
        for _ in range(2):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            step_compiled()
            optimizer.zero_grad()
            run.value(loss)
            step()


@program("compiled", stacks=False)
def checkpointing_in_compiled_code(run: Run) -> None:
    from torch.utils.checkpoint import checkpoint

    model = mlp()
    call = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager")
    _train(run, model, call, rows=(4, 4))


@program("compiled", stacks=False)
def flex_attention_and_cond(run: Run) -> None:
    """Higher-order operators, which torch offers only to modes that ask for them."""
    blocks = create_block_mask(lambda _, __, query, key: query >= key, 1, 1, 16, 16, device="cpu")
    model = nn.Linear(32, 96)
    with run.window(model) as step, torch.no_grad():
        for _ in range(2):
            heads = model(torch.randn(1, 16, 32)).unflatten(-1, (3, 2, 16)).transpose(1, 3)
            query, key, value = heads.unbind(2)
            attended = flex_attention(query, key, value, block_mask=blocks)
            run.value(torch.cond(attended.sum() > 0, torch.sin, torch.cos, (attended,)))
            step()
