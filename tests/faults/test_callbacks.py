"""No error of the callbacks' recorder reaches the training of a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from tb_memplugin.callbacks.recorder import StepRecorder
from tb_memplugin.callbacks.recorder import Training as LibraryTraining
from tests.faults.sweep import Session, Training, functions_called, run, sweep
from tests.faults.test_handler import WRITTEN, HandlerSession, prepare


class RecorderSession(Session):
    """A recorder of every other step, as the callbacks for transformers and Lightning have one."""

    second_warning = HandlerSession.second_warning

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self.number = 0
        self.recorder = StepRecorder([0, 2, 4, 6], worker_name="w")
        what = LibraryTraining(lambda: str(folder), lambda: training.model, lambda: [training.optimizer])
        self.recorder.begin_training(what, 0)

    def window(self) -> None:
        before = len(WRITTEN)
        self.recorder.begin_step(self.number)
        try:
            self.training.step()
        finally:
            self.recorder.end_step()
            self.number += 2
            self.recorder.expect(self.number)
            self.windows += WRITTEN[before:]

    def close(self) -> None:
        self.recorder.end_training(raised=True)
        del self.recorder


@pytest.fixture(autouse=True)
def traces_written(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


@pytest.mark.parametrize("part", range(2))
def test_an_error_in_any_function_costs_at_most_that_window(tmp_path, part):
    fired, problems = sweep(RecorderSession, tmp_path, part, parts=16)
    assert problems == []
    assert fired > 10


@pytest.mark.parametrize(
    ("method", "error", "warnings"),
    [("forget", KeyboardInterrupt, 0), ("forget", ValueError, 1), ("_call_handler", ValueError, 1)],
)
def test_an_error_while_a_window_closes_is_told_and_leaves_no_function_of_torch_replaced(
    tmp_path, method, error, warnings
):
    called = functions_called(RecorderSession, tmp_path / "called")
    function = next(
        name for name in called if name.startswith("callbacks/recorder.py") and name.endswith(method)
    )
    one = run(RecorderSession, tmp_path / "failing", function, error("injected"))
    assert (one.fired, one.left, len(one.warnings)) == (True, {}, warnings)
