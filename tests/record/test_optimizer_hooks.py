"""A tracer may begin and end on one thread while an optimizer steps on another."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer

from tb_memplugin import MemoryTracer
from tb_memplugin.record import beside_compiler, optimizer_hooks
from tb_memplugin.record.optimizer_hooks import StepHooks
from tb_memplugin.trace import Phase

torch_optimizer: Any = optimizer


@pytest.mark.parametrize("number", [0, 1])
def test_a_handle_that_raises_leaves_no_other_hook_and_no_patch(monkeypatch, number):
    before, handles = torch_optimizer.chain, []

    def noting(register):
        def note(hook):
            handles.append(register(hook))
            return handles[-1]

        return note

    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        monkeypatch.setattr(torch_optimizer, name, noting(getattr(torch_optimizer, name)))
    hooks = StepHooks(lambda *_: None, lambda *_: None, lambda *_: None)
    with monkeypatch.context() as failing:
        failing.setattr(handles[number], "remove", lambda: 1 / 0)
        hooks.remove()
    tables = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    assert [len(table) for table in tables] == [1 - number, number]
    assert torch_optimizer.chain is before
    handles[number].remove()


def test_hooks_whose_end_failed_are_off_and_stay_off_when_compiled_code_has_run(monkeypatch):
    steps = list[object]()
    stepping = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    hooks, other = (StepHooks(lambda *_, each=each: steps.append(each), lambda *_: None) for each in "ab")
    with monkeypatch.context() as failing:
        failing.setattr(beside_compiler, "remove", lambda _: 1 / 0)
        hooks.remove()
    beside_compiler._set_tracing(True)
    beside_compiler._set_tracing(False)
    stepping.step()
    other.remove()
    stepping.step()
    assert steps == ["b"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_that_could_not_be_taken_off_go_in_a_second_way(monkeypatch, error):
    before = torch_optimizer.chain
    hooks, other = (StepHooks(lambda *_: None, lambda *_: None, lambda *_: None) for _ in range(2))

    def fail(_):
        raise error

    with monkeypatch.context() as failing, suppress(KeyboardInterrupt):
        failing.setattr(StepHooks, "take_off", fail)
        hooks.remove()
    tables = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    assert [len(table) for table in tables] == [1, 1]
    assert torch_optimizer.chain is not before
    other.remove()
    assert [len(table) for table in tables] == [0, 0]
    assert torch_optimizer.chain is before


def test_a_hook_that_could_not_be_removed_finds_that_its_recorder_is_over(monkeypatch):
    model, tracer = nn.Linear(4, 3), MemoryTracer()
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.trace(model):
        stepping.step()
        recording: Any = tracer._running
        monkeypatch.setattr(StepHooks, "remove", lambda _: 1 / 0)
        (left,) = optimizer_hooks._on
    stepping.step()
    assert [left] == optimizer_hooks._on
    assert len(recording.layers.optimizer) == 1
    left.take_off()


def test_hooks_come_and_go_while_an_optimizer_is_among_its_hooks():
    before, model = torch_optimizer.chain, nn.Linear(4, 3)
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    inside, may_go_on, errors = threading.Event(), threading.Event(), []

    def users_hook(*_):
        inside.set()
        assert may_go_on.wait(60)

    def step():
        try:
            stepping.step()
        except RuntimeError as error:
            errors.append(error)

    with MemoryTracer().trace(model):
        register = torch_optimizer.register_optimizer_step_pre_hook
        handles = register(users_hook), register(lambda *_: None)  # the first waits, so the second is to come
        thread = threading.Thread(target=step)
        thread.start()
        assert inside.wait(60)
        with MemoryTracer().trace(model):
            may_go_on.set()
            thread.join()
        for handle in handles:
            handle.remove()
    assert errors == []
    assert torch_optimizer.chain is before
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


class Skipping(torch.optim.SGD):
    """Copies a gradient of 12 floats, and calls a step that raises."""

    def step(self, closure: Any = None) -> Any:
        self.copy = self.param_groups[0]["params"][0].grad.clone()
        with suppress(ZeroDivisionError):
            torch.optim.SGD(self.param_groups[0]["params"]).step(lambda: 1 / 0)


def test_a_step_whose_inner_step_raises_begins_where_it_began():
    """The copy is from the step, before the inner one."""
    model, tracer = nn.Linear(4, 3), MemoryTracer()
    skipping = Skipping(model.parameters())
    with tracer.trace(model, skipping):
        model(torch.ones(1, 4)).sum().backward()
        skipping.step()
    blocks = tracer.trace_result().allocations
    assert blocks.phase[blocks.address == skipping.copy.data_ptr()][-1] == Phase.OPTIMIZER


def test_hooks_that_an_error_beside_the_compiler_took_off_are_back_when_compiled_code_ends(monkeypatch):
    class Callback:
        def __bool__(self):
            raise ValueError

    hooks, registered = StepHooks(None, lambda *_: None), torch_optimizer._global_optimizer_post_hooks
    with monkeypatch.context() as during:
        during.setattr(beside_compiler, "_original_entry", lambda _: None)
        beside_compiler._enter_compiled(Callback())
        assert len(registered) == 0
        beside_compiler._enter_compiled(None)
        assert len(registered) == 1
    hooks.remove()
    assert len(registered) == 0


def test_code_that_only_keeps_the_compiler_away_changes_no_patch(monkeypatch):
    """torch does so twice in each step of its optimizers."""
    hooks, changes = StepHooks(None, lambda *_: None), list[str]()
    for name in ("put_on", "take_off"):
        monkeypatch.setattr(hooks, name, lambda name=name: changes.append(name))
    monkeypatch.setattr(beside_compiler, "_original_entry", lambda _: None)
    for callback in (None, None, len, len, None, None):
        beside_compiler._enter_compiled(callback)
    assert changes == ["take_off", "put_on"]
    monkeypatch.undo()
    hooks.remove()
