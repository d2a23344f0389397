"""torch's functions around a profiler's window are patched while somebody listens, and given back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import profile

from tb_memplugin import combine_handlers
from tb_memplugin.record import profiler_windows


class Listener:
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def start(self) -> None:
        self.heard.append("start")

    def stop(self) -> None:
        self.heard.append("stop")

    def fail(self, where: str, error: BaseException) -> None:
        self.heard.append(f"{where}: {error}")


@pytest.fixture
def alone(monkeypatch):
    """Nobody else listens: torch's functions are stand-ins here, and the list of listeners is empty."""
    order: list[str] = []
    monkeypatch.setattr(profiler_windows, "_originals", None)
    monkeypatch.setattr(profiler_windows, "_listeners", type(profiler_windows._listeners)())
    monkeypatch.setattr(autograd_profiler, "_run_on_profiler_start", lambda: order.append("torch's start"))
    monkeypatch.setattr(autograd_profiler, "_run_on_profiler_stop", lambda: order.append("torch's stop"))
    return order


def functions():
    return autograd_profiler._run_on_profiler_start, autograd_profiler._run_on_profiler_stop


def test_a_listener_hears_of_each_window_before_torchs_own_functions(alone):
    listener, before = Listener(alone), functions()
    profiler_windows.listen(listener)
    with profile():
        torch.ones(1)
    profiler_windows.stop_listening(listener)
    assert alone == ["start", "torch's start", "stop", "torch's stop"]
    assert functions() == before


def test_a_listener_that_fails_is_told_so_itself_and_torch_goes_on(alone):
    class Failing(Listener):
        def start(self) -> None:
            raise ValueError("injected")

    listeners = [Failing(alone), Listener(alone)]
    profiler_windows.listen(listeners[0])
    profiler_windows.listen(listeners[1])
    autograd_profiler._run_on_profiler_start()
    assert sorted(alone[:2]) == ["start", "the start of a profiler: injected"]
    assert alone[2:] == ["torch's start"]


def test_torch_has_its_functions_back_when_the_last_listener_dies(alone):
    first, second, before = Listener(alone), Listener(alone), functions()
    profiler_windows.listen(first)
    profiler_windows.listen(second)
    del first
    assert functions() != before
    del second
    assert functions() == before


def test_a_dead_listener_that_could_not_be_removed_is_no_warning_and_goes_with_the_next(
    alone, monkeypatch, caplog
):
    before = functions()
    with monkeypatch.context() as failing:
        failing.setattr(profiler_windows, "_drop", lambda _: 1 / 0)
        profiler_windows.listen(Listener(alone))  # which dies at once
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert functions() != before
    listener = Listener(alone)
    profiler_windows.listen(listener)
    profiler_windows.stop_listening(listener)
    assert functions() == before


def test_a_patch_that_came_later_stays_and_still_calls_torch(alone):
    listener = Listener(alone)
    profiler_windows.listen(listener)
    ours = autograd_profiler._run_on_profiler_start
    autograd_profiler._run_on_profiler_start = lambda: ours()
    theirs = autograd_profiler._run_on_profiler_start
    profiler_windows.stop_listening(listener)
    assert autograd_profiler._run_on_profiler_start is theirs
    theirs()
    assert alone == ["torch's start"]


class Handler:
    def __call__(self, _: profile) -> None: ...

    def called_by_a_method(self, prof: profile) -> None:
        self(prof)


of_a_global: Handler | None = None


def calls_a_global(prof: profile) -> None:
    def call() -> None:
        if of_a_global is not None:
            of_a_global(prof)

    call()


def by_a_global(handler: Handler) -> Callable[[profile], None]:
    global of_a_global
    of_a_global = handler
    return calls_a_global


CALLS: dict[str, Callable[[Handler], Any]] = {
    "the handler": lambda handler: handler,
    "combined": lambda handler: combine_handlers(lambda _: None, combine_handlers(handler)),
    "a closure": lambda handler: lambda prof: handler(prof),
    "a default": lambda handler: lambda prof, own=handler: own(prof),
    "a partial": lambda handler: partial(lambda own, prof: own(prof), handler),
    "a list": lambda handler: lambda prof, every=[handler]: [own(prof) for own in every],
    "a method": lambda handler: handler.called_by_a_method,
    "a global": by_a_global,
}


@pytest.mark.parametrize("how", CALLS)
def test_a_profile_that_calls_a_listeners_handler_starts_no_other_with_a_handler(alone, how):
    heard: tuple[list[str], list[str], list[str]] = [], [], []
    handlers = Handler(), Handler(), None
    listeners = [Listener(each) for each in heard]
    for listener, handler in zip(listeners, handlers, strict=True):
        profiler_windows.listen(listener, handler)
    with profile(on_trace_ready=CALLS[how](handlers[1])):
        torch.ones(1)
    assert heard == (["stop"], ["start", "stop"], ["start", "stop"])


def test_of_a_profile_that_calls_both_handlers_both_listeners_hear(alone):
    heard: tuple[list[str], list[str]] = [], []
    handlers = Handler(), Handler()
    listeners = [Listener(each) for each in heard]
    for listener, handler in zip(listeners, handlers, strict=True):
        profiler_windows.listen(listener, handler)
    with profile(on_trace_ready=combine_handlers(*handlers)):
        torch.ones(1)
    assert heard == (["start", "stop"], ["start", "stop"])


@pytest.mark.parametrize("hidden", [False, True])
def test_where_it_is_not_known_what_a_profile_calls_every_listener_hears(alone, hidden):
    """As where one is among more than is searched: the others may be, too."""
    heard: tuple[list[str], list[str]] = [], []
    handlers = Handler(), Handler()
    listeners = [Listener(each) for each in heard]
    for listener, handler in zip(listeners, handlers, strict=True):
        profiler_windows.listen(listener, handler)
    many = [handlers[0], *({number: "not searched"} for number in range(profiler_windows.MOST_SEARCHED))]
    with profile(on_trace_ready=lambda _: many if hidden else None):
        torch.ones(1)
    assert heard == (["start", "stop"], ["start", "stop"])
