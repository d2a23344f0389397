"""Calls of modules are watched from outside: models, their copies and compiled code are as without us."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.profiler import profile

from tb_memplugin import IterationReport, MemoryTracer, memory_trace_handler
from tb_memplugin.record import module_calls
from tb_memplugin.record.beside_compiler import not_compiled_alone
from tb_memplugin.record.module_calls import ModuleCalls
from tb_memplugin.record.torch_private.autograd import saved_names
from tests.record.signals import free_after_signal, interrupts, raise_signal
from tests.watched import has_hooks, is_watched

PATCHED = "_call_impl", "_compiled_call_impl"


def reported(model, folder):
    return IterationReport(model, console=Console(file=io.StringIO()))


def traced(model, folder):
    return MemoryTracer().trace(model)


def profiled(model, folder):
    handler = memory_trace_handler(folder, model=model)
    return profile(profile_memory=True, on_trace_ready=handler)


@pytest.fixture(params=[reported, traced, profiled])
def watching(request, tmp_path):
    return lambda model: request.param(model, tmp_path)


def test_a_model_can_be_saved_whole_and_loads_without_this_package(watching):
    model, saved = nn.Sequential(nn.Linear(4, 3)), io.BytesIO()
    with watching(model):
        model(torch.ones(2, 4)).sum().backward()
        torch.save(model, saved)
    assert b"tb_memplugin" not in saved.getvalue()
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_parameters_and_gradients_can_be_swapped_between_steps(watching):
    """As `Module.to` does with this setting, and for tensors of subclasses: it refuses weak references."""
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with watching(model):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight.dtype is torch.float32


def test_a_copy_calls_nobody(watching):
    model = nn.Sequential(nn.Linear(4, 3))
    with watching(model):
        model(torch.ones(2, 4)).sum().backward()
        copied = copy.deepcopy(model)
    assert not has_hooks(copied)
    assert torch.equal(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_is_made_as_without_us_and_the_hooks_of_both_stay(watching):
    model, told = nn.Sequential(nn.Linear(4, 3)), []
    x = torch.ones(2, 4)
    with watching(model):
        before = [list(one._forward_pre_hooks) + list(one._forward_hooks) for one in model.modules()]
        script = torch.jit.script(model)
        assert torch.equal(script(x), model(x))
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))
        handle = model.register_forward_hook(lambda *_: told.append("the user's"))
        model(x)
        handle.remove()
        assert [list(one._forward_pre_hooks) + list(one._forward_hooks) for one in model.modules()] == before
    assert told == ["the user's"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_that_is_the_model_is_reported():
    model: torch.nn.Module = torch.jit.script(nn.Linear(4, 3))
    with reported(model, None) as report:
        model(torch.ones(2, 4)).sum().backward()
        memory = report.record_stats()
    assert memory is not None
    assert (memory.weight_bytes, memory.gradient_bytes) == (60, 60)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


@pytest.fixture
def calls():
    watch = ModuleCalls()
    yield watch
    watch.stop()


def told_by(watch: ModuleCalls, *modules: nn.Module) -> list[str]:
    told: list[str] = []

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        told.append(f"{type(module).__name__}{tuple(map(len, args))}{sorted(kwargs)}")
        return True  # the result is needed

    def left(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        told.append(f"{type(module).__name__} gave {type(result).__name__}")

    for module in modules:
        watch.watch(module, entered, left)
    return told


def test_calls_are_told_in_their_order_with_arguments_and_result(calls):
    model = Deep()
    told = told_by(calls, model, model.inner)
    model(x=torch.ones(3, 2))
    assert told == ["Deep()['x']", "Linear(3,)[]", "Linear gave Tensor", "Deep gave Tensor"]


def test_a_call_that_raises_is_left_and_its_error_is_the_same(calls):
    model = Deep()
    told = told_by(calls, model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(3, 5))
    assert told == ["Deep(3,)[]", "Deep gave NoneType"]


class Looks(nn.Module):
    """Warns of the line that is three frames above its own, and raises."""

    def forward(self, x):
        warnings.warn("from above", stacklevel=4)
        raise ArithmeticError(x)


def seen_from_within(model) -> tuple[list[str], list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ArithmeticError) as raised:
            model(1)
    return [one.filename for one in warned], [str(entry.path) for entry in raised.traceback]


def test_no_frame_of_ours_is_among_the_callers_of_a_module(watching):
    model = nn.Sequential(Looks())
    expected = seen_from_within(model)
    with watching(model):
        assert seen_from_within(model) == expected
    assert expected[0] == [nn.Sequential.forward.__code__.co_filename]


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_the_class_is_restored_where_what_restores_it_fails_each_time(calls, monkeypatch, error):
    def fail(_):
        raise error

    model, before = nn.Identity(), {name: vars(nn.Module)[name] for name in PATCHED}
    calls.watch_all(lambda *_: None, lambda *_: None)
    assert all(vars(nn.Module)[name] is not before[name] for name in PATCHED)
    monkeypatch.setattr(type(module_calls._patch), "take_off", fail)
    calls.stop()
    assert {name: vars(nn.Module)[name] for name in PATCHED} == before
    assert model(1) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_at_the_end_of_a_call_reaches_the_program_and_ends_the_watch(calls, error):
    model, reached = nn.Identity(), []

    def left(*_: object) -> None:
        raise error

    calls.watch(model, lambda *_: None, left)
    with pytest.raises(error):
        reached.append(model(1))
    assert (reached, is_watched(model)) == ([], False)


def test_a_signal_that_comes_as_a_call_ends_reaches_the_program(calls):
    model = nn.Identity()
    vars(model)["_compiled_call_impl"] = raise_signal
    for _ in range(2):
        calls.watch(model, lambda *_: None, lambda *_: None)
        with interrupts(), pytest.raises(KeyboardInterrupt):
            model()
        assert not is_watched(model)


def test_a_signal_that_comes_as_a_watched_module_is_freed_reaches_the_program(calls):
    models = [nn.Identity.__new__(nn.Identity)]  # dynamo has weak references to what `__init__` made
    vars(models[0]).update(vars(nn.Identity()))
    calls.watch(models[0], lambda *_: None, lambda *_: None)
    with interrupts(), pytest.raises(KeyboardInterrupt):
        free_after_signal(models)
    assert calls.watched == []


def test_a_class_that_torch_compiles_no_part_of_is_told(calls):
    @torch.compiler.disable
    class Own(nn.Module):
        def forward(self, x):
            return x

    model = Own()
    told = told_by(calls, model)
    model(torch.ones(3))
    assert told == ["Own(3,)[]", "Own gave Tensor"]


def test_modules_that_nobody_watches_are_called_as_ever(calls):
    told = told_by(calls, Deep())
    assert Deep()(torch.ones(1, 2)).shape == (1, 2)
    assert told == []


def test_two_watches_nest_and_one_may_stop_before_the_other(calls):
    model, second = nn.Identity(), ModuleCalls()
    order: list[str] = []
    for name, watch in (("first", calls), ("second", second)):
        watch.watch(
            model, lambda *_, name=name: order.append(name), lambda *_, name=name: order.append(f"-{name}")
        )
    model(1)
    assert order == ["first", "second", "-second", "-first"]
    calls.stop()
    order.clear()
    model(1)
    second.stop()
    model(1)
    assert order == ["second", "-second"]
    assert not is_watched(model)


def test_a_watch_that_could_not_forget_its_modules_tells_nothing_more(calls, monkeypatch):
    model = Deep()
    told = told_by(calls, model)
    with monkeypatch.context() as failing:
        failing.setattr(ModuleCalls, "_drop", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            calls.stop()
    assert not is_watched(model)
    other = ModuleCalls()
    told_by(other, nn.Identity())
    model(torch.ones(1, 2))
    other.stop()
    assert told == []


def test_who_begins_to_watch_within_a_call_is_told_of_its_end(calls):
    model, later = Deep(), ModuleCalls()
    late: list[list[str]] = []
    calls.watch(model.inner, lambda *_: late.append(told_by(later, model)), lambda *_: None)
    calls.watch(model, lambda *_: True, lambda *_: None)
    model(torch.ones(1, 2))
    later.stop()
    assert late == [["Deep gave Tensor"]]


def test_neither_a_module_nor_its_copies_hold_anything(calls):
    model = Deep()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    told = told_by(calls, model, model.inner)
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    assert {name: vars(module) for name, module in model.named_modules()} == before
    for one in (copied, pickled):
        assert not has_hooks(one)
        one(torch.ones(1, 2))
    assert told == []


def test_a_dead_module_is_forgotten_and_not_kept_alive(calls):
    model = Deep()
    told_by(calls, model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert calls.watched == []


def test_a_module_compiled_by_its_own_method_is_told_and_keeps_its_attribute(calls):
    model = Deep()
    model.compile(backend="eager")
    mine = vars(model)["_compiled_call_impl"]
    told = told_by(calls, model)
    model(torch.ones(3, 2))
    assert told == ["Deep(3,)[]", "Deep gave Tensor"]
    calls.stop()
    assert model._compiled_call_impl is mine
    assert not is_watched(nn.Identity())


def test_a_module_may_be_compiled_within_a_watch(calls):
    told = told_by(calls, model := Deep())
    calls.watch_all(lambda *_: None, lambda *_: None)
    model.compile(backend="eager")
    model(torch.ones(3, 2))
    assert told == ["Deep(3,)[]", "Deep gave Tensor"]
    calls.stop()
    assert model._compiled_call_impl is vars(model)["_compiled_call_impl"]


def test_torch_compile_neither_sees_nor_guards_the_watch():
    dynamo: Any = pytest.importorskip("torch._dynamo")
    frames = dynamo.utils.counters["frames"]

    def compiled():
        dynamo.reset()
        frames.clear()
        within = Deep()
        within.inner.register_forward_hook(lambda module, args, result: result + 1)  # torch traces the call
        return torch.compile(Deep(), backend="eager"), torch.compile(lambda x: within(x), backend="eager")

    def run(functions):
        for function in functions:
            function(torch.ones(1, 2))

    run(plain := compiled())
    run(plain)
    expected = dict(frames)
    for compile_first in (True, False):
        watch, functions = ModuleCalls(), compiled()
        if compile_first:
            run(functions)
        watch.watch_all(not_compiled_alone(lambda *_: None), not_compiled_alone(lambda *_: None))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(functions)
        watch.stop()
        run(functions)
        assert dict(frames) == expected
    assert not dynamo.callback.callback_handler.start_callbacks
    dynamo.reset()


def test_a_profile_with_stacks_still_names_modules(calls):
    def names():
        with profile(with_stack=True) as recorded:
            model(torch.ones(1, 2))
        return [event.name for event in recorded.events() if event.name.startswith("nn.Module")]

    model = Deep()
    expected = names()
    told_by(calls, model, model.inner)
    assert names() == expected == ["nn.Module: Deep_0", "nn.Module: Linear_0"]
    calls.stop()
    assert names() == expected


def test_torchs_encoder_keeps_its_fast_path(watching):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder, batch = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)

    def is_fast():
        with torch.no_grad(), torch.autograd.profiler.profile() as recorded:
            encoder(batch)
        return any("transformer_encoder_layer_fwd" in event.name for event in recorded.function_events)

    assert is_fast()
    with watching(encoder):
        if not torch.autograd.profiler._is_profiler_enabled:
            assert is_fast()
        else:
            with torch.no_grad():
                calls = ModuleCalls()
                inner: list[str] = []
                calls.watch(encoder.layers[0].linear1, lambda *_: inner.append("called"), lambda *_: None)
                encoder(batch)
                calls.stop()
                assert inner == []  # the fast path computes it within one operator


def test_the_class_of_an_autograd_function_is_not_kept_alive():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    node = Twice.apply(torch.ones(2, requires_grad=True)).grad_fn
    assert saved_names(type(node)) == saved_names(type(node))
    reference = weakref.ref(Twice)
    del node, Twice
    gc.collect()
    assert reference() is None


def test_who_begins_to_watch_as_a_call_begins_is_told_of_it_and_of_the_calls_in_it():
    model, told = nn.Sequential(nn.Linear(4, 3)), []
    first, second = ModuleCalls(), ModuleCalls()

    def begin(*_):
        first.stop()
        for module in model.modules():
            second.watch(
                module, lambda module, *_: told.append(module), lambda module, *_: told.append(module)
            )

    first.watch_all(begin, lambda *_: told.append("stopped"))
    model(torch.ones(2, 4))
    second.stop()
    model(torch.ones(2, 4))
    assert told == [model, model[0], model[0], model]
