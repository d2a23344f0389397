"""Modules and loops that look at themselves, or that fail when looked at."""

from __future__ import annotations

import torch
from torch import nn

from tests.certificate.programs.catalog import program, train
from tests.certificate.programs.loops import mlp
from tests.certificate.run import Run


@program("hostile")
def class_with_its_own_call(run: Run) -> None:
    class Counts(nn.Linear):
        calls = 0

        def __call__(self, *inputs, **named):
            type(self).calls += 1
            return super().__call__(*inputs, **named) + 1

    model = nn.Sequential(Counts(8, 8), nn.ReLU(), Counts(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())
    run.value(Counts.calls)


@program("hostile")
def attributes_that_raise(run: Run) -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        @property
        def broken(self):
            raise RuntimeError("do not look")

        def __getattr__(self, name):
            if name in self.__dict__.get("_modules", {}):
                return self.__dict__["_modules"][name]
            raise KeyError(name)

        def __eq__(self, other):
            raise RuntimeError("do not compare")

        __hash__ = nn.Module.__hash__

        def __bool__(self):
            raise RuntimeError("neither true nor false")

        def __len__(self):
            raise RuntimeError("no length")

        def __repr__(self):
            raise RuntimeError("no text")

        def forward(self, x):
            return self.layer(x)

    model = nn.Sequential(Raises(), nn.ReLU(), Raises())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())


@program("hostile")
def instance_with_its_own_forward(run: Run) -> None:
    """accelerate and others replace `forward` on the instance."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[2].forward
    model[2].forward = lambda x: before(x) * 2
    train(run, model, optimizer, lambda: model(torch.randn(4, 8)).square().mean())


@program("hostile")
def code_that_looks_for_hooks(run: Run) -> None:
    """Libraries decide by these; so does torch's own fast path."""
    model = mlp()
    with run.window(model) as step:
        for layer in model.modules():
            run.value([len(vars(layer)[key]) for key in vars(layer) if key.endswith("hooks")])
            run.value([type(layer).__name__, type(layer) is layer.__class__, list(vars(layer))])
        tables = vars(nn.modules.module)
        run.value([name for name, table in tables.items() if name.startswith("_global") and table])
        run.value(model(torch.ones(1, 8)))
        step()


@program("hostile")
def code_that_looks_at_its_callers(run: Run) -> None:
    """A module that reads the call stack below it: no frame of ours may be between torch's."""
    import sys

    class Looks(nn.Module):
        def forward(self, x):
            names, frame = [], sys._getframe()
            for _ in range(6):
                names.append(frame.f_code.co_name)
                frame = frame.f_back or frame
            run.value(names)
            return x

    model = nn.Sequential(nn.Linear(8, 8), Looks())
    with run.window(model) as step:
        run.value(model(torch.ones(1, 8)))
        step()


@program("hostile")
def deep_recursion(run: Run) -> None:
    """Modules in modules, close to Python's limit of nested calls."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(150):
        model = nn.Sequential(model)
    with run.window(model) as step, torch.no_grad():
        run.value(model(torch.ones(1, 2)))
        step()


@program("hostile")
def warnings_as_errors(run: Run) -> None:
    import warnings

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with run.window(model, optimizer) as step:
            loss = model(torch.randn(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
