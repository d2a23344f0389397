"""No error of the monitor reaches the training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tb_memplugin import MemoryMonitor
from tb_memplugin.record import monitor as monitor_module
from tb_memplugin.record.steps import recording
from tb_memplugin.record.steps.counters import ProcessCounters
from tb_memplugin.store.reader import read_recordings
from tests.faults.sweep import Session, Training, sweep
from tests.record.signals import free_after_signal, interrupts, raise_signal


class MonitorSession(Session):
    """A monitor that writes every step when it has ended. What it returns of a step is compared."""

    boundary = ()
    second_warning = ("store/worker_folder.py:__init__",)  # the folder stays claimed, another one is used

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self.monitor = MemoryMonitor(folder, "w", flush_seconds=1000)
        self.monitor.step()

    def window(self) -> None:
        with self.monitor.phase("training"):
            self.training.step()
        step = self.monitor.step()
        self.monitor.flush()
        if step is not None:
            names = tuple(phase.name for phase in step.phases)
            self.windows.append((names, tuple(one.device for one in step.devices)))

    def close(self) -> None:
        self.monitor.close()


def test_ctrl_c_as_an_unclosed_monitor_is_freed_reaches_the_program_and_its_steps_are_written(tmp_path):
    monitors = [MemoryMonitor(tmp_path, "w", flush_seconds=1000)]
    monitors[0].step()
    with interrupts(), pytest.raises(KeyboardInterrupt):
        free_after_signal(monitors)
    assert [watched.figures.steps.tolist() for watched in read_recordings(str(tmp_path)).watched] == [[0]]


def interrupt_return(number, function):
    """Raise a KeyboardInterrupt as this call of the monitor returns. Return whether there was one."""
    returned = []

    def trace(frame, event, _):
        code = frame.f_code
        is_ours = code.co_filename in (monitor_module.__file__, recording.__file__)
        if not is_ours or code.co_name == "<genexpr>":  # Python ignores what a generator raises that is freed
            return None
        if event == "return":
            returned.append(frame)
            if len(returned) == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_as_any_call_in_a_flush_returns_loses_no_step(tmp_path):
    number, interrupted = 0, True
    while interrupted:
        number += 1
        folder = tmp_path / str(number)
        with MemoryMonitor(folder, "w", flush_seconds=1000) as monitor:
            monitor.step()
            interrupted = interrupt_return(number, monitor.flush)
            monitor.step()
        (watched,) = read_recordings(str(folder)).watched
        assert watched.figures.steps.tolist() == [0, 1]
    assert number > 10


def test_a_program_that_interrupts_steps_again_and_again_is_watched_on(tmp_path, monkeypatch):
    monitor = MemoryMonitor(tmp_path, "w", flush_seconds=1000)
    with monkeypatch.context() as patched, interrupts():
        patched.setattr(ProcessCounters, "read", lambda _: raise_signal())
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                monitor.step()
    assert monitor.step() is not None


@pytest.mark.parametrize("always", [False, True], ids=["once a window", "at every call"])
def test_an_error_in_any_function_costs_at_most_that_step(tmp_path, always):
    fired, problems = sweep(MonitorSession, tmp_path, every_error=True, always=always)
    assert problems == []
    assert fired > 100
