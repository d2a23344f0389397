"""torch's functions around a profiler's window are patched while somebody listens, and given back."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import profile

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


def test_a_profile_with_a_listeners_handler_starts_no_other_listener(alone):
    class Handler:
        def __call__(self, _: profile) -> None: ...

    heard: tuple[list[str], list[str]] = [], []
    handlers = Handler(), Handler()
    listeners = [Listener(each) for each in heard]
    for listener, handler in zip(listeners, handlers, strict=True):
        profiler_windows.listen(listener, handler)
    with profile(on_trace_ready=handlers[1]):
        torch.ones(1)
    assert heard == (["stop"], ["start", "stop"])
    with profile(on_trace_ready=lambda _: None):
        torch.ones(1)
    assert heard == (["stop", "start", "stop"], ["start", "stop", "start", "stop"])
