"""No error of an iteration report or of the callbacks' recorder reaches the training."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from tb_memplugin import IterationReport
from tests.faults.sweep import Session, Training, sweep


class ReportSession(Session):
    """A report of every iteration. What it returns is compared, without times."""

    boundary = (
        "record/tracer/mode.py:__torch_dispatch__",
        "record/tracer/mode.py:_should_skip_dynamo",
        "record/tracer/kernels.py:run",
        "record/tracer/recording.py:see_memory",
        "record/tracer/recording.py:_get_rng_state",
        "record/tracer/recording.py:_report",
        "record/iterations/watch.py:note",
    )
    second_warning = (  # the folder stays claimed, another one is used
        "store/worker_folder.py:__init__",
    )
    unobserved = ("record/iterations/report.py:clear",)

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        console = Console(file=io.StringIO())
        self.report = IterationReport(
            training.model, optimizer=training.optimizer, console=console, csv=folder / "csv", logdir=folder
        )

    def window(self) -> None:
        try:
            self.training.step()
        finally:
            memory = self.report.record_stats()
        if memory is not None and memory.iteration > 0:
            self.windows.append([(one.name, one.bytes, one.gradient_bytes) for one in memory.weights])

    def close(self) -> None:
        self.report.close()
        del self.report


def test_an_error_in_any_function_costs_at_most_that_iteration(tmp_path):
    fired, problems = sweep(ReportSession, tmp_path)
    assert problems == []
    assert fired > 100
