"""No error of the recorder of `tb-memplugin run` reaches the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tb_memplugin.launch.recorder import ProgramRecorder
from tb_memplugin.launch.start import Settings
from tests.faults.sweep import Session, Training, sweep
from tests.faults.test_callbacks import RecorderSession
from tests.faults.test_handler import WRITTEN, prepare


class ProgramSession(Session):
    """A program whose steps are each recorded in a window of its own."""

    second_warning = RecorderSession.second_warning

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self.recorder = ProgramRecorder(
            Settings(str(folder), "run", 0, steps=(range(-1, 0),), stacks=False, every_step=False)
        )
        self.recorder.begin()
        self.recorder._stepped(training.optimizer)  # step 0 has no names of layers
        self.is_open = False

    def window(self) -> None:
        if self.is_open:  # Ctrl-C left the step without an end: the next one's ends it
            self.training.step()
        before, number = len(WRITTEN), self.recorder._step
        self.recorder._steps._ranges[:] = [range(number, number + 1)]
        self.is_open = True
        try:
            self.recorder._recorder.begin_step(number)
            self.training.step()
            self.is_open = False
        finally:
            self.windows += WRITTEN[before:]

    def close(self) -> None:
        self.recorder.end()
        del self.recorder


@pytest.fixture(autouse=True)
def traces_written(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


@pytest.mark.parametrize("part", [0, 6])
def test_an_error_in_a_function_costs_at_most_that_window(tmp_path: Path, part: int) -> None:
    """Two sixteenths of the functions, one has the end of a step; `python -m tests.faults run` tries all."""
    fired, problems = sweep(ProgramSession, tmp_path, part, parts=16)
    assert problems == []
    assert fired > 10
