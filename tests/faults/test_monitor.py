"""No error of the monitor reaches the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tb_memplugin import MemoryMonitor
from tb_memplugin.store.reader import read_recordings
from tests.faults.sweep import Session, Training, sweep
from tests.record.signals import free_after_signal, interrupts


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


@pytest.mark.parametrize("always", [False, True], ids=["once a window", "at every call"])
def test_an_error_in_any_function_costs_at_most_that_step(tmp_path, always):
    fired, problems = sweep(MonitorSession, tmp_path, every_error=True, always=always)
    assert problems == []
    assert fired > 100
