"""Modules and loops that look at themselves, or that fail when looked at."""

from __future__ import annotations

import inspect
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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
def objects_that_note_each_look(run: Run) -> None:
    """Objects, a model and tensors that hold memory, and raise or note it when code of theirs is called."""
    seen: list[str] = []

    def spied(self, *args, **kwargs):
        name = sys._getframe(1).f_code.co_name
        seen.append(name)
        raise RuntimeError(name)

    class Holds:
        def __init__(self, tensor):
            self.tensor = tensor

        __class__ = property(spied)
        __eq__ = __bool__ = __len__ = __iter__ = __getattr__ = __repr__ = spied

        def __hash__(self):
            return spied(self)

    class Holder(dict):
        items = keys = values = __iter__ = __len__ = __contains__ = __bool__ = spied

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.held = nn.Linear(8, 4), [Holds(torch.ones(8))]

        def forward(self, x):
            return self.layer(x) + self.held[0].tensor.mean()

        named_parameters = named_buffers = named_modules = named_children = children = modules = spied
        parameters = buffers = __eq__ = __bool__ = __len__ = __iter__ = __repr__ = spied
        __hash__ = nn.Module.__hash__

    class Wrapper(torch.Tensor):
        """A tensor without memory of its own."""

        backing: torch.Tensor

        @staticmethod
        def __new__(cls, inner):
            wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
            wrapper.backing = inner
            return wrapper

        __tensor_flatten__ = __eq__ = __len__ = __iter__ = __getattr__ = spied

        @classmethod
        def __torch_dispatch__(cls, function, *_):
            seen.append(str(function))
            raise RuntimeError(function)

    for name in ("untyped_storage", "stride", "grad", "device", "layout", "is_leaf"):
        setattr(Wrapper, name, property(spied))
    table = Holder()
    dict.__setitem__(table, 0, torch.ones(5))
    kept = [Holds(torch.ones(3)), table, Wrapper(torch.ones(4)), torch.empty(9, device="meta")]
    model = Model()
    dying = [torch.ones(6)]
    last_seen = weakref.ref(dying[0])
    with run.window({"": model}, torch.optim.SGD(model.layer.parameters(), 0.1), keep=False) as step:
        dying.clear()
        run.value(last_seen() is None)
        run.value(model(torch.ones(2, 8)))
        step()
    run.value(seen)
    run.value(len(kept))


class Functions(TorchFunctionMode):
    """Notes what torch calls `__torch_function__` for."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__qualname__", str(function)))
        return function(*args, **(kwargs or {}))


def _steps(
    run: Run, model: nn.Module, inputs: Callable[[], torch.Tensor], inner: bool, seen: list[str]
) -> None:
    """Train in a window: with a mode of the program's in it, or around it."""
    optimizer = torch.optim.Adam(model.parameters())

    def train_step():
        optimizer.zero_grad()
        loss = model(inputs()).square().mean()
        loss.backward()
        optimizer.step()
        torch.zeros(3).set_(torch.ones(3).untyped_storage())
        (torch.eye(3).to_sparse() * 2).coalesce()
        _ = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2
        return loss

    train_step()
    outer, within = (nullcontext(), Functions(seen)) if inner else (Functions(seen), nullcontext())
    with outer, run.window(model, optimizer) as step, within:
        for _ in range(2):
            run.value(train_step().as_subclass(torch.Tensor).detach())
            step()
    run.value(seen)


@program("hostile")
def function_mode_in_the_window(run: Run) -> None:
    _steps(run, mlp(), lambda: torch.randn(4, 8), inner=True, seen=[])


@program("hostile")
def function_mode_around_the_window(run: Run) -> None:
    _steps(run, mlp(), lambda: torch.randn(4, 8), inner=False, seen=[])


@program("hostile")
def tensors_with_their_own_functions(run: Run) -> None:
    """Weights, buffers and inputs of a class that notes each look at it."""
    seen: list[str] = []

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__qualname__", str(function)))
            return super().__torch_function__(function, types, args, kwargs or {})

    for name in ("untyped_storage", "stride", "size", "data_ptr", "element_size", "numel", "storage_offset"):
        setattr(Noted, name, _noting(seen, name, getattr(torch.Tensor, name)))
    for name in ("grad", "device", "dtype", "shape", "layout", "is_nested", "is_leaf", "grad_fn", "nbytes"):
        own = getattr(torch.Tensor, name)
        setattr(Noted, name, property(_noting(seen, name, own.__get__), getattr(own, "__set__", None)))
    model = mlp()
    model[0].weight = nn.Parameter(torch.randn(16, 8).as_subclass(Noted))
    model.register_buffer("kept", torch.ones(4).as_subclass(Noted))
    _steps(run, model, lambda: torch.randn(4, 8).as_subclass(Noted), inner=True, seen=seen)


def _noting(seen: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args, **kwargs):
        seen.append(f"own {name}")
        return function(*args, **kwargs)

    return noting


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
def calls_patched_in_the_window(run: Run) -> None:
    """Libraries that count calls replace torch's functions, and put back what they found, perhaps later."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[str] = []
    alone = nn.Module.__call__, torch.optim.SGD.step, nn.Module._call_impl
    with run.window(model, optimizer) as step:
        call, sgd_step, implementation = nn.Module.__call__, torch.optim.SGD.step, nn.Module._call_impl

        def counting(self, *args, **kwargs):
            calls.append(type(self).__name__)
            return call(self, *args, **kwargs)

        def counting_step(self, *args, **kwargs):
            calls.append("step")
            return sgd_step(self, *args, **kwargs)

        nn.Module.__call__ = counting  # type: ignore[method-assign]
        torch.optim.SGD.step = counting_step  # type: ignore[method-assign]
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            run.value(loss)
            step()
    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.optim.SGD.step = sgd_step  # type: ignore[method-assign]
    nn.Module._call_impl = implementation  # type: ignore[method-assign]
    run.value(calls)
    run.value(model(torch.ones(1, 8)))
    run.value((call, sgd_step, implementation) == alone)


@program("hostile")
def functions_that_are_inspected_and_pickled(run: Run) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with run.window(model, optimizer) as step:
        for function in (
            nn.Module.__call__,
            nn.Module._call_impl,
            nn.Module.forward,
            torch.optim.Adam.step,
            torch.optim.Optimizer.zero_grad,
            torch.Tensor.backward,
            torch.autograd.backward,
            torch.get_rng_state,
            torch.load,
            type(model).__call__,
        ):
            run.value(getattr(function, "__qualname__", ""))
            run.value(getattr(function, "__module__", ""))
            run.value(str(inspect.signature(function)))
            run.value(inspect.getsourcefile(inspect.unwrap(function)))
            try:
                run.value(str(pickle.dumps(function)))
            except (pickle.PicklingError, AttributeError) as error:
                run.value(type(error).__name__)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
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
